"""When a consumer receives batches itself."""

from __future__ import annotations

import pytest

from hetero.reader.receiver_choice import ReceiverChoice


class Consumer:
    """A loop with a simulated clock.

    Args:
        away_s: Time between two calls of ``next``.
    """

    def __init__(self, *, away_s: float) -> None:
        self.choice = ReceiverChoice()
        self.away_s = away_s
        self._now_s = 100.0

    def pause(self, seconds: float) -> None:
        """Stay away for some time."""
        self._now_s += seconds

    def loop(self, num_batches: int) -> float:
        """Take some batches. Return the part of them whose requests the consumer should send itself."""
        num_own = 0
        for _ in range(num_batches):
            self.choice.come_back(self._now_s)
            self._now_s += 0.001
            num_own += self.choice.is_consumer
            self.choice.leave(self._now_s)
            self._now_s += self.away_s
        return num_own / num_batches


@pytest.mark.parametrize(("away_s", "is_own"), [(0.0, True), (0.0004, True), (0.001, False), (0.05, False)])
def test_consumer_receives_if_it_is_hardly_away(away_s: float, is_own: bool) -> None:
    consumer = Consumer(away_s=away_s)
    consumer.loop(20)
    assert consumer.loop(1000) == is_own


def test_fetchers_receive_first() -> None:
    assert Consumer(away_s=0.0).loop(10) == 0.0


def test_another_choice_is_made_when_the_loop_has_changed() -> None:
    consumer = Consumer(away_s=0.05)
    consumer.loop(100)
    consumer.away_s = 0.0001
    consumer.loop(40)
    assert consumer.loop(100) == 1.0
    consumer.away_s = 0.05
    consumer.loop(40)
    assert consumer.loop(100) == 0.0


def test_loop_that_computes_after_every_fourth_batch_is_slow() -> None:
    consumer = Consumer(away_s=0.0)
    received = []
    for _ in range(200):
        received.append(consumer.loop(4))
        consumer.pause(0.1)
    assert sum(received) == 0


def test_pauses_between_passes_do_not_make_a_loop_slow() -> None:
    consumer = Consumer(away_s=0.0001)
    shares = []
    for _ in range(20):
        shares.append(consumer.loop(200))
        consumer.pause(60.0)
    assert sum(shares) / 20 > 0.8

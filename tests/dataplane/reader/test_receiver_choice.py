"""When a consumer receives batches itself."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable

import pytest

from hetero.reader.receiver_choice import ReceiverChoice


class Consumer:
    """A loop by a clock of its own.

    Args:
        next_s: Returns how long ``next`` takes, given whether the consumer has received the batch itself.
        away_s: Time between two calls.
        in_flight: Number of batches that are requested ahead.
    """

    def __init__(self, next_s: Callable[[bool], float], *, away_s: float = 0.01, in_flight: int = 4) -> None:
        self.choice = ReceiverChoice()
        self.next_s = next_s
        self.away_s = away_s
        self._now_s = 100.0
        self._requested = deque([False] * in_flight)

    def pause(self, seconds: float) -> None:
        """Stay away for so long."""
        self._now_s += seconds

    def loop(self, seconds: float = math.inf, *, num_batches: int = 10**9) -> float:
        """Run for so long. Return the part of its batches that it has received itself."""
        end_s, received = self._now_s + seconds, []
        while self._now_s < end_s and len(received) < num_batches:
            was_consumer = self._requested.popleft()
            received.append(was_consumer)
            self.choice.come_back(self._now_s)
            self._now_s += self.next_s(was_consumer)
            self._requested.append(self.choice.is_consumer)
            self.choice.leave(self._now_s, was_consumer=was_consumer)
            self._now_s += self.away_s
        return sum(received) / len(received)


@pytest.mark.parametrize(("own_s", "fetched_s", "is_own"), [(0.0004, 0.0006, True), (0.0007, 0.0003, False)])
def test_the_quicker_way_is_chosen(own_s: float, fetched_s: float, is_own: bool) -> None:
    consumer = Consumer(lambda is_consumer: own_s if is_consumer else fetched_s)
    consumer.loop(3.0)
    assert abs(consumer.loop(300.0) - is_own) < 0.1


def test_the_consumer_receives_if_there_is_little_difference() -> None:
    consumer = Consumer(lambda is_consumer: 0.001 if is_consumer else 0.00095)
    consumer.loop(3.0)
    assert consumer.loop(300.0) > 0.9


def test_slow_loop_leaves_batches_to_fetchers() -> None:
    consumer = Consumer(lambda is_consumer: 0.0001 if is_consumer else 0.0003, away_s=0.05)
    assert consumer.loop(100.0) == 0.0
    consumer.away_s = 0.001
    consumer.loop(3.0)
    assert consumer.loop(100.0) > 0.9
    consumer.away_s = 0.05
    consumer.loop(3.0)
    assert consumer.loop(100.0) == 0.0


def test_another_choice_is_made_when_the_loop_has_changed() -> None:
    consumer = Consumer(lambda is_consumer: 0.0004 if is_consumer else 0.0006)
    consumer.loop(100.0)
    consumer.next_s = lambda is_consumer: 0.0007 if is_consumer else 0.0003
    consumer.loop(20.0)
    assert consumer.loop(100.0) < 0.1


@pytest.mark.parametrize("away_s", [0.0005, 0.001, 0.015])
def test_trials_take_a_small_part_of_the_time(away_s: float) -> None:
    consumer = Consumer(lambda is_consumer: 0.0004 if is_consumer else 0.0006, away_s=away_s, in_flight=100)
    consumer.loop(30.0)
    assert consumer.loop(300.0) > 0.9


def test_nothing_is_tried_while_the_consumer_is_hardly_away() -> None:
    consumer = Consumer(lambda is_consumer: 0.0004 if is_consumer else 0.0001, away_s=0.0001)
    consumer.loop(1.0)
    assert consumer.loop(100.0) == 1.0


def test_loop_that_computes_after_every_fourth_batch_is_slow() -> None:
    consumer = Consumer(lambda is_consumer: 0.002 if is_consumer else 0.0001, away_s=0.0)
    received = []
    for _ in range(200):
        received.append(consumer.loop(num_batches=4))
        consumer.pause(0.1)
    assert sum(received[20:]) == 0


def test_pauses_between_passes_do_not_make_a_loop_slow() -> None:
    consumer = Consumer(lambda is_consumer: 0.0004 if is_consumer else 0.0006, away_s=0.001)
    shares = []
    for _ in range(20):
        shares.append(consumer.loop(0.2))
        consumer.pause(60.0)
    assert sum(shares[2:]) / 18 > 0.7


def test_one_long_wait_does_not_decide() -> None:
    waits = itertools.cycle([0.05, *[0.0] * 9])
    consumer = Consumer(lambda is_consumer: (0.0004 if is_consumer else 0.0006) + next(waits))
    consumer.loop(3.0)
    assert consumer.loop(200.0) > 0.9


def test_one_long_wait_in_a_trial_does_not_decide() -> None:
    waits = itertools.cycle([0.05, *[0.0] * 60])
    consumer = Consumer(lambda is_consumer: (0.0007 if is_consumer else 0.0003) + next(waits))
    consumer.loop(3.0)
    assert consumer.loop(200.0) < 0.1


def test_a_few_slow_batches_do_not_decide() -> None:
    waits = itertools.cycle([*[0.0006] * 40, *[0.0] * 40])
    consumer = Consumer(lambda is_consumer: (0.0004 if is_consumer else 0.0006) + next(waits), away_s=0.001)
    consumer.loop(3.0)
    assert consumer.loop(200.0) > 0.9


def test_batches_that_wait_at_the_begin_of_a_slow_loop_do_not_make_it_quick() -> None:
    consumer = Consumer(lambda is_consumer: 0.0001 if is_consumer else 0.0003, away_s=0.001)
    received = [consumer.loop(0.01)]
    consumer.away_s = 0.05
    received.append(consumer.loop(100.0))
    assert received == [0.0, 0.0]


def test_large_batches_which_only_fetchers_receive_end_no_trial() -> None:
    choice = ReceiverChoice()
    for number in range(10_000):
        choice.come_back(number * 0.001)
        choice.leave(number * 0.001 + 0.0005, was_consumer=False)
    assert choice.is_consumer

"""When a consumer receives medium batches itself."""

from __future__ import annotations

from itertools import pairwise

from hetero.dataplane.reader.pace import ConsumerPace


class Consumer:
    """A loop that waits for each batch and then is away, by a clock of its own."""

    def __init__(self) -> None:
        self.pace = ConsumerPace()
        self._now_s = 100.0

    def loop(self, *, waits_s: float, away_s: float, seconds: float = 3.0) -> bool:
        """Run for so long. Return whether the consumer is hurried then."""
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            self.pace.come_back(self._now_s)
            self._now_s += waits_s
            self.pace.leave(self._now_s)
            self._now_s += away_s
        return self.pace.is_hurried


def test_consumer_that_only_waits_is_hurried() -> None:
    consumer = Consumer()
    assert not consumer.pace.is_hurried
    assert consumer.loop(waits_s=0.001, away_s=0.0001)


def test_consumer_that_trains_is_not_hurried() -> None:
    consumer = Consumer()
    assert not consumer.loop(waits_s=0.001, away_s=0.05)
    assert consumer.loop(waits_s=0.001, away_s=0.0001)
    assert not consumer.loop(waits_s=0.001, away_s=0.05)


def test_consumer_is_hurried_again_after_a_pause() -> None:
    # With one limit of 0.25, the pause ended it for good: while fetchers receive, the same consumer is away for a third
    # of its time, because they take turns to run Python.
    consumer = Consumer()
    assert consumer.loop(waits_s=0.0004, away_s=0.00005)
    consumer.loop(waits_s=0.0004, away_s=3.0, seconds=0.001)
    assert not consumer.loop(waits_s=0.0004, away_s=0.0002, seconds=0.001)
    assert consumer.loop(waits_s=0.0004, away_s=0.0002)


def test_share_decides() -> None:
    consumer = Consumer()
    assert not consumer.loop(waits_s=0.0002, away_s=0.0008)
    assert consumer.loop(waits_s=0.0005, away_s=0.0005)
    assert not consumer.loop(waits_s=0.00025, away_s=0.00075)


def test_consumer_between_the_limits_does_not_change_with_each_batch() -> None:
    consumer = Consumer()
    found = [consumer.loop(waits_s=0.0004, away_s=0.0006, seconds=0.0005) for _ in range(1000)]
    assert 2 <= sum(one is not other for one, other in pairwise(found)) <= 4

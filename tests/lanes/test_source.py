"""The iterators of one process: what they keep, compare and close."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hetero.batches.failures import Cancelled
from hetero.batches.lanes.pieces import LanePiece, LaneRules, PieceReport
from hetero.batches.lanes.source import LaneSource
from hetero.errors import DatasetError
from hetero.plans.lanes import LaneLayout, LanePart

CHUNK = 4


class Arrays:
    """The numbers from ``first`` on as arrays. Counts those that are still in memory, and the open iterators."""

    def __init__(self, num_samples: int, first: int = 0) -> None:
        self.num_samples, self.first = num_samples, first
        self.made: list[weakref.ref[Any]] = []
        self.num_open = 0

    def hetero_split(self, lane: int, num_lanes: int) -> Arrays:
        return self

    def __iter__(self) -> Iterator[Any]:
        self.num_open += 1
        try:
            for number in range(self.first, self.first + self.num_samples):
                sample = np.array(number)
                self.made.append(weakref.ref(sample))
                yield sample
        finally:
            self.num_open -= 1

    @property
    def num_kept(self) -> int:
        return sum(each() is not None for each in self.made)


class OneUse(Arrays):
    """Opens its file once."""

    def __iter__(self) -> Iterator[Any]:
        if self.made:
            raise OSError("the pipe is closed")
        return super().__iter__()


def seed_all(key: int) -> None:
    """Do nothing, because the numbers are not random."""


class Lanes:
    """Takes samples of one source."""

    def __init__(self, source: Any, guarantee: Any = "replay", num_lanes: int = 1) -> None:
        self.source = LaneSource(source, name="arrays", info_seed=0)
        layout = LaneLayout(num_lanes=num_lanes, chunk_samples=CHUNK)
        self.rules = LaneRules(layout=layout, guarantee=guarantee, end="rest")

    def take(
        self,
        place: int,
        known: tuple[int, bytes] = (0, b""),
        *,
        lane: int = 0,
        epoch: int = 0,
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[list[int], PieceReport]:
        part = LanePart(lane=lane, place=place, num_samples=CHUNK)
        samples, report = self.source.take(
            self.rules,
            LanePiece(part=part, known=known),
            seed=0,
            epoch=epoch,
            seed_all=seed_all,
            host="here",
            cancelled=cancelled,
        )
        return [int(sample) for sample in samples], report


def known_at(place: int) -> tuple[int, bytes]:
    """Return what a rank knows that has received the samples before a place."""
    lanes, known = Lanes(Arrays(place)), (0, b"")
    for begin in range(0, place, CHUNK):
        _, report = lanes.take(begin, known)
        known = begin + CHUNK, report.chain
    return known


@pytest.mark.parametrize("known", [(8000, b""), known_at(8000)], ids=["without a digest", "with a digest"])
def test_resumed_lane_keeps_no_sample_that_was_delivered(known: tuple[int, bytes]) -> None:
    source = Arrays(10**5)
    assert Lanes(source).take(8000, known)[0] == [8000, 8001, 8002, 8003]
    assert source.num_kept <= CHUNK


def test_requests_that_overtake_others_leave_their_samples() -> None:
    source = Arrays(10**5)
    lanes = Lanes(source)
    known = known_at(80)
    assert [lanes.take(place, known)[0][0] for place in (96, 80, 92, 84, 88)] == [96, 80, 92, 84, 88]


def test_lane_that_is_shorter_than_before_is_refused() -> None:
    with pytest.raises(DatasetError, match="lane 0 gave other samples before sample 80"):
        Lanes(Arrays(50)).take(80, known_at(80))


def test_lane_that_had_ended_has_no_more_samples() -> None:
    place, chain = known_at(48)
    assert Lanes(Arrays(48)).take(80, (place, chain))[0] == []


def test_cancelled_request_leaves_the_comparison_to_the_next_one() -> None:
    lanes, known = Lanes(Arrays(10**5, first=1000)), known_at(80)
    times = itertools.count()
    with pytest.raises(Cancelled):
        lanes.take(80, known, cancelled=lambda: next(times) == 20)
    with pytest.raises(DatasetError, match="gave other samples before sample 80"):
        lanes.take(80, known)


def test_at_most_once_takes_no_sample_of_what_was_delivered() -> None:
    source = Arrays(10)
    assert Lanes(source, "at-most-once").take(80, (80, b""))[0] == [0, 1, 2, 3]


def test_iterators_of_two_passes_are_open() -> None:
    source = Arrays(10**5)
    lanes = Lanes(source, num_lanes=64)
    for epoch in range(10):
        for lane in range(4):
            lanes.take(0, lane=lane, epoch=epoch)
        assert source.num_open <= 8


def test_source_that_can_be_read_once_is_named() -> None:
    with pytest.raises(DatasetError, match="lane 0 cannot be read a second time: OSError: the pipe is closed"):
        Lanes(OneUse(100)).take(0)

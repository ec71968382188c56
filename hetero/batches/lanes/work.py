"""The samples of a batch, as places in lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import dataset_error
from hetero.batches.indexed import IndexedWork
from hetero.batches.lanes.pieces import LanePiece, LaneReport, LaneRules
from hetero.batches.request import BatchRequest, ChoosePositions
from hetero.batches.skips import FailedSamples
from hetero.spec import Index

__all__ = ["LaneSamples", "LaneWork"]


class LaneSamples(list[Any]):
    """The samples of a batch, with their report."""

    report: LaneReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneWork:
    """The samples at some places of lanes. See `hetero.batches.request.Work` for the methods."""

    pieces: tuple[LanePiece, ...]
    rules: LaneRules

    @property
    def may_be_hedged(self) -> bool:
        """Return False, because a second endpoint would have to begin the lanes anew."""
        return False

    @property
    def may_be_checked(self) -> bool:
        """Return whether the lanes can be read again. With ``at-most-once`` they go on wherever they are."""
        return self.rules.guarantee != "at-most-once"

    @property
    def num_samples(self) -> int:
        """Samples of all parts."""
        return sum(piece.part.num_samples for piece in self.pieces)

    @property
    def labels(self) -> Sequence[Index]:
        """Lane and place of each sample."""
        return [
            (piece.part.lane, piece.part.place + number)
            for piece in self.pieces
            for number in range(piece.part.num_samples)
        ]

    @property
    def numbered(self) -> IndexedWork:
        """The samples as numbers, which do not depend on snapshots."""
        runs = [
            np.arange(piece.part.place, piece.part.place + piece.part.num_samples, dtype=np.int64)
            * self.rules.layout.num_all_lanes
            + piece.part.lane
            for piece in self.pieces
        ]
        return IndexedWork(np.concatenate(runs) if runs else np.zeros(0, np.int64))

    def key(self, seed: int, epoch: int, position: int) -> int:
        """Return the 64-bit random key of the whole batch."""
        return self.numbered.key(seed, epoch, position)

    def compute(
        self,
        built: BuiltDataset,
        request: BatchRequest,
        *,
        host: str,
        cancelled: Callable[[], bool] | None = None,
        failed: FailedSamples | None = None,
        positions: ChoosePositions | None = None,
    ) -> LaneSamples:
        """Return the samples in order. At the end of a lane there are fewer than `num_samples`."""
        if built.lanes is None:
            raise dataset_error(
                f"ConfigError: data set {built.name!r} has an index, so it needs no lanes\n"
                "  Leave out guarantee=, lanes= and end=.",
                dataset=built.name,
                host=host,
                stage="build",
            )
        found = LaneSamples()
        reports = []
        for piece in self.pieces:
            samples, report = built.lanes.take(
                self.rules,
                piece,
                seed=request.seed,
                epoch=request.epoch,
                seed_all=built.seed,
                host=host,
                cancelled=cancelled,
            )
            found.extend(samples)
            reports.append(report)
        found.report = LaneReport(tuple(reports))
        return found

    def part(self, positions: Sequence[int]) -> LaneWork:
        """Return the work for the samples at some positions that follow each other. Profiles measure it."""
        begin, end = min(positions, default=0), max(positions, default=-1) + 1
        pieces = []
        for piece in self.pieces:
            count = piece.part.num_samples
            first, last = max(0, begin), min(count, end)
            if first < last:
                part = replace(piece.part, place=piece.part.place + first, num_samples=last - first)
                pieces.append(replace(piece, part=part))
            begin, end = begin - count, end - count
        return replace(self, pieces=tuple(pieces))

    @property
    def no_indices(self) -> str:
        """Why hosts cannot measure the samples, and how many processes a plan may count on. For profiles."""
        num_lanes = self.rules.layout.num_lanes
        return (
            f"the data set is an iterable. For more than {num_lanes} processes in all, pass more lanes= to the loader"
        )

    def unending(self) -> LaneWork:
        """Return the work for any samples of the same lanes, which go on and never end. Profiles measure it."""
        # With at-most-once, a lane goes on at its known place with a new iterator.
        pieces = tuple(replace(piece, known=(piece.part.place, b"")) for piece in self.pieces)
        return replace(self, pieces=pieces, rules=replace(self.rules, guarantee="at-most-once", end="wrap"))

    def delivered(self, report: LaneReport) -> LaneWork:
        """Return the work of the samples that the batch has, without what was known before."""
        pieces = tuple(
            LanePiece(part=replace(piece.part, num_samples=done.num_samples))
            for piece, done in zip(self.pieces, report.pieces, strict=True)
        )
        return replace(self, pieces=pieces)

    def samples_by_source(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many samples are of each source, by their names in the order of the data set."""
        counts = dict.fromkeys(names, 0)
        for piece in self.pieces:
            counts[names[piece.part.lane // self.rules.layout.num_lanes]] += piece.part.num_samples
        return counts

    def digest(self) -> bytes:
        """Return a 16-byte hash of the samples in order, for the ledger."""
        return self.numbered.digest()

    def samples_sum(self, *, leave_out_repeats: bool) -> bytes:
        """Return a 16-byte sum over the samples, for the ledger."""
        return self.numbered.samples_sum(leave_out_repeats=leave_out_repeats)

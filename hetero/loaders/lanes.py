"""The lanes of one loader: what each batch takes of them, where each may be begun anew, and where a pass ends."""

from __future__ import annotations

import itertools
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetero.batches.lanes.iterator import Snapshot
from hetero.batches.lanes.pieces import End, Guarantee, LanePiece, LaneReport, LaneRules, PieceReport
from hetero.batches.lanes.states import decode_state, encode_state
from hetero.batches.lanes.work import LaneWork
from hetero.batches.request import BatchRequest
from hetero.errors import ConfigError
from hetero.loaders.prefetching import Batches, EpochRequests
from hetero.loaders.sampling import PlannedBatch, Shard
from hetero.metrics.steps import Extent
from hetero.plans.lanes import LaneLayout, LanePart

__all__ = ["LaneBatches", "LaneOptions", "Lanes", "RankExchange"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """Options of a loader of lanes. The framework's loader class has checked them."""

    guarantee: Guarantee
    end: End
    num_lanes: int | None
    """Lanes over all ranks. None: those of a loaded state, or ``lanes_per_rank`` for each rank."""
    lanes_per_rank: int
    """Lanes of each rank without ``num_lanes``."""
    chunk_samples: int | None
    """See `LaneLayout`. None: that of a loaded state, or the batch size."""
    snapshot_every: int
    """See `LaneRules`."""
    drops_rest: bool
    """Whether batches at the end of lanes that lack samples are left out."""
    allow_version_change: bool
    """Whether a state of another version of the source's library may be loaded."""


class RankExchange(Protocol):
    """What the ranks of a loader tell each other."""

    def agree(self, epoch: int, step: int, end: int | None) -> int | None:
        """Return the lowest end that a rank passes. Wait until all ranks have called this for the step."""

    def first(self, epoch: int, lane: int, digest: str) -> int:
        """Return the first lane that was passed with this digest of its first samples. Does not wait."""

    def share(self, state: str) -> None:
        """Let other ranks read the snapshots of this rank. Does not wait."""

    def shared(self) -> list[str]:
        """Return what other ranks have shared. Does not wait."""


_KEPT_SNAPSHOTS = 4
"""Snapshots of a lane that are kept, because a state may be taken when the loop has not got the latest batches
(tests/tf/test_lanes.py). With fewer, a resumed lane begins at place 0."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """What is known of a lane. Another thread may read it, so it is not changed."""

    snapshots: tuple[Snapshot, ...] = ()
    """The latest snapshots, the oldest first."""
    known: tuple[int, bytes] | None = None
    """The place after the last delivered sample, and the chain there."""

    def snapshot(self, place: int) -> Snapshot | None:
        """Return the latest snapshot up to a place."""
        return next((each for each in reversed(self.snapshots) if each.place <= place), None)

    def until(self, place: int) -> _Lane:
        """Return what is known up to a place."""
        snapshot = self.snapshot(place)
        known = self.known if self.known is not None and self.known[0] <= place else None
        return _Lane(() if snapshot is None else (snapshot,), known)


class Lanes:
    """The lanes of one loader, in its latest pass. For one thread.

    Args:
        options: The loader's options.
        name: Name of the loader, for messages.
        extent: Counts how often a lane is begun anew.
    """

    def __init__(self, options: LaneOptions, *, name: str, extent: Extent) -> None:
        self.options = options
        self.exchange: RankExchange | None = None
        """Connects the ranks. None for a single rank."""
        self.end_step: int | None = None
        """The first step that not all ranks have. None if it is not known."""
        self._name = name
        self._extent = extent
        self._loaded: Mapping[str, Any] | None = None
        self._layout: LaneLayout | None = None
        self._lanes: dict[int, _Lane] = {}
        self._dry: set[int] = set()
        """Lanes without further samples, with ``end="rest"``."""
        self._firsts: dict[str, int] = {}
        self._first_step = 0
        self._num_steps = 1
        """Steps between two chunks of a lane."""
        self._agreed = 0
        """Steps up to this one exist on all ranks."""
        self._has_said_end = False
        self._epoch = 0

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Use the lanes of a loaded state in the next pass."""
        self._loaded = state

    def begin(self, *, epoch: int, step: int, batch_size: int, shard: Shard) -> None:
        """Begin a pass.

        Args:
            epoch: Number of the pass.
            step: Its first step. More than 0 only for a loaded state.
            batch_size: Samples of a batch on each rank.
            shard: This rank.

        Raises:
            ConfigError: If the lanes cannot be divided over the ranks, or the state has other lanes.
        """
        loaded, self._loaded = self._loaded, None
        options = self.options
        num_lanes = options.num_lanes or (loaded and loaded["num_lanes"]) or options.lanes_per_rank * shard.world_size
        chunk_samples = options.chunk_samples or (loaded and loaded["chunk_samples"]) or batch_size
        layout = LaneLayout(num_lanes=num_lanes, chunk_samples=chunk_samples)
        self._lanes, self._dry, self._firsts, self.end_step = {}, set(), {}, None
        if step and loaded is not None:
            if (num_lanes, chunk_samples) != (loaded["num_lanes"], loaded["chunk_samples"]):
                raise ConfigError(
                    f"the loaded state is within an epoch of {loaded['num_lanes']} lanes and {loaded['chunk_samples']} "
                    f"samples of a lane in a row, this loader has {num_lanes} and {chunk_samples}\n"
                    "  Pass the same lanes= and chunk_samples=. At the end of an epoch they may change."
                )
            self._lanes = _unpacked(loaded["snapshots"])
        layout.check(batch_size=batch_size, world_size=shard.world_size)
        self._layout, self._epoch = layout, epoch
        self._first_step, self._agreed = step, step - 1
        self._num_steps = layout.steps_between(global_batch=batch_size * shard.world_size)

    def plan(self, step: int, *, batch_size: int, world_size: int, ranks: range) -> Iterator[PlannedBatch]:
        """Yield the batches of some ranks from a step on, until the end is known."""
        layout = self._layout
        assert layout is not None
        num_groups = max(1, layout.num_lanes * layout.chunk_samples // batch_size)
        for number in itertools.count(step):
            for rank in ranks:
                if (self.end_step is not None and number >= self.end_step) or len(self._dry) >= layout.num_lanes:
                    return
                parts = layout.parts(number, batch_size=batch_size, rank=rank, world_size=world_size)
                pieces = tuple(self._piece(part) for part in parts if part.lane not in self._dry)
                if pieces:
                    work = LaneWork(pieces=pieces, rules=self._rules(layout))
                    yield PlannedBatch(number, work, rank, lane=(number * world_size + rank) % num_groups)
            # A rank whose lanes are dry has nothing to wait for.
            if self._dry and self._dry >= self._lanes_of(ranks, batch_size, world_size, layout):
                return

    def received(self, work: LaneWork, report: LaneReport, *, step: int) -> None:
        """Record what the report of a batch says of its lanes.

        Raises:
            ConfigError: If two lanes give the same samples.
        """
        for piece, done in zip(work.pieces, report.pieces, strict=True):
            part = piece.part
            snapshots = self._lanes.get(part.lane, _Lane()).snapshots
            if done.snapshot is not None:
                snapshots = (*snapshots, done.snapshot)[-_KEPT_SNAPSHOTS:]
            self._lanes[part.lane] = _Lane(snapshots, (part.place + done.num_samples, done.chain))
            if done.first:
                self._check_first(part.lane, done.first.hex())
            # Without anything known, the lane was begun for the first time, by a request that has overtaken others.
            if done.begun_at is not None and (piece.known is not None or piece.snapshot is not None):
                self._note_begun(part, done.begun_at)
            self._note_end(part, done, step)

    def agree(self, step: int) -> None:
        """Find out whether all ranks have a step. `received` was called for it. May wait for other ranks."""
        assert self._layout is not None
        if self.exchange is None:
            return
        if self.options.end != "stop":
            # No rank waits here. Each one tells its snapshots after each chunk of its lanes.
            if (step + 1) % self._num_steps == 0:
                self.exchange.share(_packed(self._lanes))
            return
        if step <= self._agreed:
            return
        self.exchange.share(_packed(self._lanes))
        self.end_step = self.exchange.agree(self._epoch, step, self.end_step)
        # Once each lane was read, the reports say whether all lanes have another chunk.
        num_steps = self._num_steps
        self._agreed = step + num_steps if step >= self._first_step + num_steps - 1 else step

    def agree_on_end(self) -> None:
        """Tell other ranks of the end of this rank's lanes, if they still expect a batch of it."""
        if self.end_step == self._agreed + 1:
            self.agree(self.end_step)

    def is_over(self, step: int) -> bool:
        """Return whether a pass ends before a step."""
        return self.end_step is not None and step >= self.end_step

    def note_end(self, steps: int | None) -> None:
        """Log how a pass ended, once for each loader.

        Raises:
            ConfigError: If it has no step at all.
        """
        if steps == 0 and self.options.end == "stop" and self._layout is not None:
            raise ConfigError(
                f"loader {self._name:.40}: a pass has no step, because a lane of {self._layout.num_lanes} has not even "
                f"{self._layout.chunk_samples} samples\n"
                '  Pass the loader a smaller lanes=, a smaller batch_size, or end="rest".'
            )
        if self._has_said_end or self.options.end != "stop" or steps is None:
            return
        self._has_said_end = True
        logger.info(
            "loader %s: the pass ended after %d steps, because a lane has no further %d samples. What the other lanes "
            'have is left out. With end="rest", all samples are delivered, and with end="wrap" lanes begin again',
            self._name,
            steps,
            0 if self._layout is None else self._layout.chunk_samples,
        )

    def state(self, position: int) -> dict[str, Any] | None:
        """Return the lanes as plain values, with the snapshots of all ranks as far as they are known here.

        Args:
            position: Samples of the pass that the state counts, over all ranks.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        layout = self._layout
        if layout is None:
            return None
        others: dict[int, _Lane] = {}
        for text in [] if self.exchange is None else self.exchange.shared():
            others |= _unpacked(text)
        return {
            "num_lanes": layout.num_lanes,
            "chunk_samples": layout.chunk_samples,
            "snapshots": _packed(
                {lane: each.until(layout.place(lane, position)) for lane, each in (others | dict(self._lanes)).items()}
            ),
        }

    def _rules(self, layout: LaneLayout) -> LaneRules:
        options = self.options
        return LaneRules(
            layout=layout, guarantee=options.guarantee, end=options.end, snapshot_every=options.snapshot_every
        )

    def _piece(self, part: LanePart) -> LanePiece:
        lane = self._lanes.get(part.lane, _Lane()).until(part.place)
        snapshot = lane.snapshot(part.place)
        if snapshot is not None and self.options.allow_version_change:
            snapshot = replace(snapshot, library="")
        return LanePiece(part=part, snapshot=snapshot, known=lane.known)

    def _lanes_of(self, ranks: range, batch_size: int, world_size: int, layout: LaneLayout) -> set[int]:
        """Return the lanes that some ranks read."""
        return {
            part.lane
            for step in range(self._num_steps)
            for rank in ranks
            for part in layout.parts(step, batch_size=batch_size, rank=rank, world_size=world_size)
        }

    def _note_end(self, part: LanePart, done: PieceReport, step: int) -> None:
        """Record that a lane has no further samples."""
        assert self._layout is not None
        if self.options.end == "rest" and done.num_samples < part.num_samples:
            self._dry.add(part.lane)
        if self.options.end == "stop":
            end = step if done.num_samples < part.num_samples else None
            if end is None and done.num_left is not None and done.num_left < self._layout.chunk_samples:
                end = step + self._num_steps
            if end is not None:
                self.end_step = end if self.end_step is None else min(end, self.end_step)

    def _note_begun(self, part: LanePart, begun_at: int) -> None:
        """Log that a lane was begun anew within a pass."""
        self._extent.num_lanes_begun += 1
        if self.options.guarantee == "at-most-once":
            logger.warning(
                "loader %s: lane %d was begun anew. What was in flight at its sample %d is lost",
                self._name,
                part.lane,
                part.place,
            )
        else:
            logger.info(
                "loader %s: lane %d was begun anew at sample %d, and %d samples were passed over",
                self._name,
                part.lane,
                begun_at,
                part.place - begun_at,
            )

    def _check_first(self, lane: int, digest: str) -> None:
        """Reject a lane whose first samples are those of another lane.

        Raises:
            ConfigError: If they are the same.
        """
        other = self._firsts.setdefault(digest, lane)
        if other == lane and self.exchange is not None:
            other = self.exchange.first(self._epoch, lane, digest)
        if other != lane:
            raise ConfigError(
                f"lanes {other} and {lane} of loader {self._name:.40} give the same samples, because the source does "
                "not divide itself\n"
                "  Let it take every n-th sample or shard, with id and num_workers of torch's get_worker_info(). Or "
                "give it\n  a method hetero_split(self, lane, num_lanes) that returns the part of a lane."
            )


def _packed(lanes: Mapping[int, _Lane]) -> str:
    """Return what is known of lanes as text, with the latest snapshot of each."""
    rows = []
    for number, lane in sorted(lanes.items()):
        snapshot = lane.snapshots[-1] if lane.snapshots else None
        fields = snapshot and (snapshot.place, snapshot.chain, snapshot.state, snapshot.library)
        rows.append((number, lane.known, fields))
    return b64encode(encode_state(rows)).decode()


def _unpacked(text: str) -> dict[int, _Lane]:
    """Return the lanes in a text of `_packed`.

    Raises:
        ConfigError: If it is damaged.
    """
    try:
        found = {}
        for number, known, fields in decode_state(b64decode(text)):
            snapshots: tuple[Snapshot, ...] = ()
            if fields is not None:
                place, chain, state, library = fields
                snapshots = (Snapshot(place=int(place), chain=bytes(chain), state=bytes(state), library=str(library)),)
            found[int(number)] = _Lane(snapshots, None if known is None else (int(known[0]), bytes(known[1])))
        return found
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"the lanes of a loader's state are damaged: {error}") from error


class LaneBatches:
    """The batches of a pass, without their reports. See `Batches`.

    Args:
        batches: The batches with their reports.
        lanes: The loader's lanes.
        requests: The requests of the batches.
    """

    def __init__(self, batches: Batches, lanes: Lanes, requests: EpochRequests) -> None:
        self._batches = batches
        self._lanes = lanes
        self._requests = requests
        self.request: BatchRequest | None = None
        """Request of the batch that `next` returned or raised an exception for. Its work is what the batch has."""

    def __next__(self) -> Any:
        """Return the next batch. Block until it has arrived, and until all ranks have theirs."""
        while True:
            try:
                answer = next(self._batches)
            except StopIteration:
                self._lanes.agree_on_end()
                self._lanes.note_end(self._lanes.end_step)
                raise
            except BaseException:
                self.request = self._batches.request
                raise
            request = self._batches.request
            assert request is not None
            assert isinstance(request.work, LaneWork)
            batch, content = answer
            report = LaneReport.from_array(content)
            report.check(request.work.pieces)
            step = request.position
            self._lanes.received(request.work, report, step=step)
            self._lanes.agree(step)
            if self._lanes.is_over(step):
                self._lanes.note_end(step)
                self.close()
                raise StopIteration
            work = request.work.delivered(report)
            least = request.work.num_samples if self._lanes.options.drops_rest else 1
            if work.num_samples >= least:
                self.request = replace(request, work=work)
                return batch
            self._requests.passed()  # the lanes of this batch are over

    def __iter__(self) -> LaneBatches:
        return self

    @property
    def is_open(self) -> bool:
        """Whether another batch may come."""
        return self._batches.is_open

    @property
    def may_be_kept(self) -> bool:
        """Whether this object may stay open between two passes. The lanes of the next pass are not known yet."""
        return False

    def close(self) -> None:
        """Discard the batches in flight. Idempotent."""
        self._batches.close()

"""The lanes of one loader: what each batch takes of them, where each may be begun anew, and where a pass ends."""

from __future__ import annotations

import itertools
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

from hetero.batches.lanes.iterator import Snapshot, checked_chain
from hetero.batches.lanes.pieces import LanePiece, LaneReport, LaneRules, PieceReport
from hetero.batches.lanes.states import decode_state, encode_state
from hetero.batches.lanes.work import LaneWork
from hetero.errors import ConfigError
from hetero.loaders.lanes.options import LaneOptions
from hetero.loaders.pipeline import LoaderPipeline
from hetero.loaders.sampling import PlannedBatch, Shard
from hetero.loaders.state import LoaderState
from hetero.metrics.steps import Extent
from hetero.plans.lane_mixtures import MixedLanes
from hetero.plans.lanes import LaneLayout, LanePart

__all__ = ["LanePasses", "Lanes", "RankExchange", "facts_of_lanes"]

logger = logging.getLogger(__name__)


class RankExchange(Protocol):
    """What the ranks of a loader tell each other."""

    def agree(self, step: int, end: int | None) -> int | None:
        """Return the lowest end that a rank passes. Wait until all ranks have called this for the step."""

    def first(self, lane: int, digest: str) -> int:
        """Return the first lane that was passed with this digest of its first samples. Does not wait."""

    def fail(self) -> None:
        """Let `agree` raise an error on all other ranks. Does not wait."""

    def share(self, state: str) -> None:
        """Let other ranks read the snapshots of this rank. Does not wait."""

    def shared(self) -> list[str]:
        """Return what other ranks have shared. Does not wait."""


_KEPT = 4
"""Snapshots and chains of a lane that are kept, because a state may be taken when the loop has not got the latest
batches (tests/tf/test_lanes.py). If the loop is further behind, a resumed lane begins at place 0."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """What is known of a lane. Another thread may read it, so it is not changed."""

    snapshots: tuple[Snapshot, ...] = ()
    """The latest snapshots, the oldest first."""
    known: tuple[tuple[int, bytes], ...] = ()
    """Places after the last samples of the latest batches, each with the chain there. The oldest first."""

    def until(self, place: int) -> _Lane:
        """Return what is known up to a place: the last two snapshots, and the last chain."""
        snapshots = tuple(each for each in self.snapshots if each.place <= place)
        known = tuple(each for each in self.known if each[0] <= place)
        return _Lane(snapshots[-2:], known[-1:])


class LanePasses:
    """The lanes of one loader: those of its latest passes, and those of a loaded state.

    Args:
        options: The loader's options.
        name: Name of the loader, for messages.
        extent: Counts how often a lane is begun anew.
    """

    def __init__(self, options: LaneOptions, *, name: str, extent: Extent) -> None:
        self._options = options
        self._name = name
        self._extent = extent
        self._passes: dict[int, Lanes] = {}
        """The two latest passes by their numbers. TensorFlow begins a pass while it delivers the one before."""
        self._loaded: tuple[int, Mapping[str, Any]] | None = None
        """A loaded state whose pass has not begun, and the number of this pass."""
        self._stated: Mapping[str, Any] = {}
        """The latest loaded state. Its lanes hold for later passes too."""

    def load(self, epoch: int, state: Mapping[str, Any] | None) -> None:
        """Use the lanes of a loaded state in the pass with a number."""
        self._loaded = None if state is None else (epoch, state)
        self._stated = state or {}

    def begin(
        self,
        *,
        epoch: int,
        step: int,
        batch_size: int,
        shard: Shard,
        exchange: RankExchange | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """Begin a pass.

        Args:
            epoch: Number of the pass.
            step: Its first step.
            batch_size: Samples of a batch on each rank.
            shard: This rank.
            exchange: Connects the ranks. None for a single rank.
            names: Names of the sources of the mixture. Empty without one.

        Raises:
            ConfigError: If the lanes cannot be divided over the ranks, the state has other lanes, or the data set lacks
                a source of the mixture.
        """
        options, stated = self._options, self._stated
        num_lanes = options.num_lanes or stated.get("num_lanes") or options.lanes_per_rank * shard.world_size
        chunk_samples = options.chunk_samples or stated.get("chunk_samples") or batch_size
        known: dict[int, _Lane] = {}
        mixed: Mapping[str, Any] | None = None
        loaded = self._loaded
        if loaded is not None and step and loaded[0] == epoch:
            found = loaded[1]["num_lanes"], loaded[1]["chunk_samples"]
            if found != (num_lanes, chunk_samples):
                raise ConfigError(
                    f"the loaded state is within an epoch of {found[0]} lanes and {found[1]} samples of a lane in a "
                    f"row, this loader has {num_lanes} and {chunk_samples}\n"
                    "  Pass the same lanes= and chunk_samples=. At the end of an epoch they may change."
                )
            known, mixed = _unpacked(loaded[1]["snapshots"]), loaded[1].get("mixture")
        layout = LaneLayout(num_lanes=num_lanes, chunk_samples=chunk_samples, num_sources=max(1, len(names)))
        layout.check(batch_size=batch_size, world_size=shard.world_size)
        if options.guarantee == "at-most-once" and chunk_samples > batch_size and shard.world_size > 1:
            raise ConfigError(
                f"a pass has {chunk_samples} samples of a lane in a row, and a batch has {batch_size}, so several "
                'ranks would read a lane. With guarantee="at-most-once" each of them loses what the others get\n'
                f"  Pass chunk_samples={batch_size}. Within an epoch, use as many ranks as before."
            )
        global_batch = batch_size * shard.world_size
        mixture = options.mixture
        order = (
            layout if mixture is None else MixedLanes(layout, mixture, names, global_batch=global_batch, start=mixed)
        )
        self._passes = dict([*self._passes.items()][-1:])
        self._passes[epoch] = Lanes(
            options,
            layout,
            order,
            name=self._name,
            extent=self._extent,
            exchange=exchange,
            step=step,
            global_batch=global_batch,
            known=known,
        )
        # Only now, because another thread may ask for the state meanwhile, and a begin that fails may be tried again.
        self._loaded = None

    def of(self, epoch: int) -> Lanes:
        """Return the lanes of a pass that has begun."""
        return self._passes[epoch]

    def num_steps_of(self, num_batches: int) -> int:
        """Return how many steps of the latest pass have the first batches of this rank."""
        return next(reversed(self._passes.values())).num_steps_of(num_batches) if self._passes else num_batches

    def state(self, epoch: int, position: int) -> dict[str, Any] | None:
        """Return the lanes as plain values, with the snapshots that are known here.

        Args:
            epoch: Number of the pass.
            position: Samples of the pass that the state counts, over all ranks.
        """
        if self._loaded is not None:
            return dict(self._loaded[1])
        lanes = self._passes.get(epoch)
        return None if lanes is None else lanes.state(position)


class Lanes:
    """The lanes of one pass. For one thread, but `state` may be called in any.

    Args:
        options: The loader's options.
        layout: The lanes.
        order: Says what each batch takes of them: the layout itself, or a mixture.
        name: Name of the loader, for messages.
        extent: Counts how often a lane is begun anew.
        exchange: Connects the ranks. None for a single rank.
        step: First step of the pass.
        global_batch: Samples of a step on all ranks.
        known: What a loaded state knows of lanes.
    """

    def __init__(
        self,
        options: LaneOptions,
        layout: LaneLayout,
        order: LaneLayout | MixedLanes,
        *,
        name: str,
        extent: Extent,
        exchange: RankExchange | None,
        step: int,
        global_batch: int,
        known: Mapping[int, _Lane],
    ) -> None:
        self.options = options
        self.exchange = exchange
        self.end_step: int | None = None
        """The first step that not all ranks have. None if it is not known."""
        self.num_lanes = layout.num_lanes
        self.num_steps = layout.steps_between(global_batch=global_batch)
        """Steps between two chunks of a lane."""
        self._layout = layout
        self._rules = LaneRules(
            layout=layout, guarantee=options.guarantee, end=options.end, snapshot_every=options.snapshot_every
        )
        self._order = order
        self._name = name
        self._extent = extent
        self._first_step = step
        self._global_batch = global_batch
        # Counted now, because a mixture forgets its first steps.
        places = [order.place(lane, step * global_batch) for lane in range(layout.num_all_lanes if step else 0)]
        self._begins = dict(enumerate(places))
        """Place of each lane where the pass begins. Empty if each begins at 0."""
        self._agreed = step - 1
        """Steps up to this one exist on all ranks."""
        self._known = known
        self._lanes: dict[int, _Lane] = {}
        """What this rank has received in the pass."""
        self._dry: set[int] = set()
        """Lanes without further samples, with ``end="rest"``."""
        self._without_batch: set[int] = set()
        """Steps that have no batch of this rank, with ``end="rest"``."""
        self._num_left: dict[int, int] = {}
        """Samples that were read ahead of each lane, with ``end="stop"``. At most a chunk."""
        self._firsts: dict[str, int] = {}

    def plan(self, step: int, *, batch_size: int, world_size: int, ranks: range) -> Iterator[PlannedBatch]:
        """Yield the batches of some ranks from a step on, until the end is known."""
        num_lanes = self._layout.num_lanes
        lanes_of_batch = max(1, batch_size // self._layout.chunk_samples)
        for number in itertools.count(step):
            for rank in ranks:
                if (self.end_step is not None and number >= self.end_step) or len(self._dry) >= num_lanes:
                    return
                parts = self._order.parts(number, batch_size=batch_size, rank=rank, world_size=world_size)
                pieces = tuple(self._piece(part) for part in parts if part.lane not in self._dry)
                if pieces:
                    # Ranks that share a lane name the same group, so that one endpoint reads it.
                    group = pieces[0].part.lane % num_lanes // lanes_of_batch
                    yield PlannedBatch(number, LaneWork(pieces=pieces, rules=self._rules), rank, lane=group)
                else:
                    self._without_batch.add(number)
            # A rank whose lanes are dry has nothing to wait for.
            if self._dry and self._dry >= self._lanes_of(ranks, batch_size, world_size):
                return

    def received(self, work: LaneWork, report: LaneReport, *, step: int) -> None:
        """Record what the report of a batch says of its lanes.

        Raises:
            ConfigError: If two lanes give the same samples, or a lane ends before the step that it had announced.
        """
        for piece, done in zip(work.pieces, report.pieces, strict=True):
            part = piece.part
            snapshots, known = (before := self._lane(part.lane)).snapshots, before.known
            if done.snapshot is not None and done.snapshot not in snapshots:
                snapshots = (*snapshots, done.snapshot)[-_KEPT:]
            if done.num_samples:  # else the lane has ended somewhere before
                known = (*known, (part.place + done.num_samples, done.chain))[-_KEPT:]
            self._lanes[part.lane] = _Lane(snapshots, known)
            if done.num_left is not None:
                self._num_left[part.lane] = done.num_left
            if done.first:
                self._check_first(part.lane, done.first.hex())
            # If the rank had received nothing, the lane was begun for the first time, maybe by a later request.
            if done.begun_at is not None and piece.known[0]:
                self._note_begun(part, done.begun_at)
            self._note_end(part, done, step)
        if isinstance(self._order, MixedLanes):
            self._order.forget(step * self._global_batch)

    def pass_over(self, step: int) -> None:
        """Record that the batch of a step was empty, because its lanes are over."""
        self._without_batch.add(step)

    def num_steps_of(self, num_batches: int) -> int:
        """Return how many steps the first batches of this rank are."""
        num_steps = num_batches
        for step in sorted(self._without_batch):
            num_steps += step - self._first_step < num_steps
        return num_steps

    def agree(self, step: int) -> None:
        """Find out whether all ranks have a step. `received` was called for it. May wait for other ranks."""
        if self.exchange is None:
            return
        if self.options.end != "stop":
            # No rank waits here. Each one tells its snapshots after each chunk of its lanes.
            if (step + 1) % self.num_steps == 0:
                self.exchange.share(_packed(self._lanes))
            return
        if step <= self._agreed:
            return
        self.exchange.share(_packed(self._lanes))
        self.end_step = self.exchange.agree(step, self.end_step)
        # Once each lane was read, the reports say whether all lanes have another chunk.
        self._agreed = step + self.num_steps if step >= self._first_step + self.num_steps - 1 else step

    def agree_on_end(self) -> None:
        """Tell other ranks of the end of this rank's lanes, if they still expect a batch of it."""
        if self.end_step == self._agreed + 1:
            self.agree(self.end_step)

    def is_over(self, step: int) -> bool:
        """Return whether a pass ends before a step."""
        return self.end_step is not None and step >= self.end_step

    def lose(self) -> bool:
        """Tell ranks that wait for the same end that a batch of this rank has raised. Return whether there are any."""
        if self.exchange is None or self.options.end != "stop":
            return False
        self.exchange.fail()
        return True

    def note_end(self) -> None:
        """Log how a pass ended.

        Raises:
            ConfigError: If it was empty.
        """
        if self.options.end != "stop" or self.end_step is None:
            return
        if self.end_step == 0:
            raise ConfigError(
                f"loader {self._name:.40}: a pass has no step, because a lane of {self._layout.num_lanes} has not even "
                f"{self._layout.chunk_samples} samples\n"
                '  Pass the loader a smaller lanes=, a smaller batch_size, or end="rest".'
            )
        num_left = sum(self._num_left.values())
        logger.log(
            logging.WARNING if num_left and self._extent.num_passes <= 1 else logging.INFO,
            "loader %s: the pass ended after %d steps, because a lane has no further %d samples. At least %d samples "
            'of this rank\'s lanes are left out. With end="rest", all samples are delivered, and with end="wrap" lanes '
            "begin again",
            self._name,
            self.end_step,
            self._layout.chunk_samples,
            num_left,
        )

    def state(self, position: int) -> dict[str, Any]:
        """See `LanePasses.state`."""
        layout = self._layout
        lanes = dict(self._known)
        for text in [] if self.exchange is None else self.exchange.shared():
            lanes |= _unpacked(text)
        lanes |= dict(self._lanes)
        order = self._order
        found = {number: each.until(order.place(number, position)) for number, each in lanes.items()}
        state = {"num_lanes": layout.num_lanes, "chunk_samples": layout.chunk_samples, "snapshots": _packed(found)}
        return state | ({"mixture": order.start_before(position)} if isinstance(order, MixedLanes) else {})

    def _lane(self, number: int) -> _Lane:
        """Return what is known of a lane."""
        return self._lanes.get(number) or self._known.get(number) or _Lane()

    def _piece(self, part: LanePart) -> LanePiece:
        lane = self._lane(part.lane).until(part.place)
        # Begin before the place that is known, if possible. Then the samples in between are compared.
        begin = self._begins.get(part.lane, 0)
        known = lane.known[-1] if lane.known else (begin, b"")
        # A loaded state may know less than it counts. What is before its place must not be read from a queue again.
        if self.options.guarantee == "at-most-once":
            known = (max(begin, known[0]), b"")
        last = lane.snapshots[-1] if lane.snapshots else None
        snapshot = lane.snapshots[0] if known[1] and last and last.place == known[0] else last
        if snapshot is not None and self.options.allow_version_change:
            snapshot = replace(snapshot, library="")
        return LanePiece(part=part, snapshot=snapshot, known=known)

    def _lanes_of(self, ranks: range, batch_size: int, world_size: int) -> set[int]:
        """Return the lanes that some ranks read."""
        return {
            part.lane
            for step in range(self.num_steps)
            for rank in ranks
            for part in self._layout.parts(step, batch_size=batch_size, rank=rank, world_size=world_size)
        }

    def _note_end(self, part: LanePart, done: PieceReport, step: int) -> None:
        """Record the end of a lane."""
        if self.options.end == "rest" and done.num_samples < part.num_samples:
            self._dry.add(part.lane)
        if self.options.end == "stop":
            end = step if done.num_samples < part.num_samples else None
            if end is None and done.num_left is not None and done.num_left < self._layout.chunk_samples:
                end = step + self.num_steps
            if end is None or (self.end_step is not None and end >= self.end_step):
                return
            if self.exchange is not None and end <= self._agreed:
                raise ConfigError(
                    f"lane {part.lane} of loader {self._name:.40} ended before sample {part.place + part.num_samples}, "
                    "which it had announced, so the ranks cannot end together\n"
                    '  Its source gives fewer samples when it is begun anew. Pass end="rest" or end="wrap" for it.'
                )
            self.end_step = end

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
        # Two sources of a mixture may have the same samples.
        digest = f"{lane // self._layout.num_lanes}-{digest}"
        other = self._firsts.setdefault(digest, lane)
        if other == lane and self.exchange is not None:
            other = self.exchange.first(lane, digest)
        if other != lane:
            raise ConfigError(
                f"lanes {other} and {lane} of loader {self._name:.40} give the same samples, because the source does "
                "not divide itself\n"
                "  Let it take every n-th sample or shard, with id and num_workers of torch's get_worker_info(). Or "
                "give it\n  a method hetero_split(self, lane, num_lanes) that returns the part of a lane."
            )


def facts_of_lanes(pipeline: LoaderPipeline) -> LoaderState:
    """Return a state with the constant values of a loader of lanes. Its epoch and batches are 0."""
    options = pipeline.options
    assert options.lanes is not None
    return LoaderState(
        epoch=0,
        batches=0,
        order="lanes",
        seed=options.seed,
        global_batch=(options.batch_size or 1) * pipeline.shard().world_size,
        dataset=pipeline.dataset_name,
        arguments=pipeline.arguments_digest,
        plan=None if options.lanes.mixture is None else options.lanes.mixture.digest(),
    )


def _packed(lanes: Mapping[int, _Lane]) -> str:
    """Return what is known of lanes as text."""
    rows = [(number, lane.known, [*map(astuple, lane.snapshots)]) for number, lane in sorted(lanes.items())]
    # A limit of each state is enough here, and the text is of this job or of the script's own checkpoint.
    return b64encode(encode_state(rows, max_bytes=0)).decode()


def _unpacked(text: str) -> dict[int, _Lane]:
    """Return the lanes in a text of `_packed`.

    Raises:
        ConfigError: If it is damaged.
    """
    try:
        return {
            int(number): _Lane(
                tuple(map(Snapshot.of_row, rows)), tuple((int(place), checked_chain(chain)) for place, chain in known)
            )
            for number, known, rows in decode_state(b64decode(text), max_bytes=0)
        }
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"the lanes of a loader's state are damaged: {error}") from error

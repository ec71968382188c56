"""The feed of a dataset of an iterable. Its batches come from lanes, see `hetero.plans.lanes`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from hetero.batches.lanes.pieces import LanePiece, LaneRules
from hetero.batches.lanes.work import LaneWork
from hetero.batches.request import BatchRequest
from hetero.errors import ConfigError
from hetero.loaders.lanes.batches import LaneBatches
from hetero.loaders.lanes.passes import LanePasses, facts_of_lanes
from hetero.loaders.pipeline import LoaderOptions
from hetero.loaders.prefetching import EpochRequests
from hetero.loaders.sampling import PlannedBatch, Shard
from hetero.loaders.state import LoaderState
from hetero.plans.lanes import LaneLayout, LanePart
from hetero.spec import DatasetSpec
from hetero.tf.feed import Feed
from hetero.tf.passes import TensorFlowPass

__all__ = ["LaneFeed"]

_ENDLESS = 2**40
"""Batches of a pass whose end is not known. Places of lanes are below this number too (`hetero.wire.lanes`)."""
_INFINITE, _UNKNOWN = -1, -2  # cardinalities of tf.data


class LaneFeed(Feed):
    """Order, position and batches of one dataset of an iterable.

    Args:
        spec: The data set.
        options: Options of the loader, with `LoaderOptions.lanes`.
        num_workers: See `Feed`.
        prefetch_factor: See `Feed`.

    Raises:
        ConfigError: If several ranks would have to end at the same step.
    """

    may_add_next_epochs = False  # the end of a pass is not known before

    def __init__(
        self, spec: DatasetSpec, options: LoaderOptions, *, num_workers: int, prefetch_factor: int | None
    ) -> None:
        super().__init__(spec, options, num_workers=num_workers, prefetch_factor=prefetch_factor)
        assert options.lanes is not None
        self._options = options.lanes
        if options.lanes.end == "stop" and self.shard().world_size > 1:
            raise ConfigError(
                'end="stop" is not possible with several ranks of TensorFlow\n'
                '  Pass end="wrap" and steps_per_epoch to fit, or end="rest".'
            )
        self.lanes = LanePasses(options.lanes, name=self.name, extent=self.extent)

    def num_batches(self) -> int:
        """Return TensorFlow's number for an infinite or an unknown cardinality."""
        return _INFINITE if self._options.end == "wrap" else _UNKNOWN

    def order(self) -> Any:
        """Return what `Feed` needs of the order of a pass."""
        return _LaneOrder(self)

    def plan(self, epoch: int, shard: Shard, start: int) -> Iterator[PlannedBatch]:
        """Begin the lanes of a pass, and yield its batches on this rank."""
        self.lanes.begin(epoch=epoch, step=start, batch_size=self._batch_size, shard=shard, names=self.source_names)
        ranks = range(shard.rank, shard.rank + 1)
        return self.lanes.of(epoch).plan(start, batch_size=self._batch_size, world_size=shard.world_size, ranks=ranks)

    def probe(self) -> list[tuple[int, Any]]:
        """Return two batches of different sizes from the beginning of lane 0, each with its number of samples.

        Raises:
            ConfigError: If reading them could lose samples, or the lane is empty.
            DatasetError: If the data set raises.
        """
        if self._options.guarantee == "at-most-once":
            raise ConfigError('guarantee="at-most-once" needs element_spec=, because a batch would be lost for it')
        num_lanes = self._options.num_lanes or self._options.lanes_per_rank * self.shard().world_size
        first = self._batch_size
        sizes = (first, first // 2 if first > 1 else 2)
        requests = [self._probe_request(size, num_lanes) for size in sizes]
        with contextlib.closing(super()._open(iter(requests), on_skips=None, on_wait=lambda _: None)) as reader:
            # The report of a batch comes second.
            return [(size, answer[0]) for size, answer in zip(sizes, reader, strict=True)]

    def _probe_request(self, size: int, num_lanes: int) -> BatchRequest:
        return BatchRequest(
            spec=self.subject,
            work=LaneWork(
                pieces=(LanePiece(part=LanePart(lane=0, place=0, num_samples=size)),),
                rules=LaneRules(
                    layout=LaneLayout(
                        num_lanes=num_lanes, chunk_samples=size, num_sources=max(1, len(self.source_names))
                    ),
                    guarantee=self._options.guarantee,
                    end="rest",
                ),
            ),
            seed=self.options.seed,
            epoch=0,
            position=0,
            collate=self.collate,
            as_is=True,
            compression=self.options.compression,
            lane=0,
        )

    def state(self) -> LoaderState:
        """Return the position after the last consumed batch, with snapshots of the lanes."""
        state = super().state()
        samples = state.batches * self._batch_size * self.shard().world_size
        return dataclasses.replace(state, lanes=self.lanes.state(state.epoch, samples))

    def load_state(self, value: object) -> None:
        """Start the next pass at the position of a saved state.

        Raises:
            ConfigError: If the value is not a state, or is the state of another loader.
        """
        state = LoaderState.from_dict(value)
        if state.completed and state.batches:
            state = dataclasses.replace(state, epoch=state.epoch + 1, batches=0)
        super().load_state(state.to_dict())
        self.lanes.load(state.epoch, state.lanes)

    def facts(self) -> LoaderState:
        """Return a state with this loader's constant values. Its epoch and batches are 0."""
        return facts_of_lanes(self)

    def _open(
        self,
        requests: Iterator[BatchRequest],
        *,
        on_skips: Callable[[Any], object] | None,
        on_wait: Callable[[bool], None],
    ) -> Any:
        """Return a reader over the endpoints, whose batches come without their reports."""
        reader = super()._open(requests, on_skips=on_skips, on_wait=on_wait)
        assert isinstance(requests, EpochRequests)
        return LaneBatches(reader, self.lanes.of(requests.epochs[0].start.number), requests)

    def _note_end(self, tf_pass: TensorFlowPass) -> None:
        """Record how many batches a pass had."""
        with self.passes.hold():
            tf_pass.end_here()

    @property
    def _batch_size(self) -> int:
        return self.options.batch_size or 1


class _LaneOrder:
    """The order of one pass, see `hetero.loaders.sampling.BuiltInOrder`."""

    num_samples = None

    def __init__(self, feed: LaneFeed) -> None:
        self._feed = feed

    def num_batches(self, _: Shard) -> int:
        return _ENDLESS

    def num_global_batches(self, _: int) -> int:
        return _ENDLESS

    def batches(self, epoch: int, shard: Shard, *, start: int = 0) -> Iterator[PlannedBatch]:
        return self._feed.plan(epoch, shard, start)

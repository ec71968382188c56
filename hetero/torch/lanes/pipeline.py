"""The pipeline of a loader of an iterable. Its batches come from lanes, see `hetero.plans.lanes`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from hetero.batches.build import BuiltDataset
from hetero.control.members.directory import BATCHES
from hetero.control.rank import session as control
from hetero.documents.text import counted
from hetero.errors import ConfigError
from hetero.loaders.lanes.batches import LaneBatches
from hetero.loaders.lanes.options import LaneOptions
from hetero.loaders.lanes.passes import LanePasses, facts_of_lanes
from hetero.loaders.pipeline import LoaderOptions, is_checked, is_remote
from hetero.loaders.prefetching import Batches, EpochRequests
from hetero.loaders.sampling import PlannedBatch, Shard
from hetero.loaders.state import LoaderState, Start
from hetero.torch.lanes.exchange import StoreExchange
from hetero.torch.local import WorkerOptions
from hetero.torch.local_dataset import LocalDataset
from hetero.torch.order.ranks import RankStore
from hetero.torch.pipeline import Pipeline

__all__ = ["LanePipeline"]

logger = logging.getLogger(__name__)


class LanePipeline(Pipeline):
    """The parts of one loader of an iterable.

    Args:
        subject: A spec, or the user's iterable.
        options: The loader's options, with `LoaderOptions.lanes`.
        local: Answers requests in this process.
        workers: Options of local fetching.

    Raises:
        ConfigError: If a canary run (a short trial of the script) uses a part of the samples.
    """

    may_add_next_epochs = False  # the end of a pass is not known before
    compares_batches = False  # this process would have to read each lane from its beginning

    def __init__(self, subject: Any, options: LoaderOptions, *, local: LocalDataset, workers: WorkerOptions) -> None:
        super().__init__(subject, options, sampler_order=None, local=local, workers=workers)
        assert options.lanes is not None
        assert options.batch_size is not None
        if self._part is not None:
            raise ConfigError(
                f"loader {self.name} is of an iterable, which a canary run with --samples cannot shorten\n"
                "  to do: give the canary --channel NAME=DIR, the folder of the files, with a file for each lane "
                "at the smallest fraction. Or give the script {fraction}, and let it take that share of its files"
            )
        self._options: LaneOptions = options.lanes
        self._batch_size = options.batch_size
        self.lanes = LanePasses(options.lanes, name=self.name, extent=self.extent)
        self._exchanges: list[StoreExchange] = []
        """Those of the latest two passes."""
        self._store = RankStore("lanes", *self.kind, options.batch_size)

    def dataset_samples(self) -> int:
        """Raise an error, because the number is not known before the end."""
        return self._has_no_length()

    def num_samples(self) -> int:
        """Raise an error, because the number is not known before the end."""
        return self._has_no_length()

    def num_batches(self) -> int:
        """Raise an error, because the number is not known before the end."""
        return self._has_no_length()

    def _has_no_length(self) -> NoReturn:
        raise TypeError(f"loader {self.name} of an iterable has no len(): count steps, or use max_steps")

    def local_fingerprint(self) -> str | None:
        """Return None, because samples of an iterable cannot be probed."""
        return None

    def local_built(self) -> BuiltDataset:
        """Return the data set, built in this process."""
        return self.local.built

    def plan(self, start: Start, *, all_ranks: bool = False) -> Iterator[PlannedBatch]:
        """Yield the batches from ``start`` on."""
        shard, lanes = self.shard(), self.lanes.of(start.number)
        planned = lanes.plan(
            start.batches,
            batch_size=self._batch_size,
            world_size=shard.world_size,
            ranks=range(shard.world_size) if all_ranks else range(shard.rank, shard.rank + 1),
        )
        # `hetero check` limits a pass. It reads from each lane nevertheless, because one may be empty.
        return itertools.islice(planned, max(self.max_pass_batches, lanes.num_steps))

    def begin(self, plan: Callable[[Start], Iterator[PlannedBatch]]) -> tuple[int, Start, Iterator[PlannedBatch]]:
        """Begin a pass. Return its number, its start, and its batches."""
        self._warn_of_no_shards()
        self.progress.leave()
        number, start = self.progress.begin()
        if start.completed and start.batches:
            # The loaded state is at the end of a pass.
            if not start.may_become_next_epoch:
                return number, start, iter(())
            start = self.progress.skip_to_next_epoch()
        shard = self.shard()
        self.lanes.begin(
            epoch=start.number,
            step=start.batches,
            batch_size=self._batch_size,
            shard=shard,
            exchange=self._exchange(number),
            names=self.source_names,
        )
        self._check_workers(self.lanes.of(start.number).num_steps)
        self._warn_of_idle_endpoints(self.lanes.of(start.number).num_lanes, shard)
        self.extent.begin_pass(steps=None, num_done=0)
        return number, start, plan(start)

    def _check_workers(self, num_steps: int) -> None:
        """Check that each lane stays with one of torch's workers, which take the batches in turn.

        Raises:
            ConfigError: If lanes move, and that would lose samples.
        """
        num_workers = self.workers.num_workers
        if is_remote() or not num_workers or num_steps % num_workers == 0:
            return
        advice = f"each lane is read every {num_steps} steps, which is no multiple of num_workers={num_workers}"
        if self._options.guarantee == "at-most-once":
            raise ConfigError(f"{advice}\n  Lanes would move between workers, and each move loses samples.")
        if not self._has_warned:
            self._has_warned = True
            logger.warning("loader %s: %s, so lanes move between workers, and are begun anew", self.name, advice)

    def _warn_of_idle_endpoints(self, num_lanes: int, shard: Shard) -> None:
        """Log one warning if the job has more endpoints than lanes, because one endpoint reads a lane at a time."""
        session = control.current()
        if session is None or is_checked() or shard.rank or self._has_warned:
            return
        # The job was planned without optional endpoints.
        endpoints = [each for each in session.directory.records() if each.kind == BATCHES and not each.is_optional]
        num_idle = len(endpoints) - num_lanes
        if num_idle > 0:
            self._has_warned = True
            logger.warning(
                "loader %s has %s for %d endpoints, so %d stay idle. Pass lanes=%d or more, if the source has as many "
                "shards",
                self.name,
                counted(num_lanes, "lane"),
                len(endpoints),
                num_idle,
                -(-len(endpoints) // shard.world_size) * shard.world_size,
            )

    def state(self, num_trained: int | None = None) -> LoaderState:
        """Return the position of this loader, with snapshots of its lanes."""
        position = self.progress.position(None if num_trained is None else self.lanes.num_steps_of(num_trained))
        return replace(
            self.facts(),
            epoch=position.epoch,
            again=position.earlier_passes,
            batches=position.batches,
            completed=position.completed,
            lanes=self.lanes.state(position.number, position.batches * self._batch_size * self.shard().world_size),
        )

    def load_state(self, value: object) -> None:
        """Continue from a state with the next pass.

        Raises:
            ConfigError: If the value is not a state, or is the state of a different loader.
        """
        state = LoaderState.from_dict(value)
        here = self.facts()
        state.check_fits(here)
        for doubt in state.doubts(here):
            logger.warning("loader %s: the loaded state is of %s", self.name, doubt)
        self.progress.resume(state)
        self.lanes.load(Start(state.epoch, earlier_passes=state.again).number, state.lanes)
        self.consumed_elsewhere = False

    def facts(self) -> LoaderState:
        """Return a state with this loader's constant values. Its epoch and batches are 0."""
        return facts_of_lanes(self)

    @property
    def resumes_within_epoch(self) -> bool:
        """Whether the next pass is the rest of an epoch that had begun when a loaded state was taken."""
        start = self.progress.next_start()
        return self.progress.resumed is not None and start.batches > 0 and not start.completed

    def num_global_batches(self, start: Start) -> int:
        """Return the number of batches that the latest pass has delivered. Asked at its end."""
        return self.progress.position().batches

    def is_through(self, start: Start) -> bool:
        """Return whether the state ``start`` is at the end of a pass."""
        return start.completed

    is_over = is_through

    def _open_source(self, requests: EpochRequests) -> Batches:
        """Return the batches of ``requests``, without their reports."""
        return LaneBatches(super()._open_source(requests), self.lanes.of(requests.epochs[0].start.number), requests)

    def _exchange(self, number: int) -> StoreExchange | None:
        """Return the connection of the ranks. None for a single rank.

        Raises:
            ConfigError: If the ranks must end together, and lack a process group.
        """
        shard = self.shard()
        if shard.world_size == 1:
            return None
        if self.options.shard is None and self._store.is_open:
            exchange = StoreExchange(self._store, number, shard.rank, shard.world_size)
            # All ranks have left the pass before the last one, so its keys are not read again.
            for old in self._exchanges[:-1]:
                old.close()
            self._exchanges = [*self._exchanges[-1:], exchange]
            return exchange
        if self._options.end == "stop":
            raise ConfigError(
                'end="stop" needs a process group, so that all ranks end at the same step\n'
                "  Call torch.distributed.init_process_group before the first batch and leave out shard=, or pass "
                'end="wrap" and count steps, or end="rest".'
            )
        return None

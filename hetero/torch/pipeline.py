"""What lies behind a loader: data set, order, place in it, and where batches come from."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.utils.data

from hetero.audit.ledger import LoaderFacts
from hetero.batches.request import BatchRequest, SampleErrorPolicy
from hetero.control import session as control
from hetero.datasets import DatasetSpec, set_describer
from hetero.errors import ConfigError
from hetero.metrics.skips import SkipLog
from hetero.metrics.steps import DEFAULT_WARMUP_STEPS, StepTimer
from hetero.torch.drawing import SamplerOrder
from hetero.torch.local import LocalDataset, LocalFetcher, WorkerOptions, builds_here
from hetero.torch.sampling import BuiltInOrder, PlannedBatch, Shard
from hetero.torch.state import LoaderState, Progress, Start

__all__ = ["Pipeline", "answer_lengths", "current_shard", "is_remote"]

logger = logging.getLogger(__name__)

_OBJECT_SPEC = DatasetSpec("object")  # what a request names where the data set is an object at hand
_RANK_BLIND = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SequentialSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)
_num_verified = 0  # purity checks asked for by this process


class Pipeline:
    """The parts of one loader, shared with the views that tools rebuild loaders from.

    Picklable: what lives (timer, workers, connections) stays behind.

    Args:
        subject: A spec, or the user's data set object.
        sampler_order: The user's sampler; None for the loader's own order.
        batch_size: Per rank; None for single samples.
        shuffle: As torch's.
        drop_last: As torch's, of global batches.
        padding: Whether ranks get equally many samples.
        seed: Signed 64-bit.
        local: Answers requests in this process.
        workers: How to fetch: locally, and of endpoints how far ahead and into which memory.
        compression: Of batches from endpoints; None: none.
        on_sample_error: Whether others of a batch stand in for samples that raise.
        skips: Counts them.
        name: For reports.
    """

    def __init__(
        self,
        subject: Any,
        *,
        sampler_order: SamplerOrder | None,
        batch_size: int | None,
        shuffle: bool,
        drop_last: bool,
        padding: bool,
        seed: int,
        local: LocalDataset,
        workers: WorkerOptions,
        compression: str | None,
        on_sample_error: SampleErrorPolicy,
        skips: SkipLog,
        name: str,
    ) -> None:
        self.subject = subject
        self.sampler_order = sampler_order
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.padding = padding
        self.seed = seed
        self.local = local
        self.workers = workers
        self.compression = compression
        self.on_sample_error: SampleErrorPolicy = on_sample_error
        self.skips = skips
        self.name = name
        self.progress = Progress()
        self.consumed_elsewhere = False
        """Whether the latest pass was a view's, whose place this side cannot know."""
        self.stride: int | None = None
        """What part of the views' batches the tool on top of them takes: every n-th, once known."""
        self.audited_as: LoaderFacts | None = None
        """What the ledger knows this loader by; made with its first entry."""
        self._num_requested = 0
        self._has_warned = False
        self._timer: StepTimer | None = None
        self._timed: object = None
        self._fetcher: LocalFetcher | None = None

    @property
    def collate(self) -> bool:
        """Whether samples are made into batches."""
        return self.batch_size is not None or (self.sampler_order is not None and self.sampler_order.is_batch_sampler)

    def order(self) -> BuiltInOrder:
        """Return the loader's own order; asks for the length of the data set."""
        return BuiltInOrder(
            num_samples=self.num_samples(),
            batch_size=self.batch_size or 1,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            padding=self.padding,
        )

    def num_samples(self) -> int:
        """Return the length of the data set; of the very one that is fetched from, where this process builds it."""
        session = control.current()
        if is_remote() or not builds_here(self.workers, channel_is_live=session is not None):
            return len(self.subject)
        _ = self.local.built
        return len(self.local)

    def num_batches(self) -> int:
        """Return the batches of an epoch on this rank."""
        if self.sampler_order is not None:
            return self.sampler_order.num_batches()
        return self.order().num_batches(current_shard())

    def plan(self, start: Start) -> Iterator[PlannedBatch]:
        """Yield this rank's batches from ``start`` on."""
        if self.sampler_order is not None:
            self._warn_of_equal_ranks(self.sampler_order.sampler)
            return self._plan_sampler(self.sampler_order, start)
        return self.order().batches(start.epoch, current_shard(), start=start.batches)

    def plan_of_all_ranks(self, start: Start) -> Iterator[PlannedBatch]:
        """Yield the batches of all ranks, interleaved; a user's sampler's as they come."""
        if self.sampler_order is not None:
            return self._plan_sampler(self.sampler_order, start)
        world_size = current_shard().world_size
        return self.order().batches_of_all_ranks(start.epoch, world_size, start=start.batches)

    def set_epoch(self, epoch: int, *, by_tool: bool = False) -> None:
        """Choose the epoch of the next pass, here and in the user's sampler."""
        resumed = self.progress.resumed
        if by_tool:
            self.progress.set_epoch_by_tool(epoch)
        else:
            self.progress.set_epoch(epoch)
        if resumed is not None and self.progress.next_start().epoch == resumed.epoch + 1 and not self._is_over(resumed):
            logger.warning(
                "set_epoch leaves out the rest of epoch %d: the loaded state was taken after %d batches of it; "
                "call set_epoch(%d) to go on there",
                resumed.epoch,
                resumed.batches,
                resumed.epoch,
            )
        if self.sampler_order is not None:
            self.sampler_order.set_epoch(self.progress.next_start().epoch)

    def begin(self, plan: Callable[[Start], Iterator[PlannedBatch]]) -> tuple[int, Start, Iterator[PlannedBatch]]:
        """Begin a pass: return its number, where it starts, and its batches."""
        if self.sampler_order is not None and (epoch := self.sampler_order.epoch_set_by_user()) is not None:
            self.set_epoch(epoch)
        number, start = self.progress.begin()
        if self.sampler_order is None:
            return number, *self._begin_own_order(start, plan)
        planned = plan(start)
        if start.may_skip and start.batches:
            first = next(planned, None)
            if first is None:
                start = self.progress.skip_to_next_epoch()
                planned = plan(start)
            else:
                planned = itertools.chain((first,), planned)
        return number, start, planned

    def _begin_own_order(
        self, start: Start, plan: Callable[[Start], Iterator[PlannedBatch]]
    ) -> tuple[Start, Iterator[PlannedBatch]]:
        if start.batches and self.is_through(start):  # all ranks: without padding one may be through before others
            if not start.may_skip:
                return start, iter(())
            start = self.progress.skip_to_next_epoch()
        num_samples = self.num_samples()
        if start.batches and start.num_samples not in (None, num_samples):
            raise ConfigError(
                f"the loaded state is of the middle of an epoch of {start.num_samples} samples, the data set has "
                f"{num_samples} now\n  Change it between epochs only."
            )
        self.progress.note_length(num_samples)
        return replace(start, num_samples=num_samples), plan(start)

    def note_delivered(self, number: int, planned: PlannedBatch) -> None:
        """Tell the user's sampler that the next batch of a pass was delivered."""
        if self.sampler_order is not None and self.progress.is_latest(number):
            self.sampler_order.delivered(planned)

    def note_completed(self, number: int) -> None:
        """Tell the user's sampler that a pass was delivered to its end."""
        if self.sampler_order is not None and self.progress.is_latest(number):
            self.sampler_order.completed()

    def request(self, planned: PlannedBatch, epoch: int) -> BatchRequest:
        """Return the request for a planned batch."""
        self._num_requested += 1
        return BatchRequest(
            spec=self.subject if isinstance(self.subject, DatasetSpec) else _OBJECT_SPEC,
            indices=planned.indices,
            occurrences=planned.occurrences,
            seed=self.seed,
            epoch=epoch,
            position=planned.position,
            collate=self.collate,
            step=self._num_requested,
            verify=_wants_purity_check(),
            on_sample_error=self.on_sample_error,
            compression=self.compression,
        )

    def open(self, requests: Iterator[BatchRequest]) -> Iterator[Any]:
        """Yield the batches of ``requests``, in order, prefetched from where this loader fetches."""
        session = control.current()
        if session is not None and session.remote:
            from hetero.torch import remote  # the data plane, of no use locally

            return remote.open_reader(
                session,
                requests,
                window=self.workers.prefetch_factor,
                pin_memory=self.workers.pin_memory,
                on_skips=self.skips.note,
            )
        if self._fetcher is None:
            self._fetcher = LocalFetcher(
                self.local, self.workers, channel_is_live=session is not None, on_skips=self.skips.note
            )
        return self._fetcher.open(requests)

    @property
    def timer(self) -> StepTimer:
        """Measures this loader's steps; made and registered at the first use."""
        if self._timer is None:
            session = control.current()
            options = None if session is None else session.options
            self._timer = StepTimer(
                self.name,
                warmup_steps=DEFAULT_WARMUP_STEPS if options is None else options.warmup_steps,
                step_wait_s=None if options is None else options.emulate_step_s,
            )
            self._timer.skips = self.skips
            if session is not None:
                session.register_timer(self._timer)
        return self._timer

    def begin_wait(self, owner: object) -> StepTimer:
        """Begin a data wait of the pass that ``owner`` stands for."""
        self._timed = owner
        self.timer.begin_wait()
        return self.timer

    def end_timing(self, owner: object) -> None:
        """Stop the clock if no other pass has begun a wait since; idempotent."""
        if self._timed is owner:
            self._timed = None
            self.timer.pause()

    def state(self) -> LoaderState:
        """Return the place of this loader; the sampler's own state included."""
        position = self.progress.position()
        facts = self._facts()
        stateful = self.sampler_order is not None and self.sampler_order.is_stateful
        left = None
        if self.sampler_order is not None and position.sampler is None and self.progress.is_between_passes:
            left = self.sampler_order.left()
        return LoaderState(
            epoch=position.epoch,
            batches=position.batches,
            sampler=position.sampler if stateful else None,
            num_drawn=position.num_drawn if stateful else 0,
            left=None if left is None else {"epoch": left[0], "sampler": left[1]},
            order=facts.order,
            seed=facts.seed,
            num_samples=facts.num_samples if position.num_samples is None else position.num_samples,
            global_batch=facts.global_batch,
        )

    def load_state(self, value: object) -> None:
        """Continue from a state with the next pass.

        Raises:
            ConfigError: If it is no state, or of another loader.
        """
        state = LoaderState.from_dict(value)
        here = self._facts()
        self._at_its_new_length(state, here).check_fits(here)
        self.progress.resume(state)
        if state.left is not None and self.sampler_order is not None and self.sampler_order.is_stateful:
            epoch: Any = state.left["epoch"]
            self.sampler_order.restore_left(epoch, state.left["sampler"])
        self.consumed_elsewhere = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_timer": None, "_timed": None, "_fetcher": None}

    def _facts(self) -> LoaderState:
        """Return a state of this loader at no place in particular."""
        sampler_order = self.sampler_order
        own = sampler_order is None
        batch_size = self.batch_size or 1
        return LoaderState(
            epoch=0,
            batches=0,
            order=("shuffled" if self.shuffle else "sequential") if own else "sampler",
            seed=self.seed,
            num_samples=self.num_samples() if own else None,
            global_batch=batch_size * current_shard().world_size
            if sampler_order is None or not sampler_order.is_batch_sampler
            else None,
        )

    def _at_its_new_length(self, state: LoaderState, here: LoaderState) -> LoaderState:
        """Return a state of a data set that has grown since, if the epoch that the state is of was over before."""
        may_have_grown = not isinstance(self.subject, DatasetSpec) and None not in (state.num_samples, here.num_samples)
        if may_have_grown and self.is_through(Start(state.epoch, state.batches, num_samples=state.num_samples)):
            return replace(state, num_samples=here.num_samples)
        return state

    def is_through(self, start: Start) -> bool:
        """Whether nothing is left of an epoch in the loader's own order, on any rank."""
        return start.batches >= self.num_global_batches(start)

    def num_global_batches(self, start: Start) -> int:
        """Return the global batches of an epoch, of the data set's length when it began."""
        order = self.order()
        if start.num_samples is not None:
            order = replace(order, num_samples=start.num_samples)
        return order.num_global_batches(current_shard().world_size)

    def _is_over(self, start: Start) -> bool:
        """Whether nothing is left of an epoch, or nobody can tell."""
        try:
            if self.sampler_order is not None:
                return start.batches >= self.sampler_order.num_batches()
        except TypeError:
            return True
        return self.is_through(start)

    def _warn_of_equal_ranks(self, sampler: object) -> None:
        if type(sampler) in _RANK_BLIND and current_shard().world_size > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "every rank draws the same batches from %s: leave sampler= out and pass shuffle=, "
                "or wrap it in a sampler that takes the rank's part",
                type(sampler).__name__,
            )

    @staticmethod
    def _plan_sampler(order: SamplerOrder, start: Start) -> Iterator[PlannedBatch]:
        own_rank = current_shard().rank
        for planned in order.batches(start.epoch, start=start.batches, state=start.sampler, num_drawn=start.num_drawn):
            if planned.rank not in (None, own_rank):
                raise ConfigError(
                    f"the batch sampler wraps that of another loader and yields a batch of rank {planned.rank} on rank "
                    f"{own_rank}\n  loader.batch_sampler yields the batches of all ranks; wrap a sampler of your own."
                )
            yield planned


def current_shard() -> Shard:
    """Return this process's rank and world size.

    From the initialised process group, else the launcher's session, else both of ``RANK`` and ``WORLD_SIZE``.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Shard(distributed.get_rank(), distributed.get_world_size())
    session = control.current()
    if session is not None:
        return Shard(session.rank, session.world_size)
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return Shard(int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else Shard()


def is_remote() -> bool:
    """Whether batches come from endpoints in this job."""
    session = control.current()
    return session is not None and session.remote


def answer_lengths() -> None:
    """Have the endpoints answer ``len(spec)``: this host needs no data."""
    from hetero.torch import remote

    set_describer(remote.num_samples)


def _wants_purity_check() -> bool:
    """Whether the next request belongs to the few of the job that are computed twice."""
    global _num_verified
    session = control.current()
    if session is None or session.rank != 0 or _num_verified >= session.options.purity_checks:
        return False
    _num_verified += 1
    return True

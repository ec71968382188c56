"""The parts of one PyTorch loader: data set, order, position in the order, and source of the batches."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils.data

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import describe
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders.checks import check_not_child_of_rank
from hetero.loaders.measuring.profiling import LoaderProfiler, ProfiledBatches, measure_here
from hetero.loaders.pipeline import LoaderOptions, LoaderPipeline, is_remote, shard_of_environment
from hetero.loaders.prefetching import Batches, EpochRequests, Prefetched
from hetero.loaders.sampling import PlannedBatch, Shard
from hetero.loaders.state import LoaderState, Start
from hetero.plans.token_budgets import TokenBudget
from hetero.spec import DatasetSpec
from hetero.torch.kept_batches import KeptBatches
from hetero.torch.local import LocalBatches, LocalFetcher, WorkerOptions, builds_here
from hetero.torch.local_dataset import LocalDataset
from hetero.torch.order.made_anew import MadeAnew
from hetero.torch.order.ranks import RankOrders
from hetero.torch.order.sampler import RANK_BLIND_SAMPLERS, SamplerOrder, torch_permutation
from hetero.torch.pinned import allocate_pinned

__all__ = ["Pipeline"]

logger = logging.getLogger(__name__)


class Pipeline(LoaderPipeline):
    """The parts of one loader, shared with the views that tools rebuild loaders from.

    A pipeline is picklable. Its live objects (timer, workers, connections) are not pickled.

    Args:
        subject: A spec, or the user's data set object.
        options: The loader's options.
        sampler_order: The order of the user's sampler. None for the loader's own order.
        local: Answers requests in this process.
        workers: Options of local fetching. For endpoints, only the prefetch factor and memory pinning apply.

    Raises:
        ConfigError: If a canary run (a short trial of the script) uses a part of the samples, but the user's sampler
            chooses them.
    """

    can_be_profiled = True
    compares_batches = True

    def __init__(
        self,
        subject: Any,
        options: LoaderOptions,
        *,
        sampler_order: SamplerOrder | None,
        local: LocalDataset,
        workers: WorkerOptions,
    ) -> None:
        super().__init__(subject, options)
        if sampler_order is not None and self._part is not None:
            raise ConfigError(
                f"loader {self.name} has a sampler of its own, which a canary run with --samples cannot shorten\n"
                "  to do: leave the sampler out and pass shuffle=True, or give the canary --channel NAME=DIR, or "
                "{fraction} in the script's arguments"
            )
        self.sampler_order = sampler_order
        self.local = local
        self.workers = workers
        self.consumed_elsewhere = False
        """Whether a tool's loader consumes the latest pass. This loader cannot know the position of such a pass."""
        self.fill_up: Callable[[Sequence[Any]], Any] | None = None
        """Makes a batch from the indices of earlier samples. accelerate requests such a batch at the end of a pass for
        a rank that lacks one. None unless the latest pass yields the batches of all ranks, which accelerate shards."""
        self.stride: int | None = None
        """A tool consumes every n-th batch of a pass. This is n, None until it is known. See `ViewPass`."""
        self._has_warned = False  # whether the warning about samples or batches that are equal on all ranks was logged
        self.has_own_order = sampler_order is None
        # With a batch sampler, the option batch_size is None, but each element is a batch and not a single sample.
        self.collate = self.collate or (sampler_order is not None and sampler_order.is_batch_sampler)
        self.has_workers = workers.num_workers > 0
        self.permute = torch_permutation if options.order == "torch" else None
        self._made_anew = MadeAnew(subject, *self.kind, options.batch_size, options.seed, options.drop_last)
        self._ranks = RankOrders("orders", *self.kind, options.batch_size, options.shuffle)
        self._restores_epoch = False
        """Whether a loaded state has an epoch of the user's sampler that `take_sampler_epoch` has not handled yet."""
        self._fetcher: LocalFetcher | None = None
        self._profiler: LoaderProfiler | None = None

    def shard(self) -> Shard:
        """Return this process's rank and world size: the loader's argument, else the values of the process group."""
        if self.options.shard is not None:
            return self.options.shard
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return Shard(distributed.get_rank(), distributed.get_world_size())
        return Shard()

    def dataset_samples(self) -> int:
        """Return the length of the data set, taken from the built object itself if this process builds it."""
        if is_remote() or not builds_here(self.local, self.workers):
            return len(self.subject)
        _ = self.local.built  # build the data set, because `len` below does not
        return len(self.local)

    def local_built(self) -> BuiltDataset:
        """Return the data set, built in this process."""
        return self.local.built

    def local_fingerprint(self) -> str | None:
        """Return a fingerprint of the data set's content. Return None if this process would have to build it first."""
        if "built" not in self.local.__dict__:  # a cached property is there after its first use
            return None
        with self.local.noting_files():
            return describe(self.local.built).fingerprint

    def num_batches(self) -> int:
        """Return the number of batches of a pass on this rank: all of an epoch, or less in ``hetero check``."""
        if self.sampler_order is None:
            return super().num_batches()
        return min(self.sampler_order.num_batches(), self.max_pass_batches)

    def plan(self, start: Start, *, all_ranks: bool = False) -> Iterator[PlannedBatch]:
        """Yield the batches from ``start`` on.

        Args:
            start: The first batch.
            all_ranks: Whether to yield the batches of all ranks in turn, for a tool that shards them, or only the
                batches of this rank. The batches of a user's sampler come in the sampler's order in both cases.
        """
        if self.sampler_order is not None:
            # A tool that shards the batches of a sampler needs the same batches on every rank.
            if not all_ranks:
                self._warn_of_equal_ranks(self.sampler_order.sampler)
            planned = self._plan_sampler(self.sampler_order, start)
        elif all_ranks:
            planned = self.order().whole_batches(start.number, self.shard().world_size, start=start.batches)
        else:
            planned = self.order().batches(start.number, self.shard(), start=start.batches)
        return self.shortened(planned)

    def set_epoch(self, epoch: int, *, by_tool: bool = False) -> None:
        """Set the next pass's epoch, in the loader and the user's sampler. Warn if this skips the rest of an epoch."""
        resumed = self.progress.resumed
        if by_tool:
            self.progress.set_epoch_by_tool(epoch)
        else:
            self.progress.set_epoch(epoch)
        self.warn_of_rest(resumed)
        if self.sampler_order is not None:
            self.sampler_order.set_epoch(self.progress.next_start().epoch)

    def begin(self, plan: Callable[[Start], Iterator[PlannedBatch]]) -> tuple[int, Start, Iterator[PlannedBatch]]:
        """Begin a pass. Return its number, its start, and its batches, which ``plan`` returns from a start on."""
        # Leave the pass before this one. Within a pass, an epoch that is set on the sampler is for the next pass.
        self.progress.leave()
        self.take_sampler_epoch()
        number, start = self.progress.begin()
        if self.sampler_order is None:
            # A loader that the script makes anew in each epoch begins with epoch 0 each time.
            if start == Start(0) and self.options.shuffle:
                self._made_anew.warn(self.name)
            start, planned = self._begin_own_order(start, plan)
            self.extent.begin_pass(steps=self.num_batches(), num_done=start.batches)
            return number, start, planned
        if isinstance(self.sampler_order.sampler, TokenBudget):
            self.sampler_order.sampler.check_fits(self.num_samples)
        self.extent.begin_pass(steps=None, num_done=0)  # the length of a user's sampler may be costly or missing
        # If the pass of a loaded state had ended (`is_finished`), nothing is left of it, even if the sampler has grown.
        planned = iter(()) if start.is_finished else plan(start)
        # If nothing is left of the epoch that a loaded state names, this pass may become the next epoch. Draw a batch
        # to find out whether one is left, because the length of a user's sampler may be unknown.
        if start.may_become_next_epoch and start.batches:
            first = next(planned, None)
            if first is None:
                start = self.progress.skip_to_next_epoch()
                planned = plan(start)
            else:
                planned = itertools.chain((first,), planned)
        return number, start, planned

    @property
    def may_add_next_epochs(self) -> bool:
        """Whether a pass also requests the first batches of the next epoch, in runs without profiling.

        False with a user's sampler, because it may draw from the script's generators. False if torch's workers get
        objects that the script may change between two passes.
        """
        if self.sampler_order is not None or not self.options.requests_next_epoch:
            return False
        # Without workers, this process makes each batch only when the script asks for it.
        return is_remote() or (self.workers.num_workers > 0 and self.local.is_constant)

    @property
    def adds_next_epochs(self) -> bool:
        """Whether a pass also requests the first batches of the next epoch. A profile run measures each pass alone."""
        session = control.current()
        return self.may_add_next_epochs and (session is None or not session.options.profile)

    def plan_selection(self, start: Start, selection: tuple[int, ...]) -> Iterator[PlannedBatch]:
        """Yield this rank's batches from ``start`` on, or only the batches that a tool takes, see `ViewPass`."""
        if not selection:
            return self.plan(start)
        first, stride, of_all_ranks = selection
        return itertools.islice(self.plan(start, all_ranks=bool(of_all_ranks)), first, None, stride)

    def take_sampler_epoch(self) -> None:
        """Use the epoch that the script set on its sampler. If the script set none, restore a loaded state's epoch.

        If the script goes back to an earlier epoch, only the sampler does so. The pass still counts as the next epoch,
        because samples would otherwise draw the same random numbers again.
        """
        order, resumed = self.sampler_order, self.progress.resumed
        # Within a pass, an epoch that the script sets on the sampler is for the pass after it.
        if order is None or self.progress.is_within_pass:
            return
        script_epoch = order.epoch_set_by_user()
        # A state was loaded, and the script has not called the loader's set_epoch since.
        if self._restores_epoch and resumed is not None and self.progress.named_epoch is None:
            self._restores_epoch = False
            # The sampler has the epoch of the state already, so the script has not chosen another epoch.
            if script_epoch == resumed.sampler_epoch:
                order.epoch, script_epoch = script_epoch, None
            elif script_epoch is None and resumed.sampler_epoch is not None:
                order.set_epoch(resumed.sampler_epoch)
        if script_epoch is None:
            return
        # If the loaded state is at the end of a pass, the next pass is the epoch after it.
        following = self.progress.next_start().epoch + (resumed is not None and resumed.completed)
        # If the loaded state is in the middle of an epoch, the script may name this epoch or any other one.
        is_within_epoch = resumed is not None and not resumed.completed
        if script_epoch >= following or is_within_epoch:
            self.set_epoch(script_epoch)
        order.epoch = script_epoch  # this choice is handled, so `epoch_set_by_user` must not return it again

    def _begin_own_order(
        self, start: Start, plan: Callable[[Start], Iterator[PlannedBatch]]
    ) -> tuple[Start, Iterator[PlannedBatch]]:
        """Begin a pass in the loader's own order. Return its start, which may be the next epoch, and its batches."""
        self._warn_of_no_shards()
        if self.options.shuffle and self.options.shard is None:
            self._ranks.check_seed(self.options.seed)
        if start.batches:
            start.check_within(self.num_global_batches(start))
        # If nothing is left of the loaded state's epoch on any rank, this pass becomes the next epoch. But if the loop
        # had not ended when the state was taken, or if the script has named this epoch, the pass has no batches.
        if start.batches and self.is_through(start):
            if not start.may_become_next_epoch:
                return start, iter(())
            start = self.progress.skip_to_next_epoch()
        num_samples = self.num_samples()
        if start.batches and start.num_samples not in (None, num_samples):
            raise ConfigError(
                f"the loaded state is in an epoch of {start.num_samples} samples, the data set has {num_samples} now\n"
                "  Change the data set only between epochs."
            )
        self.progress.num_samples = num_samples
        return replace(start, num_samples=num_samples), plan(start)

    def note_delivered(self, number: int, sampler_state: object) -> None:
        """Tell the user's sampler, if there is one, that the next batch of a pass was delivered (`SamplerOrder`).

        The caller itself changes the loader's position, with `Progress.advance`.

        Args:
            number: Number of the pass.
            sampler_state: The sampler's state after that batch. None for a sampler without a state.
        """
        if self.sampler_order is not None and self.progress.is_latest(number):
            self.sampler_order.delivered(sampler_state)

    def note_completed(self, number: int) -> None:
        """Record that a pass was delivered to its end, in the position and in the order of the user's sampler.

        Warn if a loader of the same kind has delivered the same order before, see `MadeAnew`.
        """
        self.extent.num_complete_passes += 1
        # The order of a user's sampler is known only at the end of a pass. With the loader's own order, `begin` warns.
        # Check only the first pass, because a loader that the script makes anew in each epoch has only one pass.
        order = None if self.sampler_order is None else self.sampler_order.shuffled_order
        if order is not None and number == 1:
            self._made_anew.warn(self.name, order)
        self._made_anew.note_finished(self.subject, order)
        self.progress.complete(number)
        if self.sampler_order is not None and self.progress.is_latest(number):
            self.sampler_order.completed()

    def open(self, requests: EpochRequests) -> Batches:
        """Return the batches of ``requests``, in order, prefetched from endpoints or fetched locally.

        In a profile run, batches that were kept in memory replace them after some time (`ProfiledBatches`).

        Raises:
            ConfigError: If this process is a child of a rank, which cannot fetch from the endpoints of the job.
        """
        check_not_child_of_rank()
        session = control.current()
        if session is None or not session.options.profile:
            return self._open_source(requests)
        if self._profiler is None:
            num_processes = 0 if session.remote else self.workers.num_workers  # 0 if endpoints fetch the batches
            # As a decorator, the context notes what each call opens. Workers that are forked later share connections.
            measure = self.local.noting_files()(functools.partial(measure_here, lambda: self.local.built))
            profiler = LoaderProfiler(self, session, KeptBatches(), num_processes=num_processes, measure=measure)
            self._profiler = profiler.shared(session)
        return ProfiledBatches(self._profiler, requests, self._open_source)

    def _open_source(self, requests: EpochRequests) -> Batches:
        """Return the batches of ``requests``: from endpoints if the job has them, else made locally."""
        session = control.current()
        if session is not None and session.remote:
            from hetero.loaders import remote  # imports the data plane, which local jobs do not need

            return remote.open_reader(
                remote.fleet_for(session),
                requests,
                prefetch_factor=self.workers.prefetch_factor,
                compares_batches=self.compares_batches,  # see `remote.open_reader`
                on_wait=session.check_wait,
                on_received=self.traffic.add,
                on_skips=self.skips.note,
                allocate=allocate_pinned if self.workers.pin_memory else None,
            )
        if self._fetcher is None:
            self._fetcher = LocalFetcher(self.local, self.workers, skips=self.skips, extent=self.extent)
        return LocalBatches(self._fetcher, requests)

    def state(self, num_trained: int | None = None) -> LoaderState:
        """Return the position of this loader, including the sampler's own state. See `Progress.position`."""
        self.take_sampler_epoch()
        position = self.progress.position(num_trained)
        facts = self.facts()
        stateful = self.sampler_order is not None and self.sampler_order.is_stateful
        # Between two passes, a stateful sampler is where the last pass left it, and the next pass begins there.
        left = None
        if self.sampler_order is not None and position.sampler is None and self.progress.is_between_passes:
            left = self.sampler_order.left_position()
        # Until the pass of a loaded state begins, `position` has values of the state. This loader has all other values.
        return replace(
            facts,
            epoch=position.epoch,
            again=position.earlier_passes,
            batches=position.batches,
            sampler=position.sampler if stateful else None,
            num_drawn=position.num_drawn if stateful else 0,
            left=None if left is None else {"epoch": left[0], "sampler": left[1]},
            sampler_epoch=None if self.sampler_order is None else self.sampler_order.epoch,
            # The states of all ranks must be the same. But without padding, one rank's pass may have ended while
            # another rank is in its last step. So the state then counts the pass as ended. A loaded state whose pass
            # has not begun (``resumed``) needs no such change, because it is the same on all ranks already.
            completed=position.completed or (self.progress.resumed is None and self._may_end_unevenly()),
            num_samples=facts.num_samples if position.num_samples is None else position.num_samples,
            sampler_length=None if self.sampler_order is None else position.sampler_length or self.sampler_order.length,
            world_size=None if self.sampler_order is None else position.world_size or self.shard().world_size,
        )

    @property
    def resumes_within_epoch(self) -> bool:
        """Whether the next pass is the rest of an epoch that had begun when a loaded state was taken.

        False if the state is at the end of a pass.
        """
        start = self.progress.next_start()
        if self.progress.resumed is None or not start.batches:
            return False
        # Without padding, `state` marks each state as completed, so compare the number of batches instead.
        return not (self.is_over(start) if self._may_end_unevenly() else start.completed)

    def _may_end_unevenly(self) -> bool:
        """Return whether some ranks may have one batch fewer than others, in the loader's own order without padding."""
        return self.sampler_order is None and not self.options.padding and self.shard().world_size > 1

    def load_state(self, value: object) -> None:
        """Continue from a state with the next pass.

        Raises:
            ConfigError: If the value is not a state, or is the state of a different loader.
        """
        state = LoaderState.from_dict(value)
        here = self.facts()
        self._with_new_length(state, here).check_fits(here)  # a data set may grow between two epochs
        for doubt in state.doubts(here):
            logger.warning("loader %s: the loaded state is of %s", self.name, doubt)
        self.progress.resume(state)
        self.prefetched.discard()
        self._restores_epoch = state.sampler_epoch is not None
        # If the state was taken between two passes, the next pass begins where the sampler was left.
        if state.left is not None and self.sampler_order is not None and self.sampler_order.is_stateful:
            epoch: Any = state.left["epoch"]
            self.sampler_order.restore_left_position(epoch, state.left["sampler"])
        self.consumed_elsewhere = False  # the position is known again, because it is that of the loaded state

    def __getstate__(self) -> dict[str, Any]:
        live = ("_timer", "_timed", "_fetcher", "_profiler", "fill_up", "prefetched")
        return {**self.__dict__, **dict.fromkeys(live)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, prefetched=Prefetched())

    def facts(self) -> LoaderState:
        """Return a state with this loader's constant values. Its epoch and batches are 0."""
        if self.sampler_order is None:
            return super().facts()
        global_batch = (self.options.batch_size or 1) * self.shard().world_size
        return LoaderState(
            epoch=0,
            batches=0,
            order="sampler",
            seed=self.options.seed,
            global_batch=None if self.sampler_order.is_batch_sampler else global_batch,
            dataset=self.dataset_name,
            arguments=self.arguments_digest,
            sampler_class=self.sampler_order.class_names,
        )

    def _with_new_length(self, state: LoaderState, here: LoaderState) -> LoaderState:
        """Return the state, with the data set's present length if the state's epoch is complete.

        A data set object may grow between two epochs. Within an epoch, `check_fits` rejects another length.
        """
        may_have_grown = not isinstance(self.subject, DatasetSpec) and None not in (state.num_samples, here.num_samples)
        if may_have_grown and self.is_through(Start(state.epoch, state.batches, num_samples=state.num_samples)):
            return replace(state, num_samples=here.num_samples)
        return state

    def is_over(self, start: Start) -> bool:
        """Return whether no batch is left from ``start`` on. True if unknown, because `warn_of_rest` must be sure."""
        if self.sampler_order is None:
            return super().is_over(start)
        try:
            return start.completed or start.batches >= self.sampler_order.num_batches(start.sampler_length)
        except Exception:  # noqa: BLE001 - the sampler's own __len__
            return True

    def _warn_of_no_shards(self) -> None:
        """Log one warning if several ranks get the same samples, with neither a process group nor a ``shard``."""
        num_ranks = shard_of_environment().world_size
        if num_ranks == 1 or self.shard().world_size > 1 or self.options.shard is not None or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "loader %s: this job has %d ranks but no process group, so every rank gets all samples. To share them, "
            "call torch.distributed.init_process_group before the first batch, or pass shard=(rank, world_size)",
            self.name,
            num_ranks,
        )

    def _warn_of_equal_ranks(self, sampler: object) -> None:
        """Log one warning if each of several ranks draws the same batches from one of torch's samplers."""
        if type(sampler) in RANK_BLIND_SAMPLERS and self.shard().world_size > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "every rank draws the same batches from %s. Pass shuffle= instead of sampler=, or wrap the sampler in "
                "one that selects the rank's part",
                type(sampler).__name__,
            )

    def _check_length(self, order: SamplerOrder, start: Start) -> None:
        """Reject a position in an epoch in which the sampler had another length. The sampler must be prepared already.

        Raises:
            ConfigError: If the lengths differ, or the position is past the end of the epoch.
        """
        length = order.length if start.batches else None
        if length is None:
            return
        start.check_within(order.num_batches(length))
        # A sampler that shards has another length with another number of ranks. The script may resume with more ranks.
        is_same_world = start.world_size == self.shard().world_size
        if is_same_world and start.sampler_length not in (None, length):
            raise ConfigError(
                f"the loaded state is within an epoch of a sampler of length {start.sampler_length}, the sampler has "
                f"{length} now\n  Use the same sampler, or call set_epoch({start.epoch + 1}) to begin the next epoch."
            )

    def _plan_sampler(self, order: SamplerOrder, start: Start) -> Iterator[PlannedBatch]:
        """Yield the batches of a user's sampler. Reject batches that another rank's loader has planned."""
        own_rank = self.shard().rank
        batches = order.batches(start)
        self._check_length(order, start)
        for planned in batches:
            if planned.rank not in (None, own_rank):
                raise ConfigError(
                    f"the batch sampler wraps that of another loader and yields a batch of rank {planned.rank} on rank "
                    f"{own_rank}\n  loader.batch_sampler yields the batches of all ranks; wrap a sampler of your own."
                )
            yield planned
        # With ``shard=``, the script itself decides which ranks share samples.
        if order.drawn_pass is not None and self.options.shard is None:
            self._ranks.compare_parts(order.drawn_pass, sampler=type(order.sampler).__name__)

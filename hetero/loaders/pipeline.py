"""The parts of one loader of any framework: data set, order, position in the order, and requests."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.audit.ledger import LoaderFacts
from hetero.batches.build import BuiltDataset
from hetero.batches.failures import raising_user_types
from hetero.batches.fetch import Description
from hetero.batches.indexed import IndexedWork
from hetero.batches.lanes.work import LaneWork
from hetero.batches.request import BatchRequest, SampleErrorPolicy, Work
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders.lanes.options import LaneOptions
from hetero.loaders.measuring.timing import LoaderTiming
from hetero.loaders.parts import SamplePart, part_of
from hetero.loaders.prefetching import Prefetched
from hetero.loaders.sampling import BuiltInOrder, Permute, PlannedBatch, Shard
from hetero.loaders.state import LoaderState, Progress, Start
from hetero.metrics.skips import DEFAULT_MAX_SKIPS, SkipLog
from hetero.metrics.steps import Extent, StepTimer, Traffic
from hetero.plans.mixtures import Mixture, MixturePlan
from hetero.plans.plan import Plan, Source, check_sources
from hetero.plans.windows import WindowLayout, WindowPlan
from hetero.spec import DatasetSpec, set_describer
from hetero.wire.limits import Limits
from hetero.wire.requests import too_many_samples

__all__ = ["LoaderOptions", "LoaderPipeline", "answer_lengths", "is_checked", "is_remote", "shard_of_environment"]

logger = logging.getLogger(__name__)

_OBJECT_SPEC = DatasetSpec("object")  # takes the place of the spec if the data set is an object
_MAX_PLANNED = 10_000
"""Largest number of batches that are planned to find the last one. A limit is needed because a sampler may be endless
(tests/script_check)."""
_num_verified: dict[tuple[str, str, str], int] = {}  # purity checks in this process, by kind of loader


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Options of a loader of any framework. The framework's loader class has checked them."""

    batch_size: int | None
    """Samples per batch on each rank. None for single samples, and with a user's batch sampler."""
    shuffle: bool = False
    """Whether to permute the samples of every epoch."""
    drop_last: bool = False
    """Whether to leave out the last global batch if it is incomplete."""
    padding: bool = True
    """Whether all ranks get the same number of samples."""
    seed: int = 0
    """Signed 64-bit seed."""
    has_seed: bool = True
    """Whether the script has chosen the seed."""
    compression: str | None = None
    """Compression of batches from endpoints, or None."""
    on_sample_error: SampleErrorPolicy = "raise"
    """Whether to substitute other samples of the batch for samples that raise."""
    max_skips: int = DEFAULT_MAX_SKIPS
    """Number of skipped samples that are allowed, at least 0."""
    name: str | None = None
    """Name in reports. None for the data set's name."""
    lanes: LaneOptions | None = None
    """Options of the lanes of an iterable. None for a data set with an index."""
    order: str = "hetero"
    """Order of a shuffled epoch: ``hetero``, ``torch`` (the permutation of its samplers), ``window`` or ``mixture``."""
    mixture: Mixture | None = None
    """Shares of the sources, if `order` is ``mixture``."""
    requests_next_epoch: bool = True
    """Whether the first batches of the next epoch may be requested before the script asks for that epoch."""
    shard: Shard | None = None
    """Rank and world size that split an epoch. None for the values of the framework's process group."""


class LoaderPipeline(LoaderTiming):
    """The parts of one loader that are the same for every framework. Each framework has a subclass.

    Args:
        subject: A spec, or the user's data set object.
        options: The loader's options.

    Raises:
        ConfigError: If batches come from endpoints and have more samples than a request can list, or the variables of
            a canary run are malformed.
    """

    advances_chosen_epoch = False
    """Whether each pass after the one that ``set_epoch`` chose is the following epoch, see `Progress`."""
    has_own_order = True
    """Whether the loader uses its own order instead of a user's sampler."""
    has_workers = False
    """Whether torch's loader with the same arguments would fetch in worker processes."""
    permute: Permute | None = None
    """Function that draws the permutation of an epoch. None for hetero's own function."""

    def __init__(self, subject: Any, options: LoaderOptions) -> None:
        # Only batches of a spec are requested from endpoints. Those of a data set object may have any size.
        if isinstance(subject, DatasetSpec):
            # Without a batch size, each request is for one sample.
            _check_batch_size(options.batch_size or 1)
        # A short name for people. `dataset_name` is the one that identifies a class.
        shown_dataset = subject.name if isinstance(subject, DatasetSpec) else type(subject).__name__
        super().__init__(options.name or shown_dataset)
        self.subject = subject
        self.options = options
        self.collate = options.batch_size is not None
        """Whether samples are made into batches."""
        self.dataset_name = subject.name if isinstance(subject, DatasetSpec) else type(subject).__qualname__
        """Registered name of the data set, or the qualified name of a data set object's class."""
        self.arguments_digest = _arguments_digest(subject)
        self.kind = self.name, self.dataset_name, self.arguments_digest
        """Key that is equal for loaders that the script makes one after the other, for example one in each epoch."""
        self.skips = SkipLog(self.name, shown_dataset, max_skips=options.max_skips)
        self.traffic = Traffic(options.compression)
        """Counts the bytes of batches from endpoints."""
        self.progress = Progress(advances_chosen_epoch=self.advances_chosen_epoch)
        self.prefetched = Prefetched()
        """Batches of the next epoch, kept between two passes."""
        self.audited_as: LoaderFacts | None = None
        """Facts that identify this loader in the ledger. Made with the first entry."""
        self.extent = Extent()
        """Counts the passes, and records how much of the data set they use."""
        self._part = part_of()
        """The samples that a canary run uses, see `hetero.loaders.parts`. None: all samples."""
        self._plan: Plan | None = None
        """The value of `plan_of_order`, once it is known."""
        self._num_requests = 0
        self._has_reported_empty = False
        self._has_reported_part = False
        if is_remote() and isinstance(subject, DatasetSpec):
            from hetero.loaders import remote  # imports the data plane, which local jobs do not need

            remote.expect(subject)
            # From now on the script may call len(spec), but this host may lack the data.
            answer_lengths()

    @property
    def may_add_next_epochs(self) -> bool:
        """Whether a pass also requests the first batches of the next epoch, in runs without profiling."""
        return self.options.requests_next_epoch

    @property
    def requests_ahead(self) -> bool:
        """Whether a job with data hosts requests the first batches of an epoch while the epoch before it ends."""
        return self.options.requests_next_epoch and self.has_own_order and isinstance(self.subject, DatasetSpec)

    def dataset_samples(self) -> int:
        """Return the length of the data set. This may request it from endpoints."""
        raise NotImplementedError

    def num_samples(self) -> int:
        """Return the samples of an epoch over all ranks: the length of the data set, or less in a canary run.

        A canary run is a short trial of the script on a fraction of its samples, see `hetero.loaders.parts`.
        """
        # Raise the user's exception type, because a script may catch it around len(loader), as around the loop.
        with raising_user_types():
            self.extent.dataset_samples = whole = self.dataset_samples()
        used = whole if self._part is None else self._part.num_samples(whole)
        if (plan := self.plan_of_order()) is not None:
            used = plan.num_samples
        self.extent.pass_samples = used
        # Without a part, a plan such as that of a mixture may have fewer samples than the data set too.
        if self._part is not None and used < whole and not self._has_reported_part:
            self._has_reported_part = True
            logger.info("loader %s: this canary run uses %d of %d samples", self.name, used, whole)
        return used

    def remote_description(self) -> Description | None:
        """Return what endpoints say of the data set. None if this process builds it."""
        if not (is_remote() and isinstance(self.subject, DatasetSpec)):
            return None
        from hetero.loaders import remote  # imports the data plane, which local jobs do not need

        return remote.describe(self.subject)

    def local_built(self) -> BuiltDataset:
        """Return the data set, built in this process. Only without a `remote_description`."""
        raise NotImplementedError

    def local_fingerprint(self) -> str | None:
        """Return a fingerprint of the data set's content. Return None if this process would have to build it first."""
        raise NotImplementedError

    def fingerprint(self) -> str | None:
        """Return a fingerprint of the data set's content. None if it is not known without building the data set."""
        remote = self.remote_description()
        return self.local_fingerprint() if remote is None else remote.fingerprint

    def plan_of_order(self) -> Plan | None:
        """Return the plan that ``shuffle="window"`` or a `hetero.Mixture` names. None for a permutation of all samples.

        Raises:
            ConfigError: If the data set does not have what the plan needs.
        """
        if self.options.order not in ("window", "mixture"):
            return None
        if self._plan is None:
            with raising_user_types():
                sources, num_samples = self._sources(), self.dataset_samples()
            check_sources(sources, num_samples, self.dataset_name)
            if self.options.mixture is not None:
                fraction = 1.0 if self._part is None else self._part.fraction
                self._plan = MixturePlan(self.options.mixture, sources, fraction=fraction)
            else:
                layout = self._only_layout(sources)
                self._plan = WindowPlan(layout if self._part is None else self._part.layout(layout))
        return self._plan

    def skip(self, batches: int) -> Start:
        """Let the next pass begin ``batches`` later. Return its start. See `Progress.skip`."""
        start = self._begin_later(batches)
        self.prefetched.discard()
        logger.info("loader %s: the next pass begins %d batches later, at batch %d", self.name, batches, start.batches)
        return start

    def _begin_later(self, batches: int) -> Start:
        """Change the position for `skip`. Return the start of the next pass."""
        return self.progress.skip(batches)

    def samples_by_source(self, work: Work) -> dict[str, int] | None:
        """Return how many samples of a batch are of each source of a `hetero.Mixture`. None without one."""
        if self.options.mixture is not None and isinstance(work, LaneWork):
            return work.samples_by_source(self.source_names)
        if not isinstance(self._plan, MixturePlan) or not isinstance(work, IndexedWork):
            return None
        return self._plan.count(np.asarray(work.indices))

    @functools.cached_property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources of the data set. Empty without a `hetero.Mixture`."""
        with raising_user_types():
            return () if self.options.mixture is None else tuple(source.name for source in self._sources())

    def _sources(self) -> Sequence[Source]:
        """Return the parts of the data set that a plan may draw from."""
        remote = self.remote_description()
        return self.local_built().sources if remote is None else remote.sources

    def _part_indices(self, part: SamplePart) -> npt.NDArray[np.int64]:
        """Return the samples that a canary run uses. Random rows of shards would make it read nearly all blocks."""
        with raising_user_types():
            sources, num_samples = self._sources(), self.dataset_samples()
        check_sources(sources, num_samples, self.dataset_name)
        return part.indices(num_samples, sources[0].layout if len(sources) == 1 else None)

    def _only_layout(self, sources: Sequence[Source]) -> WindowLayout:
        """Return the layout of a data set that is one source."""
        layouts = [source.layout for source in sources]
        if len(layouts) == 1 and layouts[0] is not None:
            return layouts[0]
        why = "it does not know which samples lie together"
        to_do = 'shuffle="window" is for the data sets of hetero.shards. Pass shuffle=True for others.'
        if len(layouts) > 1:
            why = f"it has {len(layouts)} sources"
            to_do = "Pass shuffle=hetero.Mixture({...}) with their shares. Or return one of them alone."
        raise ConfigError(f"data set {self.dataset_name} cannot be shuffled in windows: {why}\n  {to_do}")

    def shard(self) -> Shard:
        """Return this process's rank and world size."""
        return shard_of_environment()

    def order(self) -> BuiltInOrder:
        """Return the loader's own order. This needs the length of the data set.

        Raises:
            ConfigError: If the data set is empty and the order is shuffled, which torch rejects too.
        """
        options = self.options
        num_samples = self.num_samples()
        if not num_samples:
            self._report_empty()
        plan = self.plan_of_order()
        # A plan contains the part. An empty data set has no samples to choose.
        sample_part = self._part if plan is None and num_samples else None
        return BuiltInOrder(
            num_samples=num_samples,
            # Without a batch size, each request is for one sample.
            batch_size=options.batch_size or 1,
            seed=options.seed,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
            padding=options.padding,
            permute=self.permute,
            plan=plan,
            part=None if sample_part is None else self._part_indices(sample_part),
        )

    def _report_empty(self) -> None:
        """Raise an error for an empty data set if the order is shuffled. Otherwise log one warning."""
        subject = self.subject if isinstance(self.subject, DatasetSpec) else type(self.subject).__name__
        what = f"data set {subject} has no samples"
        # An error, because a job that trained on nothing ended with exit code 0. torch raises here too.
        if self.options.shuffle:
            raise ConfigError(
                f"{what}\n  Check that its folder exists and is not empty, on this host and on data hosts."
            )
        if not self._has_reported_empty:
            self._has_reported_empty = True
            logger.warning("%s, so loader %s has no batches", what, self.name)

    def num_batches(self) -> int:
        """Return the number of batches of a pass on this rank: all of an epoch, or less in ``hetero check``."""
        return min(self.order().num_batches(self.shard()), self.max_pass_batches)

    @property
    def max_pass_batches(self) -> int:
        """Largest number of batches of a pass. Only ``hetero check SCRIPT`` sets a limit."""
        session = control.current()
        return sys.maxsize if session is None else session.options.max_pass_batches or sys.maxsize

    def shortened(self, planned: Iterator[PlannedBatch]) -> Iterator[PlannedBatch]:
        """Return at most `max_pass_batches` batches of a pass: the first batches, and the last one.

        Only ``hetero check`` limits a pass. The last batch shows two faults that the first batches do not show. A data
        set may fail for a batch that is smaller than all others. It may also fail if earlier batches are left out.
        """
        # The returned iterator must not refer to this loader. Otherwise a loader that the script drops stays in memory.
        return _first_and_last(planned, self.max_pass_batches)

    def num_global_batches(self, start: Start) -> int:
        """Return the number of global batches of an epoch, with the length of the data set when the epoch began."""
        order = self.order()
        # A data set may grow between two epochs. Then an epoch of a loaded state had another length.
        if start.num_samples is not None:
            order = dataclasses.replace(order, num_samples=start.num_samples)
        return order.num_global_batches(self.shard().world_size)

    def is_through(self, start: Start) -> bool:
        """Return whether no global batch is left from ``start`` on. The epoch is then over on all ranks."""
        return start.batches >= self.num_global_batches(start)

    def is_over(self, start: Start) -> bool:
        """Return whether no batch of the epoch is left from ``start`` on. A subclass returns True if it cannot know."""
        return self.is_through(start)

    def warn_of_rest(self, resumed: Start | None) -> None:
        """Log a warning if `set_epoch` was just called and skips the rest of the epoch of a loaded state.

        Args:
            resumed: Where the next pass would have started before the epoch was set. None without a loaded state.
        """
        # A script that chooses the epoch after the state's epoch may have meant to continue the state's epoch.
        if resumed is None or self.progress.next_start().epoch != resumed.epoch + 1 or self.is_over(resumed):
            return
        logger.warning(
            "set_epoch skips the rest of epoch %d, because the loaded state is after %d batches of that epoch. "
            "To continue there, call set_epoch(%d)",
            resumed.epoch,
            resumed.batches,
            resumed.epoch,
        )

    def facts(self) -> LoaderState:
        """Return a state with this loader's constant values. Its epoch and batches are 0."""
        return LoaderState(
            epoch=0,
            batches=0,
            order=_order_name(self.options),
            plan=None if (plan := self.plan_of_order()) is None else plan.digest(),
            seed=self.options.seed,
            num_samples=self.num_samples(),
            global_batch=(self.options.batch_size or 1) * self.shard().world_size,
            dataset=self.dataset_name,
            arguments=self.arguments_digest,
        )

    def request(self, planned: PlannedBatch, epoch: int, *, is_prefetch: bool = False) -> BatchRequest:
        """Return the request for a planned batch.

        Args:
            planned: The batch.
            epoch: The epoch of the batch.
            is_prefetch: Whether the script has not asked for this epoch yet. If so, the batch may be discarded.
        """
        self._num_requests += 1
        return BatchRequest(
            spec=self.subject if isinstance(self.subject, DatasetSpec) else _OBJECT_SPEC,
            work=planned.work,
            seed=self.options.seed,
            epoch=epoch,
            position=planned.position,
            collate=self.collate,
            # torch's workers make collated tensors contiguous. A batch must be the same wherever it is computed.
            contiguous=self.has_workers,
            step=self._num_requests,
            # Do not spend one of the few purity checks on a prefetched batch, because that batch may be discarded.
            # ``hetero check`` fetches few batches, so there prefetched batches are checked too.
            verify=(planned.work.may_be_checked and (not is_prefetch or is_checked()) and self._wants_purity_check()),
            on_sample_error=self.options.on_sample_error,
            compression=self.options.compression,
            lane=planned.lane,
        )

    def _wants_purity_check(self) -> bool:
        """Return whether the next batch should be computed twice, to compare the results. If so, count the check.

        Only rank 0 checks. Loaders of the same kind share the number of checks, because a script may make a new loader
        for every epoch.
        """
        session = control.current()
        if session is None or session.rank != 0:
            return False
        num_verified = _num_verified.get(self.kind, 0)
        if num_verified >= session.options.purity_checks:
            return False
        _num_verified[self.kind] = num_verified + 1
        return True

    def _make_timer(self) -> StepTimer:
        """Return a timer that also reports the skipped samples, the bytes and the extent of the passes."""
        timer = super()._make_timer()
        timer.skips = self.skips
        timer.traffic = self.traffic
        timer.extent = self.extent
        return timer


def _order_name(options: LoaderOptions) -> str:
    """Return the name of the order in a state."""
    if not options.shuffle:
        return "sequential"
    return "shuffled" if options.order == "hetero" else options.order


def _first_and_last(planned: Iterator[PlannedBatch], limit: int) -> Iterator[PlannedBatch]:
    """Yield all batches of a pass. If there are more than ``limit``, yield ``limit - 1`` batches and the last one."""
    yield from itertools.islice(planned, limit - 1)
    # A deque of length 1 keeps only the last of the remaining batches. A sampler may be endless, so there is a limit.
    yield from deque(itertools.islice(planned, _MAX_PLANNED), maxlen=1)


def _arguments_digest(subject: Any) -> str:
    """Return a hexadecimal digest of a data set's arguments, which may be secret. Empty for a data set object."""
    if not isinstance(subject, DatasetSpec):
        return ""
    return blake2b(subject.arguments_json.encode(), digest_size=8).hexdigest()


def _check_batch_size(batch_size: int) -> None:
    """Reject a batch with more samples than a request can list. If batches are made locally, only log a warning."""
    limits = Limits()
    if batch_size > limits.max_indices:
        if is_remote():
            raise ConfigError(too_many_samples(batch_size, limits))
        # The local run works, but a job with data hosts would reject the loader.
        logger.warning("%s", too_many_samples(batch_size, limits))


def shard_of_environment() -> Shard:
    """Return this process's rank and world size, from the launcher's session, else from torchrun, else from mpirun."""
    session = control.current()
    if session is not None:
        return Shard(session.rank, session.world_size)
    # torchrun sets the first pair of variables, mpirun the second.
    for names in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        rank, world_size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and world_size.isdecimal():
            return Shard(int(rank), int(world_size))
    return Shard()


def is_remote() -> bool:
    """Return whether batches come from endpoints in this job."""
    session = control.current()
    return session is not None and session.remote


def is_checked() -> bool:
    """Return whether ``hetero check`` runs the script."""
    session = control.current()
    return session is not None and session.options.max_pass_batches is not None


def answer_lengths() -> None:
    """Let ``len(spec)`` ask endpoints from now on, because this host may lack the data."""
    from hetero.loaders import remote

    set_describer(remote.num_samples)

"""What lies behind a loader of any framework: data set, order, place in it, requests."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from hetero.audit.ledger import LoaderFacts
from hetero.batches.request import BatchRequest, SampleErrorPolicy
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders.sampling import BuiltInOrder, Permute, PlannedBatch, Shard
from hetero.loaders.state import LoaderState, Progress, Start
from hetero.loaders.timing import LoaderTiming
from hetero.metrics.skips import DEFAULT_MAX_SKIPS, SkipLog
from hetero.metrics.steps import StepTimer
from hetero.metrics.traffic import Traffic
from hetero.spec import DatasetSpec, set_describer
from hetero.wire.limits import Limits
from hetero.wire.requests import too_many_samples

__all__ = ["LoaderOptions", "LoaderPipeline", "answer_lengths", "is_remote", "shard_of_environment"]

logger = logging.getLogger(__name__)

_OBJECT_SPEC = DatasetSpec("object")  # what a request names where the data set is an object at hand
_num_verified: dict[tuple[str, DatasetSpec | None], int] = {}  # purity checks of this process, by loader


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """What a loader of any framework is asked for; who takes it from the script has checked it."""

    batch_size: int | None
    """Per rank; None for single samples, and where a user's batch sampler decides."""
    shuffle: bool = False
    """Permute the samples of every epoch."""
    drop_last: bool = False
    """Leave out the last incomplete global batch."""
    padding: bool = True
    """Whether ranks get equally many samples."""
    seed: int = 0
    """Signed 64-bit."""
    compression: str | None = None
    """Of batches from endpoints; None: none."""
    on_sample_error: SampleErrorPolicy = "raise"
    """Whether others of a batch stand in for samples that raise."""
    max_skips: int = DEFAULT_MAX_SKIPS
    """How many of these are borne, at least 0."""
    name: str | None = None
    """For reports; None: the data set's."""
    order: str = "hetero"
    """Whose permutation of an epoch, where shuffled: ``hetero``, or ``torch`` for that of torch's samplers."""
    shard: Shard | None = None
    """This process's place among those that share an epoch; None: what the framework's process group says."""


class LoaderPipeline(LoaderTiming):
    """The parts of one loader that are the same for every framework. Those of a framework subclass it.

    Args:
        subject: A spec, or the user's data set object.
        options: What was asked for.

    Raises:
        ConfigError: If batches come from endpoints and are larger than a request can ask for.
    """

    def __init__(self, subject: Any, options: LoaderOptions) -> None:
        if isinstance(subject, DatasetSpec):
            _check_batch_size(options.batch_size or 1)
        dataset = subject.name if isinstance(subject, DatasetSpec) else type(subject).__name__
        super().__init__(options.name or dataset)
        self.subject = subject
        self.options = options
        self.skips = SkipLog(self.name, dataset, max_skips=options.max_skips)
        self.traffic = Traffic(options.compression)
        """What batches from endpoints took."""
        self.progress = Progress()
        self.audited_as: LoaderFacts | None = None
        """What the ledger knows this loader by; made with its first entry."""
        self._num_requested = 0
        self._is_told_empty = False

    @property
    def has_own_order(self) -> bool:
        """Whether the order is the loader's own, and not that of a user's sampler."""
        return True

    @property
    def collate(self) -> bool:
        """Whether samples are made into batches."""
        return self.options.batch_size is not None

    @property
    def has_workers(self) -> bool:
        """Whether torch's loader with the same arguments would fetch in worker processes."""
        return False

    def num_samples(self) -> int:
        """Return the length of the data set; may ask for it."""
        raise NotImplementedError

    def fingerprint(self) -> str | None:
        """Return what tells the data set's content, None if this process cannot tell without building it."""
        raise NotImplementedError

    def shard(self) -> Shard:
        """Return this process's rank and world size."""
        return shard_of_environment()

    @property
    def permute(self) -> Permute | None:
        """Draws the permutation of an epoch; None: as hetero does."""
        return None

    def order(self) -> BuiltInOrder:
        """Return the loader's own order; asks for the length of the data set.

        Raises:
            ConfigError: There is nothing to shuffle, as torch has it.
        """
        options = self.options
        num_samples = self.num_samples()
        if not num_samples:
            self._tell_empty()
        return BuiltInOrder(
            num_samples=num_samples,
            batch_size=options.batch_size or 1,
            seed=options.seed,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
            padding=options.padding,
            permute=self.permute,
        )

    def _tell_empty(self) -> None:
        subject = self.subject if isinstance(self.subject, DatasetSpec) else type(self.subject).__name__
        what = f"data set {subject} has no samples; expected them where it looks for its data"
        if self.options.shuffle:
            raise ConfigError(
                f"{what}\n  Look whether the folder is there and not empty on this host and on data hosts."
            )
        if not self._is_told_empty:
            self._is_told_empty = True
            logger.warning("%s: loader %s has no batches", what, self.name)

    def num_batches(self) -> int:
        """Return the batches of an epoch on this rank."""
        return self.order().num_batches(self.shard())

    def num_global_batches(self, start: Start) -> int:
        """Return the global batches of an epoch, of the data set's length when it began."""
        order = self.order()
        if start.num_samples is not None:
            order = dataclasses.replace(order, num_samples=start.num_samples)
        return order.num_global_batches(self.shard().world_size)

    def is_through(self, start: Start) -> bool:
        """Whether nothing is left of an epoch in the loader's own order, on any rank."""
        return start.batches >= self.num_global_batches(start)

    def is_over(self, start: Start) -> bool:
        """Whether nothing is left of an epoch, or nobody can tell."""
        return self.is_through(start)

    def warn_of_rest(self, resumed: Start | None) -> None:
        """Say so if the epoch that was chosen just now leaves out the rest of a loaded one.

        Args:
            resumed: Where a loaded state had the next pass begin before; None: there was none.
        """
        if resumed is None or self.progress.next_start().epoch != resumed.epoch + 1 or self.is_over(resumed):
            return
        logger.warning(
            "set_epoch leaves out the rest of epoch %d: the loaded state was taken after %d batches of it; "
            "call set_epoch(%d) to go on there",
            resumed.epoch,
            resumed.batches,
            resumed.epoch,
        )

    def facts(self) -> LoaderState:
        """Return a state of this loader at no place in particular."""
        return LoaderState(
            epoch=0,
            batches=0,
            order=("torch" if self.options.order == "torch" else "shuffled") if self.options.shuffle else "sequential",
            seed=self.options.seed,
            num_samples=self.num_samples(),
            global_batch=(self.options.batch_size or 1) * self.shard().world_size,
        )

    def request(self, planned: PlannedBatch, epoch: int) -> BatchRequest:
        """Return the request for a planned batch."""
        self._num_requested += 1
        return BatchRequest(
            spec=self.subject if isinstance(self.subject, DatasetSpec) else _OBJECT_SPEC,
            indices=planned.indices,
            occurrences=planned.occurrences,
            seed=self.options.seed,
            epoch=epoch,
            position=planned.position,
            collate=self.collate,
            contiguous=self.has_workers,
            step=self._num_requested,
            verify=self._wants_purity_check(),
            on_sample_error=self.options.on_sample_error,
            compression=self.options.compression,
        )

    def _wants_purity_check(self) -> bool:
        """Whether the next request belongs to the first ones of this loader, which are computed twice.

        A loader that the script makes anew for every epoch counts as one.
        """
        session = control.current()
        if session is None or session.rank != 0:
            return False
        key = self.name, self.subject if isinstance(self.subject, DatasetSpec) else None
        num_verified = _num_verified.get(key, 0)
        if num_verified >= session.options.purity_checks:
            return False
        _num_verified[key] = num_verified + 1
        return True

    def _make_timer(self) -> StepTimer:
        timer = super()._make_timer()
        timer.skips = self.skips
        timer.traffic = self.traffic
        return timer


def _check_batch_size(batch_size: int) -> None:
    """Refuse more samples than a request can ask for; log a warning where fetching is local."""
    limits = Limits()
    if batch_size > limits.max_indices:
        if is_remote():
            raise ConfigError(too_many_samples(batch_size, limits))
        logger.warning("%s", too_many_samples(batch_size, limits))


def shard_of_environment() -> Shard:
    """Return this process's rank and world size: the launcher's session's, else those of torchrun, else of mpirun."""
    session = control.current()
    if session is not None:
        return Shard(session.rank, session.world_size)
    for names in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        rank, world_size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and world_size.isdecimal():
            return Shard(int(rank), int(world_size))
    return Shard()


def is_remote() -> bool:
    """Whether batches come from endpoints in this job."""
    session = control.current()
    return session is not None and session.remote


def answer_lengths() -> None:
    """Have the endpoints answer ``len(spec)``: this host needs no data."""
    from hetero.loaders import remote

    set_describer(remote.num_samples)

"""What lies behind a loader of any framework: data set, order, place in it, requests, step timer."""

from __future__ import annotations

import os
from typing import Any

from hetero.audit.ledger import LoaderFacts
from hetero.batches.request import BatchRequest, SampleErrorPolicy
from hetero.control import session as control
from hetero.datasets import DatasetSpec, set_describer
from hetero.loaders.sampling import BuiltInOrder, PlannedBatch, Shard
from hetero.loaders.state import LoaderState, Progress
from hetero.metrics.skips import SkipLog
from hetero.metrics.steps import DEFAULT_WARMUP_STEPS, StepTimer
from hetero.metrics.traffic import Traffic

__all__ = ["LoaderPipeline", "answer_lengths", "is_remote", "shard_of_environment"]

_OBJECT_SPEC = DatasetSpec("object")  # what a request names where the data set is an object at hand
_num_verified = 0  # purity checks asked for by this process


class LoaderPipeline:
    """The parts of one loader that are the same for every framework. Those of a framework subclass it.

    Args:
        subject: A spec, or the user's data set object.
        batch_size: Per rank; None for single samples.
        shuffle: Permute the samples of every epoch.
        drop_last: Leave out the last incomplete global batch.
        padding: Whether ranks get equally many samples.
        seed: Signed 64-bit.
        compression: Of batches from endpoints; None: none.
        on_sample_error: Whether others of a batch stand in for samples that raise.
        skips: Counts them.
        name: For reports.
    """

    def __init__(
        self,
        subject: Any,
        *,
        batch_size: int | None,
        shuffle: bool,
        drop_last: bool,
        padding: bool,
        seed: int,
        compression: str | None,
        on_sample_error: SampleErrorPolicy,
        skips: SkipLog,
        name: str,
    ) -> None:
        self.subject = subject
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.padding = padding
        self.seed = seed
        self.compression = compression
        self.on_sample_error: SampleErrorPolicy = on_sample_error
        self.skips = skips
        self.traffic = Traffic(compression)
        """What batches from endpoints took."""
        self.name = name
        self.progress = Progress()
        self.audited_as: LoaderFacts | None = None
        """What the ledger knows this loader by; made with its first entry."""
        self._num_requested = 0
        self._timer: StepTimer | None = None
        self._timed: object = None

    @property
    def has_own_order(self) -> bool:
        """Whether the order is the loader's own, and not that of a user's sampler."""
        return True

    @property
    def collate(self) -> bool:
        """Whether samples are made into batches."""
        return self.batch_size is not None

    def num_samples(self) -> int:
        """Return the length of the data set; may ask for it."""
        raise NotImplementedError

    def fingerprint(self) -> str | None:
        """Return what tells the data set's content, None if this process cannot tell without building it."""
        raise NotImplementedError

    def shard(self) -> Shard:
        """Return this process's rank and world size."""
        return shard_of_environment()

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

    def facts(self) -> LoaderState:
        """Return a state of this loader at no place in particular."""
        return LoaderState(
            epoch=0,
            batches=0,
            order="shuffled" if self.shuffle else "sequential",
            seed=self.seed,
            num_samples=self.num_samples(),
            global_batch=(self.batch_size or 1) * self.shard().world_size,
        )

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
            self._timer.traffic = self.traffic
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


def shard_of_environment() -> Shard:
    """Return this process's rank and world size: from the launcher's session, else ``RANK`` and ``WORLD_SIZE``."""
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
    from hetero.loaders import remote

    set_describer(remote.num_samples)


def _wants_purity_check() -> bool:
    """Whether the next request belongs to the few of the job that are computed twice."""
    global _num_verified
    session = control.current()
    if session is None or session.rank != 0 or _num_verified >= session.options.purity_checks:
        return False
    _num_verified += 1
    return True

"""Computes what one request asks for, a batch or a part of one, and encodes it as the answer."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import Cancelled, dataset_error
from hetero.batches.fetch import fetch, fetch_part
from hetero.batches.request import BatchRequest
from hetero.batches.skips import Skips
from hetero.batches.structure.trees import is_plain
from hetero.endpoint.compute import Compute, Task
from hetero.endpoint.gathering import Gathering
from hetero.endpoint.parts import Links
from hetero.errors import ConfigError, DatasetError, ProtocolError
from hetero.wire.compression import is_installed
from hetero.wire.framing import EncodedBatch
from hetero.wire.limits import AT_ONCE_BYTES, Limits

__all__ = ["Experience", "RequestedBatch"]

_SMALL_BYTES = 512 * 2**10
_QUICK_S = 0.0005


class Experience:
    """What an endpoint has learnt from the batches of one data set."""

    def __init__(self) -> None:
        self.latest_bytes = math.inf
        """Bytes of the payload of the latest batch. Infinite before the first."""
        self.latest_s = math.inf
        """Seconds that the compute thread took for the latest batch."""
        self.can_send_samples = True
        """Whether all samples so far could be sent without collation. If not, no other endpoint is asked for parts."""
        self.num_parts = 0
        """Parts that were computed for other endpoints."""

    @property
    def is_sent_at_once(self) -> bool:
        """Whether the compute thread should send the next batch itself.

        It should if the latest batch was small (`_SMALL_BYTES`), or if it was larger (up to `AT_ONCE_BYTES`) and took
        almost no time to compute. Sending such a larger batch takes a while. If batches also take time to compute,
        another thread should send them, so the compute thread can begin the next batch.
        """
        # When the compute thread sent all batches up to `AT_ONCE_BYTES`, batches of 1 MB that take 0.9 ms to compute
        # came at 0.78 of the rate that they had when another thread sent them. With the limit `_QUICK_S`, they come at
        # 0.90 of that rate.
        max_bytes = AT_ONCE_BYTES if self.latest_s < _QUICK_S else _SMALL_BYTES
        return self.latest_bytes <= max_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedBatch:
    """One request, and what this endpoint needs to answer it.

    Attributes:
        request: The request.
        data: The bytes of the request, as they arrived.
        built: The data set that the request names.
        experience: What was learnt from earlier batches of the data set.
        limits: Bounds of the batch.
        name: Name of this endpoint, for the user's errors.
        load: The compute threads, whose queue is this endpoint's load.
        links: Links to the endpoints of other hosts that keep samples. None: this endpoint computes all samples.
    """

    request: BatchRequest
    data: bytes
    built: BuiltDataset
    experience: Experience
    limits: Limits
    name: str
    load: Compute
    links: Links | None

    def gathering(self) -> Gathering | None:
        """Return the object that gets samples from the hosts that keep them, or None if this endpoint computes all."""
        request = self.request
        # `verify` needs two computations, and a part is computed only once. With "skip", a sample that raises would
        # make its whole part fail. In both cases a reader of hetero sends no owners, but another sender may.
        if request.owners is None or request.verify or request.on_sample_error == "skip" or self.links is None:
            return None
        # Parts are sent as lists of samples, so the samples must be computed one by one, and arrive unchanged.
        if not (self.experience.can_send_samples and self.built.is_divisible):
            return None
        return Gathering(request, limits=self.limits, links=self.links, on_refused=self._note_refused)

    def compute(self, task: Task, gathering: Gathering | None = None) -> EncodedBatch | tuple[Any, Skips | None, int]:
        """Compute the batch or the part. Runs on a compute thread.

        Args:
            task: The task.
            gathering: The samples that other hosts have given.

        Returns:
            The encoded batch or part. If a batch is in new memory, it is returned unencoded instead, with its skips and
            the number of its parts, and `finish` encodes it.

        Raises:
            Cancelled: The task was cancelled.
            DatasetError: The user's code raised, or the result cannot be sent.
            ProtocolError: A part was requested of a data set that is not divisible here.
        """
        try:
            return self._compute_part(task) if self.request.is_part else self._compute_batch(task, gathering)
        except (DatasetError, Cancelled, ProtocolError):
            raise
        except BaseException as error:
            # A transform may call sys.exit(), for example. This is the user's failure, and must not end the endpoint.
            raise dataset_error(error, dataset=self.request.spec.name, host=self.name, stage="sample") from error

    def finish(self, task: Task) -> EncodedBatch | None:
        """Return the batch of a task that is done, None if the task was cancelled.

        Raises:
            DatasetError, ProtocolError: As in `compute`.
        """
        if task.was_cancelled:
            return None
        try:
            computed = task.result()
        except Cancelled:
            return None
        if isinstance(computed, EncodedBatch):
            answer = computed
        else:
            batch, skips, num_parts = computed
            answer = self._encode(batch, skips, num_parts, copy=False)
        # The size of a part says nothing about the size of the next batch.
        if not self.request.is_part:
            self.experience.latest_bytes = answer.nbytes
        # If the package for compression is not installed here, the batch is sent uncompressed, and the reader logs a
        # warning. The batch is the same, and a slower job is better than a job that does not run.
        if self.request.compression is not None and is_installed(self.request.compression):
            answer.compress(self.request.compression)
        return answer

    def _compute_batch(self, task: Task, gathering: Gathering | None) -> EncodedBatch | tuple[Any, Skips | None, int]:
        """Compute a whole batch. Return it as `compute` does."""
        request, built = self.request, self.built
        begin_s = time.monotonic()
        skipped: list[Skips] = []
        batch = fetch(
            built,
            request,
            host=self.name,
            cancelled=task.is_cancelled,
            on_skips=skipped.append,
            positions=None if gathering is None else gathering.positions,
        )
        num_parts = 1 if gathering is None else gathering.num_parts
        skips = skipped[0] if skipped else None
        # If the batch is in new memory, a handler thread can encode it while the next batch is computed. Otherwise it
        # may be in a buffer that the user's code fills again for the next batch, so encode a copy here. Before, a
        # buffer was filled again while another thread encoded it, and the wrong bytes were sent. The checksum cannot
        # notice this, because it is computed from the wrong bytes.
        is_new = built.makes_new_memory(collate=request.collate)
        encoded = None if is_new else self._encode(batch, skips, num_parts, copy=True)
        self.experience.latest_s = time.monotonic() - begin_s
        return encoded or (batch, skips, num_parts)

    def _note_refused(self) -> None:
        """Record that a helper could not send samples of this data set uncollated. No later batch asks for parts."""
        self.experience.can_send_samples = False

    def _compute_part(self, task: Task) -> EncodedBatch:
        """Compute a part of a batch for another endpoint, and return it encoded."""
        if self.links is None or not self.built.is_divisible:
            raise ProtocolError(f"batches of data set {self.request.spec.name!r} are not computed in parts here")
        samples = fetch_part(self.built, self.request, host=self.name, cancelled=task.is_cancelled)
        if not all(map(is_plain, samples)):
            # The asking endpoint collates the samples, so it must get them exactly as they were made here.
            raise self._unsendable(ConfigError("a sample may change if it is sent without collation"))
        encoded = self._encode(samples, skips=None, num_parts=1, copy=True)
        self.experience.num_parts += 1
        return encoded

    def _encode(self, batch: Any, skips: Skips | None, num_parts: int, *, copy: bool) -> EncodedBatch:
        """Return the answer that holds a batch or a list of samples.

        If ``copy`` is true, the answer holds a copy, and this runs on the compute thread during the batch's own task.

        Raises:
            DatasetError: The batch holds an object that cannot be sent, or is too large.
        """
        try:
            return EncodedBatch(
                batch,
                limits=self.limits,
                # If the batch is copied, its own task is still running. Subtract 1, because that task does not count as
                # load.
                num_queued=self.load.num_queued - int(copy),
                copy=copy,
                skips=skips,
                request=self.data,
                is_part=self.request.is_part,
                num_parts=num_parts,
            )
        except ConfigError as error:
            raise self._unsendable(error) from error

    def _unsendable(self, error: ConfigError) -> DatasetError:
        return dataset_error(str(error), dataset=self.request.spec.name, host=self.name, stage="encode")

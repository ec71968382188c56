"""Requests for batches. A request holds everything that its batch depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from hetero.batches.build import BuiltDataset
from hetero.batches.skips import FailedSamples
from hetero.errors import ConfigError
from hetero.spec import DatasetSpec, Index

__all__ = [
    "SAMPLE_ERROR_POLICIES",
    "BatchRequest",
    "ChoosePositions",
    "Helper",
    "SampleErrorPolicy",
    "Work",
]

SampleErrorPolicy: TypeAlias = Literal["raise", "skip"]
"""Handling of a sample that raises: raise an error, or skip the sample as `hetero.batches.skips` describes."""
SAMPLE_ERROR_POLICIES: tuple[str, ...] = get_args(SampleErrorPolicy)

ChoosePositions: TypeAlias = Callable[[list[Any]], Iterator[int]]
"""A function that gets a list with one item per sample, and yields the positions of the samples to compute here.

It puts all other samples into the list itself. They are in the list after the function has yielded the last position.
"""


class Work(Protocol):
    """The samples of one batch, and how they are computed.

    Each kind of work has a module in this package, such as `hetero.batches.indexed`, and a module in `hetero.wire` that
    sends it. `hetero.wire.requests` lists the kinds.
    """

    @property
    def may_be_hedged(self) -> bool:
        """Whether a second endpoint may compute the same batch at the same time."""

    @property
    def may_be_checked(self) -> bool:
        """Whether a second computation must give the same batch."""

    @property
    def num_samples(self) -> int:
        """Number of samples, which is known before they are computed."""

    @property
    def labels(self) -> Sequence[Index]:
        """Names of the samples in order, for messages and for tools that show the indices of a batch."""

    def key(self, seed: int, epoch: int, position: int) -> int:
        """Return the 64-bit random key of the whole batch. Different arguments and work have different keys."""

    def compute(
        self,
        built: BuiltDataset,
        request: BatchRequest,
        *,
        host: str,
        cancelled: Callable[[], bool] | None = None,
        failed: FailedSamples | None = None,
        positions: ChoosePositions | None = None,
    ) -> Sequence[Any]:
        """Return the samples in order. With ``failed``, substitutes replace the samples that raise.

        ``positions`` is given only for data sets that are `BuiltDataset.is_divisible`.

        Raises:
            Cancelled: If ``cancelled()`` was true between two samples.
            DatasetError: If the user's code raises.
        """

    def part(self, positions: Sequence[int]) -> Work:
        """Return the work for the samples at some positions."""

    def digest(self) -> bytes:
        """Return a 16-byte hash of the samples in order, for the ledger."""

    def samples_sum(self, *, leave_out_repeats: bool) -> bytes:
        """Return a 16-byte sum over the samples, for the ledger. The sum does not depend on their order.

        Args:
            leave_out_repeats: Whether to ignore samples that came before in the epoch. Padding repeats samples, and how
                many it repeats depends on the number of ranks.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """An endpoint that may compute a part of a batch for the endpoint that has the request.

    The fields are the same as in `hetero.control.members.directory.EndpointRecord`.
    """

    endpoint_id: str
    host: str
    address: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRequest:
    """Everything that a batch depends on, and options for computing and sending it.

    Raises:
        ConfigError: If the fields contradict each other.
    """

    spec: DatasetSpec
    """Spec of the data set."""
    work: Work
    """The samples of the batch."""
    seed: int
    """Seed of the loader, signed 64-bit."""
    epoch: int
    """The epoch, at least 0, or the number of a further pass in this epoch, see `hetero.epochs`."""
    position: int
    """Position of this batch in the epoch's global order, at least 0."""
    collate: bool = True
    """Whether to collate. If not, the work has exactly one sample, as with torch's ``batch_size=None``."""
    as_is: bool = False
    """Whether to return the sample itself, without torch's ``default_convert``.

    Ignored with collation or with a ``collate_fn``.
    """
    contiguous: bool = False
    """Whether to make the tensors of torch's own collation contiguous, as torch itself does only in its workers."""
    step: int = 0
    """Step of the rank that sends the request. Lower steps are served first. The step does not affect the batch."""
    verify: bool = False
    """Whether to compute the batch twice and compare the results (the purity check)."""
    on_sample_error: SampleErrorPolicy = "raise"
    """With ``"skip"``, another sample of the batch replaces a sample that raises."""
    compression: str | None = None
    """Compression for sending the payload, see `hetero.wire.compression`. It does not affect the batch."""
    helpers: tuple[Helper, ...] = ()
    """One endpoint of each other host that keeps samples of the batch. They do not affect the batch."""
    owners: npt.NDArray[np.uint8] | None = None
    """For each sample, the number of the helper whose host keeps the sample. The first of ``helpers`` has number 1. 0
    means the host of the endpoint that has the request. None without helpers."""
    lane: int | None = None
    """Batches of the same lane read the same files (`hetero.plans.windows`), or the same iterators
    (`hetero.plans.lanes`). It does not affect the batch. Not sent."""
    is_part: bool = False
    """Whether this asks for a part of a batch: a list of samples, without collation."""

    def __post_init__(self) -> None:
        if not self.collate and self.work.num_samples != 1:
            raise ConfigError(f"a request without collation has {self.work.num_samples} indices, expected exactly 1")
        if self.on_sample_error not in SAMPLE_ERROR_POLICIES:
            raise ConfigError(f"on_sample_error is {self.on_sample_error!r}, expected 'raise' or 'skip'")
        if self.on_sample_error == "skip" and not self.collate:
            raise ConfigError("a request without collation cannot skip: no other sample can be the substitute")

    @property
    def key(self) -> int:
        """The 64-bit random key of the whole batch, for collation and for ``seeding="batch"``."""
        return self.work.key(self.seed, self.epoch, self.position)

"""Exceptions that hetero raises, and the exit codes that its commands return.

    HeteroError
    |- ConfigError (also ValueError)        |- DataPlaneError
    |- ClusterError                         |  |- EndpointUnavailableError
    |- PortError                            |  |- BatchTimeoutError (also TimeoutError)
    |- ChildFailedError                     |  |- DatasetMismatchError
    |- ResourcesError                       |  |- ProtocolError
    |- CapacityError                        |  |  `- ProtocolMismatchError
    |- ShutdownError                        |  `- AuthenticationError
    `- DatasetError

Each takes one record: a message, or a frozen dataclass whose ``str`` is the
message. One argument is what makes an exception survive the trip between
processes (`copyreg` rebuilds it from ``args``).
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "AuthenticationError",
    "BatchTimeoutError",
    "CapacityError",
    "ChildFailedError",
    "ChildFailure",
    "ClusterError",
    "ConfigError",
    "DataPlaneError",
    "DatasetError",
    "DatasetMismatchError",
    "EndpointUnavailableError",
    "ExitCode",
    "HeteroError",
    "PortError",
    "ProtocolError",
    "ProtocolMismatchError",
    "ResourcesError",
    "SampleFailure",
    "ShutdownError",
    "first_line",
]


class ExitCode(enum.IntEnum):
    """Exit status of every hetero command; 128 + N means ended by signal N."""

    help_text: str

    def __new__(cls, value: int, help_text: str = "") -> ExitCode:
        """Attach the sentence that documentation and ``hetero --help`` show."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.help_text = help_text
        return member

    OK = 0, "The job finished."
    USAGE = 2, "The command line or a configuration value is wrong."
    CLUSTER = 10, "The description of the cluster is missing, malformed or ambiguous."
    DISAGREEMENT = 11, "Hosts disagree about version, script or data set."
    DATA_HOSTS_MISSING = 20, "Data hosts could not be reached before the start timeout."
    TRAINER_HOSTS_MISSING = 21, "Trainer hosts never came."
    AUTHENTICATION = 22, "A token or certificate is missing, unreadable or wrong."
    PORT = 23, "A port is taken or an address cannot be bound."
    RESOURCES = 24, "Descriptors, memory or disk do not suffice."
    CAPACITY = 25, "The platform has no instances for the job, or the account's quota does not allow it."
    SCRIPT_FAILED = 30, "The training script failed."
    DATA_PLANE_LOST = 31, "Every endpoint, or a part of tf.data.service that is needed, was lost for good or too long."
    ORPHANED = 32, "The trainer hosts fell silent."
    DATASET_FAILED = 34, "The data set's code failed on a data host."
    CORRUPTION = 35, "A batch arrived damaged three times."
    INTERNAL = 40, "An error inside hetero; please report it."
    SHUTDOWN_OVERRAN = 41, "Processes did not end within their grace."


class HeteroError(Exception):
    """Base of everything that hetero raises on purpose.

    Args:
        record: What happened, as a message or as a dataclass with ``__str__``.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL

    def __init__(self, record: object) -> None:
        super().__init__(record)
        self.record = record

    def __str__(self) -> str:
        return str(self.record)


def first_line(error: HeteroError) -> str:
    """Return the first line of an error's message; its type's name if it has no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class ConfigError(HeteroError, ValueError):
    """A value that the user wrote is unknown, malformed or out of range."""

    exit_code = ExitCode.USAGE


class ClusterError(HeteroError):
    """The description of the cluster is missing, malformed or ambiguous."""

    exit_code = ExitCode.CLUSTER


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFailure:
    """How a child process ended."""

    name: str
    """What the child is, for example ``rank 1``."""
    exit_status: int
    """As `subprocess` gives it: negative for a signal."""
    explanation: str
    """One line: what this status means."""
    last_lines: tuple[str, ...] = ()
    """The end of its output."""

    def __str__(self) -> str:
        tail = "".join(f"\n    {line}" for line in self.last_lines)
        return f"{self.name} {self.explanation}{tail}"


class PortError(HeteroError):
    """A port is taken or an address cannot be bound."""

    exit_code = ExitCode.PORT


class ResourcesError(HeteroError):
    """Descriptors, memory or disk do not suffice."""

    exit_code = ExitCode.RESOURCES


class CapacityError(HeteroError):
    """The platform has no instances for a job that was to be submitted."""

    exit_code = ExitCode.CAPACITY


class ChildFailedError(HeteroError):
    """A process that the launcher started failed; carries a `ChildFailure`."""

    exit_code = ExitCode.SCRIPT_FAILED


class ShutdownError(HeteroError):
    """Processes did not end within the grace that they were given."""

    exit_code = ExitCode.SHUTDOWN_OVERRAN


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """An exception in the user's data set code, as it looked where it happened."""

    dataset: str
    """The registered name."""
    host: str
    """Host and endpoint, for example ``algo-2/0``; ``local`` in the trainer."""
    stage: str
    """``build``, ``describe``, ``sample``, ``collate``, ``encode`` or ``purity``."""
    sample_index: str
    """The index that was asked for; empty if the failure has none."""
    exception: str
    """Type and message of the original exception."""
    traceback: str
    """The formatted remote traceback."""
    types: tuple[str, ...] = ()
    """The exception's class and its bases up to `Exception`, as ``module:qualified name``; empty if unknown."""

    def __str__(self) -> str:
        where = f" at sample {self.sample_index}" if self.sample_index else ""
        head = f"data set {self.dataset!r} failed on {self.host} in {self.stage}{where}"
        trace = "".join(f"\n    {line}" for line in self.traceback.rstrip().splitlines())
        return f"{head}: {self.exception}{trace}"


class DatasetError(HeteroError):
    """The user's data set code raised; carries a `SampleFailure`.

    A loader raises it as an exception that is of the user's own type too: see `typed`.
    """

    exit_code = ExitCode.DATASET_FAILED

    def typed(self, kind: type[Exception]) -> DatasetError:
        """Return the same error as an exception that ``except kind`` catches too.

        Returns:
            An instance of a class that has both `DatasetError` and ``kind`` as bases; this error itself where that
            cannot be: `StopIteration` would end the loop, and some types cannot be combined with others.
        """
        if issubclass(kind, (DatasetError, StopIteration, StopAsyncIteration)):
            return self
        try:
            return _combined_with(kind)(self.record)  # type: ignore[arg-type]  # mypy takes classes for unhashable
        except Exception:  # noqa: BLE001 - of classes of the user's: a layout or constructor that allows no other base
            return self


@functools.lru_cache(maxsize=64)
def _combined_with(kind: type[Exception]) -> type[DatasetError]:
    def __init__(self: DatasetError, record: object) -> None:  # noqa: N807
        # Not through the bases: the user's type may want other arguments.
        Exception.__init__(self, record)
        self.record = record

    def __reduce__(self: DatasetError) -> tuple[object, ...]:  # noqa: N807
        return _restore_typed, (self.record, kind)

    methods = {"__init__": __init__, "__reduce__": __reduce__, "__module__": DatasetError.__module__}
    return type("DatasetError", (DatasetError, kind), methods)


def _restore_typed(record: object, kind: type[Exception]) -> DatasetError:
    return DatasetError(record).typed(kind)


class DataPlaneError(HeteroError):
    """Batches cannot be had."""

    exit_code = ExitCode.DATA_PLANE_LOST


class EndpointUnavailableError(DataPlaneError):
    """No endpoint could be reached for the data timeout."""


class BatchTimeoutError(DataPlaneError, TimeoutError):
    """A batch did not arrive within its bound although endpoints are there."""


class DatasetMismatchError(DataPlaneError):
    """One specification is another data set elsewhere: on two data hosts, or there and in a rank or loader worker."""

    exit_code = ExitCode.DISAGREEMENT


class ProtocolError(DataPlaneError):
    """Bytes from the network break the protocol: version, shape, dtype or limit."""

    exit_code = ExitCode.CORRUPTION


class ProtocolMismatchError(ProtocolError):
    """An endpoint speaks another version of the protocol than this process."""

    exit_code = ExitCode.DISAGREEMENT


class AuthenticationError(DataPlaneError):
    """A token or certificate is missing, unreadable or wrong."""

    exit_code = ExitCode.AUTHENTICATION

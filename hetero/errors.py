"""Exceptions that hetero raises, and the exit codes that its commands return.

    HeteroError
    |- ConfigError (also ValueError)
    |- ClusterError
    |- DisagreementError
    |- PortError
    |- ResourcesError
    |- CapacityError
    |- BudgetError
    |- ChildFailedError
    |- DatasetError
    `- DataPlaneError
       |- EndpointUnavailableError
       |- BatchTimeoutError (also TimeoutError)
       |- DatasetMismatchError
       |- ProtocolError
       |  `- ProtocolMismatchError
       `- AuthenticationError

All of them can be imported from `hetero`. Other modules raise subclasses of them, which callers need not import.

Each exception takes one argument, its record: a message, or a frozen dataclass
whose ``str`` is the message. With a single argument an exception can be pickled
and sent to another process, because `copyreg` rebuilds it from ``args``.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import traceback
from dataclasses import dataclass
from typing import ClassVar, cast

__all__ = [
    "AuthenticationError",
    "BatchTimeoutError",
    "BudgetError",
    "CapacityError",
    "ChildFailedError",
    "ChildFailure",
    "ClusterError",
    "ConfigError",
    "DataPlaneError",
    "DatasetError",
    "DatasetMismatchError",
    "DisagreementError",
    "EndpointUnavailableError",
    "ExitCode",
    "HeteroError",
    "PortError",
    "ProtocolError",
    "ProtocolMismatchError",
    "ResourcesError",
    "SampleFailure",
    "first_line",
]


class ExitCode(enum.IntEnum):
    """Exit status of every hetero command. 128 + N means that signal N ended the command."""

    help_text: str

    def __new__(cls, value: int, help_text: str = "") -> ExitCode:
        """Make a member with the sentence that the documentation and ``hetero --help`` show for it."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.help_text = help_text
        return member

    OK = 0, "The job finished."
    USAGE = 2, "The command line or a configuration value is wrong."
    CLUSTER = 10, "The description of the cluster is missing, malformed or ambiguous."
    DISAGREEMENT = 11, "Hosts disagree about version, script or data set."
    DATA_HOSTS_MISSING = 20, "Data hosts could not be reached before the start timeout."
    TRAINER_HOSTS_MISSING = 21, "Trainer hosts could not be reached before the start timeout."
    AUTHENTICATION = 22, "A token or certificate is missing, unreadable or wrong."
    PORT = 23, "A port is taken or an address cannot be bound."
    RESOURCES = 24, "There are too few file descriptors, or too little memory or disk space."
    CAPACITY = 25, "The platform has no instances for the job, or the account's quota does not allow it."
    BUDGET = 26, "The budget of a study does not allow its next run, or was passed by a run."
    SCRIPT_FAILED = 30, "The training script failed."
    DATA_PLANE_LOST = 31, "Every endpoint, or a required part of tf.data.service, was lost for good or for too long."
    ORPHANED = 32, "No heartbeats arrive from the trainer hosts, or Ray has lost a host or its head."
    DATASET_FAILED = 34, "The data set failed: its code raised, or its files cannot be read."
    CORRUPTION = 35, "A batch arrived damaged three times."
    INTERNAL = 40, "An error inside hetero; please report it."
    SHUTDOWN_OVERRAN = 41, "Processes did not end within their grace period."


class HeteroError(Exception):
    """Base class of the exceptions that hetero raises on purpose.

    Args:
        record: Description of the error: a message, or a dataclass with ``__str__``.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL

    def __init__(self, record: object) -> None:
        super().__init__(record)
        self.record = record

    def __str__(self) -> str:
        return str(self.record)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class ConfigError(HeteroError, ValueError):
    """A value that the user wrote is unknown, malformed or out of range."""

    exit_code = ExitCode.USAGE


class ClusterError(HeteroError):
    """The description of the cluster is missing, malformed or ambiguous."""

    exit_code = ExitCode.CLUSTER


class DisagreementError(HeteroError):
    """This host and the job differ in version, script or options."""

    exit_code = ExitCode.DISAGREEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFailure:
    """Record of how a child process ended."""

    name: str
    """Name of the child, for example ``rank 1``."""
    exit_status: int
    """Exit status as `subprocess` returns it. A negative status is the number of a signal."""
    explanation: str
    """Meaning of the status, in one line."""
    last_lines: tuple[str, ...] = ()
    """Last lines of the child's output."""

    def __str__(self) -> str:
        tail = "".join(f"\n    {line}" for line in self.last_lines)
        return f"{self.name} {self.explanation}{tail}"


class PortError(HeteroError):
    """A port is in use, or an address cannot be bound."""

    exit_code = ExitCode.PORT


class ResourcesError(HeteroError):
    """The host has too few file descriptors, or too little memory or disk space."""

    exit_code = ExitCode.RESOURCES


class CapacityError(HeteroError):
    """The platform has no instances for the job, or the account's quota does not allow it."""

    exit_code = ExitCode.CAPACITY


class BudgetError(HeteroError):
    """The budget of a study does not allow its next run, or was passed by a run."""

    exit_code = ExitCode.BUDGET


class ChildFailedError(HeteroError):
    """A process that the launcher started failed. The record is a `ChildFailure`."""

    exit_code = ExitCode.SCRIPT_FAILED


_STAGES = {
    "build": "while it was built",
    "describe": "while it was described",
    "sample": "while samples were computed",
    "collate": "while samples were collated",
    "encode": "while the batch was encoded",
    "purity": "in the purity check",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Record of an exception in the user's data set code, made in the process that raised it."""

    dataset: str
    """Registered name of the data set."""
    host: str
    """Host and endpoint, for example ``algo-2/0``, or ``local`` in the trainer."""
    stage: str
    """``build``, ``describe``, ``sample``, ``collate``, ``encode`` or ``purity``."""
    sample_index: str
    """Requested index, or empty if no single index caused the failure."""
    exception: str
    """Type of the original exception, and the first line of its message."""
    traceback: str
    """Formatted traceback of the original exception, with its whole message."""
    types: tuple[str, ...] = ()
    """Class of the exception and its bases up to `Exception`, as ``module:qualified name``. Empty if unknown."""

    def __str__(self) -> str:
        place = "in this process" if self.host == "local" else f"on {self.host}"
        when = f" at sample {self.sample_index}" if self.sample_index else ""
        # If the failure of a sample has an index, the text about the stage would add nothing.
        if self.stage != "sample" or not when:
            when = f" {_STAGES.get(self.stage, self.stage)}{when}"
        head = f"data set {self.dataset!r} failed {place}{when}"
        trace = "".join(f"\n    {line}" for line in self.traceback.rstrip().splitlines())
        return f"{head}: {self.exception}{trace}"


class DatasetError(HeteroError):
    """The user's data set code raised an exception.

    The error that a loader raises is also an instance of the user's exception type. See `typed`.
    """

    record: SampleFailure
    """Description of the exception."""
    exit_code = ExitCode.DATASET_FAILED

    def typed(self, kind: type[Exception]) -> DatasetError:
        """Return this error as an exception that ``except kind`` also catches.

        Returns:
            An instance of a class with the bases `DatasetError` and ``kind``. This error itself if ``kind`` cannot be
            combined with another base, if the text would not be printed, or if ``kind`` is `StopIteration` or
            `StopAsyncIteration`, which would end the user's loop.
        """
        if issubclass(kind, (DatasetError, StopIteration, StopAsyncIteration)):
            return self
        try:
            typed = _combined_with(kind)(self.record)  # type: ignore[arg-type]  # mypy considers classes unhashable
            # Raising the error sets this attribute, which the user's class may forbid. So try it now.
            typed.__traceback__ = None
            shown = "".join(traceback.format_exception_only(typed))
        except BaseException:  # noqa: BLE001 - layout, constructor, attributes or methods of the user's class
            return self
        return typed if str(self) in shown else self


class _CombinedType(type):
    """Type of the classes that `_combined_with` makes. Pickle cannot find them by name, so it makes them again.

    Torch's workers send the class of an error beside the error.
    """


@functools.lru_cache(maxsize=64)
def _combined_with(kind: type[Exception]) -> type[DatasetError]:
    """Return a class that is both a `DatasetError` and ``kind``."""

    def __init__(self: DatasetError, record: SampleFailure) -> None:  # noqa: N807
        # Do not call the bases' __init__, because the user's type may expect other arguments.
        Exception.__init__(self, record)
        self.record = record
        if isinstance(self, SyntaxError):
            # Python prints this text instead of str(self).
            self.msg = str(self)

    # Without this method, pickle would only call the class with the record. `_restore_typed` also repeats the checks of
    # `typed`.
    def __reduce__(self: DatasetError) -> tuple[object, ...]:  # noqa: N807
        return _restore_typed, (self.record, kind)

    methods = {"__init__": __init__, "__reduce__": __reduce__, "__module__": DatasetError.__module__}
    return cast("type[DatasetError]", _CombinedType("DatasetError", (DatasetError, kind), methods))


def _reduce_class(combined: _CombinedType) -> tuple[object, ...]:
    return _combined_with, combined.__bases__[1:]


copyreg.pickle(_CombinedType, _reduce_class)  # type: ignore[arg-type]  # a class is not an instance for the stubs


def _restore_typed(record: object, kind: type[Exception]) -> DatasetError:
    return DatasetError(record).typed(kind)


class DataPlaneError(HeteroError):
    """Batches cannot be fetched."""

    exit_code = ExitCode.DATA_PLANE_LOST


class EndpointUnavailableError(DataPlaneError):
    """No endpoint could be reached for the length of the data timeout."""


class BatchTimeoutError(DataPlaneError, TimeoutError):
    """A batch did not arrive within its time limit, although endpoints could be reached."""


class DatasetMismatchError(DataPlaneError):
    """Two processes disagree about a data set: two data hosts, or a data host and a rank or loader worker."""

    exit_code = ExitCode.DISAGREEMENT


class ProtocolError(DataPlaneError):
    """Bytes from the network violate the protocol: their version, a shape, a dtype or a limit is wrong."""

    exit_code = ExitCode.CORRUPTION


class ProtocolMismatchError(ProtocolError):
    """An endpoint and this process use different versions of the protocol."""

    exit_code = ExitCode.DISAGREEMENT


class AuthenticationError(DataPlaneError):
    """A token or certificate is missing, unreadable or wrong."""

    exit_code = ExitCode.AUTHENTICATION

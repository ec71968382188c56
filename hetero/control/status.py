"""The records that hosts and ranks send, with their bounds. `hetero.wire.records` converts them to messages."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from hetero.cluster.document import MAX_TEXT
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.joined import MAX_JOINED, JoinedHost
from hetero.control.metric_series import SERIES, fit_for_peer
from hetero.documents.text import escape_line, last_bytes, one_line
from hetero.errors import ExitCode, ProtocolError
from hetero.metrics.logged import LoggedMetric
from hetero.metrics.step_series import without_history
from hetero.system.waits import STOP_GRACE_S
from hetero.wire.channels import MAX_REQUEST_BYTES
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import NOT_SENT, Wire, at_most, fields_of, record_of

__all__ = [
    "CONTROL_PROTOCOL",
    "MAX_LOADERS",
    "MAX_SUMMARY_CHARS",
    "OPTIONS",
    "Cause",
    "HostState",
    "HostStatus",
    "RankReport",
    "SessionOptions",
    "StepTimes",
    "StopPoint",
    "status_from_proto",
    "status_to_proto",
]

CONTROL_PROTOCOL = 1

MAX_SUMMARY_CHARS = 1024
"""Maximum length of a reason in one line, and of a failure file: what SageMaker's FailureReason shows."""
_MAX_DETAIL_BYTES = 32 * 1024
_MAX_STATUS_BYTES = MAX_REQUEST_BYTES - 64 * 1024
"""Maximum size of a heartbeat. A peer would reject a larger one, and the host would count as silent."""
_MAX_JSON_BYTES = 64 * 1024
_MAX_ENDPOINTS = 1024
MAX_LOADERS = 64
"""Maximum number of loaders in one report of a rank."""
_MAX_COUNTERS = 100
_MAX_STEP_TIMES = 1024
_MAX_OPTIONS = 32

_SUMMARY = functools.partial(one_line, max_chars=MAX_SUMMARY_CHARS)
_DETAIL = functools.partial(last_bytes, max_bytes=_MAX_DETAIL_BYTES)
_COUNTERS = at_most(_MAX_COUNTERS, "counters")
_STEP_TIMES = at_most(_MAX_STEP_TIMES, "step times")
OPTIONS = at_most(_MAX_OPTIONS, "options", each=MAX_TEXT)
"""Bounds of the options that a host states."""


class HostState(enum.IntEnum):
    """Phase of a host in the life of a job.

    A data host goes INIT -> SERVING -> DRAINING -> DONE. A trainer host goes INIT -> WAIT_PEERS -> TRAINING -> DONE.
    Each state may also change to FAILED. A restart of the trainer group takes a trainer host back to INIT.
    """

    INIT = pb.INIT
    WAIT_PEERS = pb.WAIT_PEERS
    SERVING = pb.SERVING
    TRAINING = pb.TRAINING
    DRAINING = pb.DRAINING
    DONE = pb.DONE
    FAILED = pb.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a job ends, as one host saw it."""

    host: str
    # The sender cuts texts to keep its message small, and the receiver because it does not trust the sender.
    summary: Annotated[str, Wire(encode=_SUMMARY, decode=_SUMMARY)]
    """The reason in one line."""
    detail: Annotated[str, Wire(encode=_DETAIL, decode=_DETAIL)] = ""
    """Traceback or last lines of output."""
    exit_code: Annotated[ExitCode, Wire(decode=_exit_code)] = ExitCode.INTERNAL
    by_signal: bool = False
    """Whether a signal ended the process. Unless the failure is a consequence, it outranks exceptions of other
    ranks."""
    is_consequence: bool = False
    """Whether a failure of another rank may have caused this one. Either a connection between ranks broke, or the rank
    was ended by a signal that failures of other ranks also cause. See `hetero.control.causes`."""
    of_rank: bool = False
    """Whether a rank failed, not a launcher or an endpoint. A restart of the trainer group may then help."""

    @property
    def first_line(self) -> str:
        """First line of every host's failure file. It does not change when the cause is sent to another host."""
        summary = one_line(self.summary, MAX_SUMMARY_CHARS)
        return escape_line(f"HET-{int(self.exit_code):02d} {self.host}: {summary}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPoint:
    """The number of steps of one loader that all ranks do before they end, if the job is asked to stop.

    Steps of other loaders do not count, because ranks do not share all loaders. A validation that rank 0 runs alone
    must not change the last step of its training.
    """

    loader: str
    """Name of the loader. Empty if ranks end before their next step."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The latest steps of the loader of a rank that takes the most time."""

    loader: str
    first: int
    """Number of steps of this loader before these."""
    compute_s: Annotated[tuple[float, ...], _STEP_TIMES]
    """Compute of each step in seconds."""
    wait_s: Annotated[tuple[float, ...], _STEP_TIMES]
    """Data wait of each step in seconds."""


def _check_step_times(times: pb.StepTimes) -> None:
    if len(times.compute_s) != len(times.wait_s):
        raise ProtocolError(f"found {len(times.wait_s)} data waits, expected {len(times.compute_s)}")


def _exit_code(number: int) -> ExitCode:
    """Return an exit code of another process. A code that this version does not know counts as internal."""
    return ExitCode(number) if number in set(ExitCode) else ExitCode.INTERNAL


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The last report of a rank to its launcher."""

    rank: int
    steps_started: Annotated[Mapping[str, int], at_most(MAX_LOADERS, "loaders")] = field(default_factory=dict)
    """Number of steps started, per loader."""
    loader: str = ""
    """Loader whose step began last."""
    waiting: bool = False
    """Whether the rank waits for a batch in a step that has begun."""
    summaries_json: Annotated[tuple[bytes, ...], at_most(MAX_LOADERS, "loaders", each=_MAX_JSON_BYTES)] = ()
    """One `hetero.metrics.StepSummary` per loader."""
    counters: Annotated[Mapping[str, int], _COUNTERS] = field(default_factory=dict)
    """Counts of events in the rank's data plane, by name, for the report."""
    stop_vote: bool = False
    """Whether the rank has paused until it learns which step is the last."""
    failure: Cause | None = None
    """Why the rank failed. If the rank has finished, why one of its stop callbacks failed."""
    finished: bool = False
    generation: int = 0
    """Generation of the trainer group. Launchers ignore reports of an earlier generation."""
    step_times: Annotated[StepTimes | None, Wire(check=_check_step_times)] = None
    """The latest steps, for the launcher of this host only. None if the launcher does not want them."""
    profile_json: Annotated[bytes, at_most(_MAX_JSON_BYTES, "bytes of a rank's profile")] = b""
    """In a profile run, a `hetero.metrics.profile.parts.RankPart`."""
    metrics: Annotated[tuple[LoggedMetric, ...] | None, SERIES] = None
    """Values that the script has logged. None if they have not changed since the report before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """Everything that a host sends to the other hosts with each heartbeat."""

    host: str
    incarnation: str
    """Random for each start of the launcher, so other hosts can tell a restart from a lost connection."""
    version: str
    script_digest: str
    state: HostState = HostState.INIT
    endpoints: Annotated[tuple[EndpointRecord, ...], at_most(_MAX_ENDPOINTS, "endpoints")] = ()
    failure: Cause | None = None
    decided: Cause | None = None
    stop_requested: bool = False
    stop_at: StopPoint | None = None
    """The last step of every rank. None until it is decided."""
    usage_json: Annotated[bytes, at_most(_MAX_JSON_BYTES, "bytes of a host's usage")] = b""
    ranks: tuple[RankReport, ...] = ()
    counters: Annotated[Mapping[str, int], _COUNTERS] = field(default_factory=dict)
    """Counts of events on this host, by name, for the report."""
    revision: int = 0
    """Number of changes so far. It shows which of two statuses of the same launcher is newer."""
    rendezvous_port: int = 0
    """A free port of a trainer host, new for each generation. On the first trainer host, torch's ranks meet there. With
    TensorFlow, this host's ranks listen on this port and on the ports after it."""
    generation: int = 0
    """Restarts of the trainer group so far. The arbiter begins a generation, and the other hosts follow."""
    restarted_for: Cause | None = None
    """Why this generation began. None in the first generation."""
    ticks: int = 0
    """Number of turns of the main loop. The launcher is stuck if the number stays the same. 0 disables the check."""
    options: Annotated[Mapping[str, str], OPTIONS] = field(default_factory=dict)
    """Options that must be the same on every host that states them."""
    trainer_endpoints: int = 0
    """Number of endpoints that each trainer host should run. Only the first trainer host sets it, if it decides on
    it."""
    profile_json: Annotated[bytes, at_most(_MAX_JSON_BYTES, "bytes of a host's profile")] = b""
    """In a profile run, a `hetero.metrics.profile.parts.HostPart` after the host has measured it."""
    joined: Annotated[tuple[JoinedHost, ...], at_most(MAX_JOINED, "joined hosts")] = ()
    """Data hosts that this host has added to the running job."""


# A message's number is never absent, so 0 means None.
_EMULATED = Wire(
    write=lambda seconds: {"emulate_step_s": seconds or 0.0}, read=lambda reply, _outer: reply.emulate_step_s or None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options that the launcher sends to its ranks."""

    data_timeout_s: float
    prepare_timeout_s: float
    emulate_step_s: Annotated[float | None, _EMULATED]
    purity_checks: int
    warmup_steps: int
    max_batch_bytes: int
    stop_grace_s: float = STOP_GRACE_S
    """Seconds after a request to stop until the launcher kills ranks that still run."""
    data_service: str = ""
    """Service of data hosts: ``grpc`` (hetero's data plane) or ``tf`` (tf.data.service). Empty without data hosts."""
    wants_step_times: bool = False
    """Whether ranks report the times of single steps, several times per second."""
    profile: bool = False
    """Whether this is a profile run."""
    max_pass_batches: Annotated[int | None, NOT_SENT] = None
    """Batches of a pass on this rank, for ``hetero check SCRIPT`` (tests/script_check). None for all."""


def status_to_proto(status: HostStatus, *, has_metrics: bool = True) -> pb.HostStatus:
    """Return the message for ``status``, small enough for a request.

    Details of ranks' failures are left out, because the failure of the host has them. Times of single steps are left
    out, because only their own host uses them. Measurements of ranks are left out and counted if they make the message
    too large.

    Args:
        status: Status of this host.
        has_metrics: Whether the receiver writes the job's report, and so needs the values that ranks have logged, and
            the histories of their steps.
    """
    sent = dataclasses.replace(status, ranks=tuple(_for_peers(status.ranks, has_metrics)))
    message = pb.HostStatus(protocol=CONTROL_PROTOCOL, **fields_of(sent))
    excess_bytes = message.ByteSize() - _MAX_STATUS_BYTES
    # The last ranks lose their measurements first. The first ranks keep theirs if this is enough.
    for report in reversed(message.ranks):
        if excess_bytes <= 0:
            break
        excess_bytes -= sum(map(len, report.summaries_json))
        message.counters["rank summaries too large to send"] += len(report.summaries_json)
        report.ClearField("summaries_json")
    return message


def status_from_proto(message: pb.HostStatus) -> HostStatus:
    """Return the status in ``message``.

    Raises:
        ProtocolError: If the protocol version differs, the state is unknown, or a part exceeds its limit.
    """
    # Check the protocol first, because another version may have other fields.
    if message.protocol != CONTROL_PROTOCOL:
        raise ProtocolError(
            f"host {message.host!r} speaks control protocol {message.protocol}, this host speaks {CONTROL_PROTOCOL}; "
            "install the same hetero version in all groups"
        )
    try:
        return record_of(HostStatus, message)
    except ProtocolError as error:
        raise ProtocolError(f"the status of host {message.host!r:.100}: {error}") from None


def _for_peers(reports: Sequence[RankReport], has_metrics: bool) -> Iterator[RankReport]:
    """Yield the reports of this host's ranks without the parts that other hosts do not need."""
    num_logging_ranks = sum(bool(report.metrics) for report in reports)
    for report in reports:
        # The tracebacks of 32 ranks made a heartbeat larger than a request may be. The peer refused that heartbeat, and
        # the host counted as silent just when it had to report its failure.
        failure = None if report.failure is None else dataclasses.replace(report.failure, detail="")
        metrics, summaries = None, tuple(map(without_history, report.summaries_json))
        if has_metrics:
            metrics, summaries = fit_for_peer(report.metrics, num_ranks=num_logging_ranks), report.summaries_json
        yield dataclasses.replace(report, failure=failure, step_times=None, metrics=metrics, summaries_json=summaries)

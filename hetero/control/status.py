"""The status of one host, and its form on the wire."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetero.control.directory import BATCHES, KINDS, EndpointRecord
from hetero.control.joined import MAX_JOINED, JoinedHost, joined_from_proto, joined_to_proto
from hetero.control.metric_series import fit_for_peer, series_from_proto, series_to_proto
from hetero.errors import ExitCode, ProtocolError
from hetero.metrics.logged import LoggedMetric
from hetero.metrics.step_series import without_history
from hetero.system.text import escape_line, last_bytes, one_line
from hetero.wire.channels import MAX_REQUEST_BYTES
from hetero.wire.proto import control_pb2 as pb

__all__ = [
    "CONTROL_PROTOCOL",
    "MAX_LOADERS",
    "Cause",
    "HostState",
    "HostStatus",
    "RankReport",
    "SessionOptions",
    "StepTimes",
    "StopPoint",
    "cause_from_proto",
    "cause_to_proto",
    "check_options",
    "report_from_proto",
    "report_to_proto",
    "status_from_proto",
    "status_to_proto",
    "stop_from_proto",
    "stop_to_proto",
]

CONTROL_PROTOCOL = 1

_MAX_SUMMARY_CHARS = 1024
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
_MAX_OPTION_CHARS = 200


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
    summary: str
    """The reason in one line."""
    detail: str = ""
    """Traceback or last lines of output."""
    exit_code: ExitCode = ExitCode.INTERNAL
    by_signal: bool = False
    """Whether a signal ended the process. Unless it is an echo, such a failure outranks exceptions of other ranks."""
    is_echo: bool = False
    """Whether a failure of another rank may have caused this one. Either a connection between ranks broke, or the rank
    was ended by a signal that failures of other ranks also cause. See `hetero.control.causes`."""
    of_rank: bool = False
    """Whether a rank failed, not a launcher or an endpoint. A restart of the trainer group may then help."""

    @property
    def first_line(self) -> str:
        """First line of every host's failure file. It does not change when the cause is sent to another host."""
        summary = one_line(self.summary, _MAX_SUMMARY_CHARS)
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
    compute_s: tuple[float, ...]
    """Compute of each step in seconds."""
    wait_s: tuple[float, ...]
    """Data wait of each step in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The last report of a rank to its launcher."""

    rank: int
    steps_started: Mapping[str, int] = field(default_factory=dict)
    """Number of steps started, per loader."""
    loader: str = ""
    """Loader whose step began last."""
    waiting: bool = False
    """Whether the rank waits for a batch in a step that has begun."""
    summaries_json: tuple[bytes, ...] = ()
    """One `hetero.metrics.StepSummary` per loader."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counts of events in the rank's data plane, by name, for the report."""
    stop_vote: bool = False
    """Whether the rank has paused until it learns which step is the last."""
    failure: Cause | None = None
    finished: bool = False
    generation: int = 0
    """Generation of the trainer group. Launchers ignore reports of an earlier generation."""
    step_times: StepTimes | None = None
    """None if the launcher does not want them. They are not sent to other hosts."""
    profile_json: bytes = b""
    """In a profile run, a `hetero.planning.parts.RankPart`."""
    metrics: tuple[LoggedMetric, ...] | None = None
    """Values that the script has logged. None if they are those of the report before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """Everything that a host sends to the others with each heartbeat."""

    host: str
    incarnation: str
    """Random for each start of the launcher, so other hosts can tell a restart from a lost connection."""
    version: str
    script_digest: str
    state: HostState = HostState.INIT
    endpoints: tuple[EndpointRecord, ...] = ()
    failure: Cause | None = None
    decided: Cause | None = None
    stop_requested: bool = False
    stop_at: StopPoint | None = None
    """The last step of every rank. None until it is decided."""
    usage_json: bytes = b""
    ranks: tuple[RankReport, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counts of events on this host, by name, for the report."""
    revision: int = 0
    """Number of changes so far. It shows which of two statuses of the same launcher is newer."""
    rendezvous_port: int = 0
    """A free port of a trainer host, new for each generation. On the first trainer host, torch's ranks meet there. With
    TensorFlow, this host's ranks listen on this port and the ones after it."""
    generation: int = 0
    """Restarts of the trainer group so far. The arbiter begins a generation and the others follow."""
    restarted_for: Cause | None = None
    """Why this generation began. None in the first generation."""
    ticks: int = 0
    """Number of turns of the main loop. The launcher is stuck if the number stays the same. 0 disables the check."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options that must be the same on every host that states them."""
    trainer_endpoints: int = 0
    """Number of endpoints that each trainer host should run, if the first trainer host decides on it and this is it."""
    profile_json: bytes = b""
    """In a profile run, a `hetero.planning.parts.HostPart` after the host has measured it."""
    joined: tuple[JoinedHost, ...] = ()
    """Data hosts that this host has added to the running job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options that the launcher sends to its ranks."""

    data_timeout_s: float
    prepare_timeout_s: float
    emulate_step_s: float | None
    purity_checks: int
    warmup_steps: int
    max_batch_bytes: int
    stop_grace_s: float = 50.0
    """Seconds after a request to stop until the launcher kills ranks that still run."""
    data_service: str = ""
    """Service of data hosts: ``grpc`` (hetero's data plane) or ``tf`` (tf.data.service). Empty without data hosts."""
    wants_step_times: bool = False
    """Whether ranks report the times of single steps, several times per second."""
    profile: bool = False
    """Whether this is a profile run."""
    max_pass_batches: int | None = None
    """Batches of a pass on this rank, for ``hetero check SCRIPT`` (tests/script_check). None for all."""


def cause_to_proto(cause: Cause) -> pb.Cause:
    """Return the message for ``cause``, with texts cut to their limits."""
    return pb.Cause(
        host=cause.host,
        summary=one_line(cause.summary, _MAX_SUMMARY_CHARS),
        detail=last_bytes(cause.detail, _MAX_DETAIL_BYTES),
        exit_code=int(cause.exit_code),
        by_signal=cause.by_signal,
        is_echo=cause.is_echo,
        of_rank=cause.of_rank,
    )


def cause_from_proto(message: pb.Cause) -> Cause:
    """Return the cause in ``message``. An unknown exit code counts as internal."""
    try:
        exit_code = ExitCode(message.exit_code)
    except ValueError:
        exit_code = ExitCode.INTERNAL
    return Cause(
        host=message.host,
        summary=one_line(message.summary, _MAX_SUMMARY_CHARS),
        detail=last_bytes(message.detail, _MAX_DETAIL_BYTES),
        exit_code=exit_code,
        by_signal=message.by_signal,
        is_echo=message.is_echo,
        of_rank=message.of_rank,
    )


def stop_to_proto(stop_at: StopPoint | None) -> pb.StopPoint | None:
    """Return the message for ``stop_at``. None if the job has not decided where to stop."""
    return None if stop_at is None else pb.StopPoint(loader=stop_at.loader, steps=stop_at.steps)


def stop_from_proto(message: pb.StopPoint) -> StopPoint:
    """Return the point in ``message``."""
    return StopPoint(loader=message.loader, steps=message.steps)


def report_to_proto(report: RankReport) -> pb.RankReport:
    """Return the message for ``report``."""
    message = pb.RankReport(
        rank=report.rank,
        steps_started=report.steps_started,
        loader=report.loader,
        waiting=report.waiting,
        summaries_json=list(report.summaries_json),
        counters=report.counters,
        stop_vote=report.stop_vote,
        finished=report.finished,
        generation=report.generation,
        profile_json=report.profile_json,
        metrics=series_to_proto(report.metrics or ()),
        has_metrics=report.metrics is not None,
    )
    if report.failure is not None:
        message.failure.CopyFrom(cause_to_proto(report.failure))
    times = report.step_times
    if times is not None:
        found = pb.StepTimes(loader=times.loader, first=times.first, compute_s=times.compute_s, wait_s=times.wait_s)
        message.step_times.CopyFrom(found)
    return message


def report_from_proto(message: pb.RankReport) -> RankReport:
    """Return the report in ``message``.

    Raises:
        ProtocolError: If a part exceeds its limit.
    """
    _check("loaders", max(len(message.summaries_json), len(message.steps_started)), MAX_LOADERS)
    _check("counters", len(message.counters), _MAX_COUNTERS)
    for part in message.summaries_json:
        _check("bytes of a loader's summary", len(part), _MAX_JSON_BYTES)
    times = message.step_times
    _check("step times", max(len(times.compute_s), len(times.wait_s)), _MAX_STEP_TIMES)
    _check("data waits without their compute", abs(len(times.wait_s) - len(times.compute_s)), 0)
    _check("bytes of a rank's profile", len(message.profile_json), _MAX_JSON_BYTES)
    return RankReport(
        rank=message.rank,
        steps_started=dict(message.steps_started),
        loader=message.loader,
        waiting=message.waiting,
        summaries_json=tuple(message.summaries_json),
        counters=dict(message.counters),
        stop_vote=message.stop_vote,
        failure=cause_from_proto(message.failure) if message.HasField("failure") else None,
        finished=message.finished,
        generation=message.generation,
        step_times=StepTimes(
            loader=times.loader, first=times.first, compute_s=tuple(times.compute_s), wait_s=tuple(times.wait_s)
        )
        if message.HasField("step_times")
        else None,
        profile_json=message.profile_json,
        metrics=series_from_proto(message.metrics, rank=message.rank) if message.has_metrics else None,
    )


def status_to_proto(status: HostStatus, *, has_metrics: bool = True) -> pb.HostStatus:
    """Return the message for ``status``, small enough for a request.

    Details of ranks' failures are left out, because the host sends them with its own failure. Times of single steps
    are left out, because only their own host uses them. Measurements of ranks are
    left out and counted if they make the message too large.

    Args:
        status: Status of this host.
        has_metrics: Whether the receiver writes the job's report, and so needs the values that ranks have logged, and
            the histories of their steps.
    """
    message = pb.HostStatus(
        protocol=CONTROL_PROTOCOL,
        version=status.version,
        script_digest=status.script_digest,
        host=status.host,
        incarnation=status.incarnation,
        state=int(status.state),  # type: ignore[arg-type]  # the stub wants its own enum type
        endpoints=[endpoint_to_proto(record) for record in status.endpoints],
        stop_requested=status.stop_requested,
        stop_at=stop_to_proto(status.stop_at),
        usage_json=status.usage_json,
        ranks=[report_to_proto(report) for report in _for_peers(status.ranks, has_metrics)],
        counters=status.counters,
        revision=status.revision,
        rendezvous_port=status.rendezvous_port,
        generation=status.generation,
        ticks=status.ticks,
        options=status.options,
        trainer_endpoints=status.trainer_endpoints,
        profile_json=status.profile_json,
        joined=[joined_to_proto(joined) for joined in status.joined],
    )
    if status.failure is not None:
        message.failure.CopyFrom(cause_to_proto(status.failure))
    if status.decided is not None:
        message.decided.CopyFrom(cause_to_proto(status.decided))
    if status.restarted_for is not None:
        message.restarted_for.CopyFrom(cause_to_proto(status.restarted_for))
    excess_bytes = message.ByteSize() - _MAX_STATUS_BYTES
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
    if message.protocol != CONTROL_PROTOCOL:
        raise ProtocolError(
            f"host {message.host!r} speaks control protocol {message.protocol}, this host speaks {CONTROL_PROTOCOL}; "
            "install the same hetero version in all groups"
        )
    try:
        state = HostState(message.state)
    except ValueError:
        raise ProtocolError(f"host {message.host!r} sent the unknown state {message.state}") from None
    # Check the sizes before any part is converted.
    _check("counters", len(message.counters), _MAX_COUNTERS)
    _check("endpoints", len(message.endpoints), _MAX_ENDPOINTS)
    _check("bytes of a host's usage", len(message.usage_json), _MAX_JSON_BYTES)
    _check("bytes of a host's profile", len(message.profile_json), _MAX_JSON_BYTES)
    _check("joined hosts", len(message.joined), MAX_JOINED)
    check_options(message.options)
    return HostStatus(
        host=message.host,
        incarnation=message.incarnation,
        version=message.version,
        script_digest=message.script_digest,
        state=state,
        endpoints=tuple(endpoint_from_proto(message.host, endpoint) for endpoint in message.endpoints),
        failure=cause_from_proto(message.failure) if message.HasField("failure") else None,
        decided=cause_from_proto(message.decided) if message.HasField("decided") else None,
        stop_requested=message.stop_requested,
        stop_at=stop_from_proto(message.stop_at) if message.HasField("stop_at") else None,
        usage_json=message.usage_json,
        ranks=tuple(report_from_proto(report) for report in message.ranks),
        counters=dict(message.counters),
        revision=message.revision,
        rendezvous_port=message.rendezvous_port,
        generation=message.generation,
        restarted_for=cause_from_proto(message.restarted_for) if message.HasField("restarted_for") else None,
        ticks=message.ticks,
        options=dict(message.options),
        trainer_endpoints=message.trainer_endpoints,
        profile_json=message.profile_json,
        joined=tuple(joined_from_proto(joined) for joined in message.joined),
    )


def check_options(options: Mapping[str, str]) -> None:
    """Raise `ProtocolError` if a message has too many or too long options."""
    _check("options", len(options), _MAX_OPTIONS)
    for text in (*options, *options.values()):
        _check("characters in an option", len(text), _MAX_OPTION_CHARS)


def endpoint_to_proto(record: EndpointRecord) -> pb.Endpoint:
    """Return the message for ``record``. The name of its host is sent beside it."""
    return pb.Endpoint(
        endpoint_id=record.endpoint_id,
        address=record.address,
        incarnation=record.incarnation,
        num_slots=record.num_slots,
        kind=record.kind,
        is_optional=record.is_optional,
    )


def endpoint_from_proto(host: str, message: pb.Endpoint) -> EndpointRecord:
    """Return the record of an endpoint on ``host``.

    Raises:
        ProtocolError: If the endpoint's kind is unknown.
    """
    kind = message.kind or BATCHES
    if kind not in KINDS:
        raise ProtocolError(f"host {host!r} has an endpoint of the unknown kind {kind[:100]!r}")
    return EndpointRecord(
        endpoint_id=message.endpoint_id,
        host=host,
        address=message.address,
        incarnation=message.incarnation,
        num_slots=message.num_slots,
        kind=kind,
        is_optional=message.is_optional,
    )


def _for_peers(reports: Sequence[RankReport], has_metrics: bool) -> Iterator[RankReport]:
    num_ranks = sum(bool(report.metrics) for report in reports)
    for report in reports:
        failure = None if report.failure is None else dataclasses.replace(report.failure, detail="")
        metrics, summaries = None, tuple(map(without_history, report.summaries_json))
        if has_metrics:
            metrics, summaries = fit_for_peer(report.metrics, num_ranks=num_ranks), report.summaries_json
        yield dataclasses.replace(report, failure=failure, step_times=None, metrics=metrics, summaries_json=summaries)


def _check(what: str, found: int, bound: int) -> None:
    if found > bound:
        raise ProtocolError(f"a status has {found} {what}, expected at most {bound}")

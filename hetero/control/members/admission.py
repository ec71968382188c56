"""How a data host joins a running job: its request to a trainer host, and the answer."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from hetero.wire import channels  # before grpc, because channels sets grpc's environment

import grpc  # isort: skip

from hetero.cluster import ClusterSpec, Role
from hetero.cluster.document import MAX_FILE_BYTES, MAX_TEXT
from hetero.cluster.groups import group_document
from hetero.control import security
from hetero.control.members.joined import JoinedHost, check_address
from hetero.control.members.joined_hosts import Obstacle
from hetero.control.peers import differences
from hetero.control.status import CONTROL_PROTOCOL, MAX_SUMMARY_CHARS, OPTIONS, HostStatus
from hetero.documents.text import escape_line, one_line
from hetero.errors import (
    AuthenticationError,
    ClusterError,
    ConfigError,
    DisagreementError,
    ExitCode,
    HeteroError,
    ProtocolError,
)
from hetero.system.waits import CALL_TIMEOUT_S
from hetero.wire.messages import parse
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import fields_of, printable, record_of
from hetero.wire.tls import Tls, diagnose

__all__ = ["Admission", "Admitter", "JoinRequest", "ask_to_join", "request_from_proto"]

logger = logging.getLogger(__name__)

_DEFAULT_GROUP = "data"
_JOB_ID = printable(MAX_TEXT, "id of the job")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What a host says about itself."""

    host: JoinedHost
    version: Annotated[str, printable(MAX_TEXT, "version")]
    """Version of hetero."""
    script_digest: Annotated[str, printable(MAX_TEXT, "digest")]
    options: Annotated[Mapping[str, str], OPTIONS]
    """Options that must be the same on every host that states them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What an admitted host learns about its job."""

    job_id: str
    document: Mapping[str, object]
    """Description of the cluster. The new host is its current host."""
    roles: tuple[str, ...]
    """``GROUP=ROLE`` for each group."""


class Admitter:
    """What the first trainer host needs to answer hosts that want to join.

    Args:
        cluster: The cluster as it was described at the start.
        job_id: Id of the job.
        obstacle: Why no host can join this job at any time. Empty if hosts can join.
        read_again: Reads the description of the cluster again. None if it cannot change. It may raise `HeteroError`.
        clock: Monotonic seconds.
    """

    READ_INTERVAL_S = 1.0
    """Least time between two readings of the description."""

    def __init__(
        self,
        cluster: ClusterSpec,
        job_id: str,
        *,
        obstacle: str = "",
        read_again: Callable[[], ClusterSpec] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._read_again = read_again
        """Reads the description of the cluster again, because hosts may have been added. None if it cannot change."""
        self._clock = clock
        self._next_read_s = float("-inf")
        self._reading = threading.Lock()
        self._described: Mapping[str, JoinedHost] = {}
        """The data hosts of the last reading that the description did not have at the start, by name."""
        self._job_id = job_id
        self._obstacle_to_all = obstacle
        """Why all hosts are refused, whatever their settings. Empty if hosts can join."""

    def has_described(self, host: JoinedHost) -> bool:
        """Return whether the description has had this host from the start, in this group."""
        return any((known.name, known.group) == (host.host, host.group) for known in self._cluster.hosts)

    def refusal(self, request: JoinRequest, own: HostStatus) -> Obstacle | None:
        """Return why a host can never join with its present settings. None if it can."""
        if self._obstacle_to_all:
            return Obstacle(text=self._obstacle_to_all)
        # `differences` compares statuses. The host has none yet.
        theirs = HostStatus(
            host=request.host.host,
            incarnation="",
            version=request.version,
            script_digest=request.script_digest,
            options=request.options,
        )
        different = "; ".join(differences(theirs, own))
        if different:
            return Obstacle(text=different, exit_code=ExitCode.DISAGREEMENT)
        group = next((group for group in self._cluster.groups if group.name == request.host.group), None)
        if group is not None and group.role is Role.TRAINER:
            return Obstacle(text=f"group {group.name!r} trains, and only data hosts can join")
        if group is not None and request.host.instance_type not in ("", group.instance_type):
            found = f"group {group.name!r} has instances of {group.instance_type}, not of {request.host.instance_type}"
            return Obstacle(text=f"{found}; give this host another group with --join-group")
        return None

    def described(self, host: str) -> JoinedHost | None:
        """Return a data host that was added to the description after the start. None for any other host.

        Only one thread reads the description at a time, because this may take long. Other threads use the last result.
        """
        if self._read_again is None or self._obstacle_to_all:
            return None
        if self._clock() >= self._next_read_s and self._reading.acquire(blocking=False):
            try:
                at_start = {known.name for known in self._cluster.hosts}
                self._described = {
                    known.name: JoinedHost(
                        # The description has names and no addresses.
                        host=known.name,
                        address="",
                        group=known.group,
                        instance_type=known.instance_type,
                    )
                    for known in self._read_again().data_hosts
                    if known.name not in at_start
                }
            except HeteroError as error:
                logger.warning("cannot read the description of the cluster again: %s", error)
            finally:
                self._next_read_s = self._clock() + self.READ_INTERVAL_S
                self._reading.release()
        return self._described.get(host)

    def placed(self, host: JoinedHost) -> JoinedHost:
        """Return a host with its group and instance type. The default is the first data group of the job."""
        data = [group for group in self._cluster.groups if group.role is Role.DATA]
        name = host.group or (data[0].name if data else _DEFAULT_GROUP)
        # In a group of the job, the group's instance type counts. A new group has the type that the host states.
        known = next((group for group in data if group.name == name), None)
        instance_type = host.instance_type if known is None else known.instance_type
        return JoinedHost(host=host.host, address=host.address, group=name, instance_type=instance_type)

    def reply(self, joined: JoinedHost) -> pb.JoinReply:
        """Return the answer to a host that was admitted: the description of the cluster, with the host in its group."""
        # The host may be in a new group. If the group belongs to the job, the job's own values replace the host's.
        hosts = {group.name: list(group.hosts) for group in self._cluster.groups}
        types = {
            joined.group: joined.instance_type,
            **{group.name: group.instance_type for group in self._cluster.groups},
        }
        roles = {joined.group: Role.DATA, **{group.name: group.role for group in self._cluster.groups}}
        own = hosts.setdefault(joined.group, [])
        if joined.host not in own:
            own.append(joined.host)
        document = {
            "current_host": joined.host,
            "instance_groups": [group_document(name, types[name], names) for name, names in hosts.items()],
            "network_interface_name": self._cluster.network_interface_name,
        }
        return pb.JoinReply(
            job_id=self._job_id,
            cluster_json=json.dumps(document),
            roles=[f"{name}={roles[name].value}" for name in hosts],
        )


def request_from_proto(message: pb.JoinRequest) -> JoinRequest:
    """Return the request in ``message``.

    Raises:
        ProtocolError: If the protocol differs or a part exceeds its limit.
    """
    if message.protocol != CONTROL_PROTOCOL:
        raise ProtocolError(
            f"a host that wants to join speaks control protocol {message.protocol}, this host speaks {CONTROL_PROTOCOL}"
        )
    request = record_of(JoinRequest, message)
    if not request.host.address:
        raise ProtocolError(f"{request.host.host}, which wants to join, did not state its address")
    return request


def ask_to_join(
    name: str, address: str, request: JoinRequest, *, token: security.Token | None, tls: Tls | None
) -> Admission | None:
    """Ask a host for admission to its job, once. Return None if the job is about to end.

    Args:
        name: Name of any host of the job, which its certificate must have.
        address: ``address:port`` of its launcher.
        request: What this host says about itself.
        token: The job's token, if it has one.
        tls: TLS settings of this host. None for a job in plaintext.

    Raises:
        AuthenticationError: If the launcher does not accept the token or the certificate.
        ClusterError: If no launcher can be reached there, or it cannot admit this host yet. Another attempt may
            succeed.
        ConfigError: If the job does not admit this host because of its name or group.
        DisagreementError: If this host and the job differ in version, protocol, script or options.
        ProtocolError: If the answer is malformed.
    """
    reply = _ask(name, address, request, token, tls)
    # Follow one redirection only, because two hosts that disagree could send this host back and forth (attack A23 in
    # docs/reliability.md).
    if reply.admitter and reply.admitter != name:
        name, address = reply.admitter, reply.admitter_address
        check_address(address)
        reply = _ask(name, address, request, token, tls)
        if reply.admitter and reply.admitter != name:
            raise ClusterError(f"{name} and other hosts of the job do not agree on the host that admits others")
    if not reply.refusal:
        return _admission(name, reply)
    if reply.may_pass:
        raise ClusterError(f"{name} does not admit this host yet: {reply.refusal}")
    if reply.exit_code == ExitCode.OK:
        return None
    text = f"the job of {name} does not admit this host: {reply.refusal}"
    raise DisagreementError(text) if reply.exit_code == ExitCode.DISAGREEMENT else ConfigError(text)


def _ask(name: str, address: str, request: JoinRequest, token: security.Token | None, tls: Tls | None) -> pb.JoinReply:
    """Send a request to join to one launcher, and return the reply."""
    with channels.open_channel(address, name=name, tls=tls) as channel:
        call = channel.unary_unary(
            "/hetero.v1.Control/Join",
            request_serializer=pb.JoinRequest.SerializeToString,
            # Leave the bytes to `parse` below, which knows what each implementation of protobuf raises if they are
            # malformed.
            response_deserializer=lambda data: data,
        )
        message = pb.JoinRequest(protocol=CONTROL_PROTOCOL, **fields_of(request))
        try:
            # This host does not know the job's id yet.
            data = call(message, timeout=CALL_TIMEOUT_S, metadata=security.call_metadata(token, job_id=""))
        except grpc.RpcError as error:
            raise _failed(f"{name} ({address})", error) from error
    reply = parse(pb.JoinReply, data)
    # This text goes into this host's log, so another host must not forge lines with it (attack A14 in
    # docs/reliability.md).
    reply.refusal = escape_line(one_line(reply.refusal, MAX_SUMMARY_CHARS))
    return reply


def _admission(name: str, reply: pb.JoinReply) -> Admission:
    """Return the admission in a reply.

    Raises:
        ClusterError: If the job still waits for other hosts.
        ProtocolError: If the reply is malformed.
    """
    if not reply.cluster_json:
        raise ClusterError(f"{name} waits for the other hosts of the job")
    assert _JOB_ID.check is not None
    # This raises if the id is malformed.
    _JOB_ID.check(reply.job_id)
    if len(reply.cluster_json) > MAX_FILE_BYTES:
        raise ProtocolError(f"{name} described a cluster in {len(reply.cluster_json)} characters, which is too long")
    try:
        document = json.loads(reply.cluster_json)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{name} described a cluster in malformed JSON: {error!s:.100}") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"{name} described a cluster as a {type(document).__name__}; expected an object")
    return Admission(job_id=reply.job_id, document=document, roles=tuple(reply.roles))


def _failed(target: str, error: grpc.RpcError) -> HeteroError:
    """Return the error for a call that failed."""
    code = error.code()
    found = diagnose(error.details() or "")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthenticationError(f"{target} refuses this host's token; give this host the token of the job")
    if found is not None and found.is_certificate:
        return AuthenticationError(f"{target}: TLS: {found.text}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ClusterError(f"{target} answers but is not a hetero launcher: does another program use the port?")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return DisagreementError(f"{target} rejects what this host says: {channels.short_details(error)}")
    return ClusterError(f"cannot reach the launcher at {target}: {code.name.lower()}, {channels.short_details(error)}")

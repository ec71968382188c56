"""A launcher's part of the control plane: membership behind a lock, heartbeats, and the RPCs.

One thread per peer sends this host's status in every heartbeat interval, and at once after a change. The peer answers
with its own status. Both a heartbeat and an answer from a peer show that the peer lives.

If a network is cut in one direction only, both hosts still notice. The host that receives nothing also gets no
acknowledgements from TCP. That host can then only repeat its last packets, and cannot open another connection, so the
other host soon receives nothing new either. If a proxy between the hosts sends the acknowledgements, only the host that
receives nothing notices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message

from hetero.wire import channels  # before grpc, because channels sets grpc's environment

import grpc  # isort: skip

from hetero.control import security
from hetero.control.members.admission import Admitter, request_from_proto
from hetero.control.members.host_table import LEAVING
from hetero.control.members.joined import JoinedHost
from hetero.control.members.membership import Membership
from hetero.control.peer_connection import ConnectionOptions, PeerConnection
from hetero.control.rank_server import RankServer
from hetero.control.status import (
    CONTROL_PROTOCOL,
    MAX_SUMMARY_CHARS,
    Cause,
    HostStatus,
    RankReport,
    SessionOptions,
    status_from_proto,
    status_to_proto,
)
from hetero.errors import HeteroError, ProtocolError
from hetero.system.fault_injection import faults_at
from hetero.system.waits import POLL_S, SHORT_POLL_S
from hetero.wire.messages import parse
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import fields_of, record_of
from hetero.wire.tls import Tls
from hetero.wire.transports import choose_transport
from hetero.wire.transports.interface import Connection

__all__ = ["Hub"]

logger = logging.getLogger(__name__)

_Message = TypeVar("_Message")
_Parsed = TypeVar("_Parsed")

_FORWARD_S = 2.0
"""Longest time that a failing rank waits until the arbiter has its failure, and that a new host waits until all trainer
hosts know it."""
_MAX_REFUSALS = 100
"""Maximum number of different refusals to log. Without a token, unauthenticated peers can cause any number of them."""


class Hub:
    """The control plane of this host: it serves the ranks and exchanges statuses with the other hosts of the job.

    Args:
        membership: The state machine. Only the hub may use it from now on.
        address: Address of this host to bind, never all interfaces.
        port: Control port, the same on every host. 0 picks a free port (for tests).
        resolve: Maps a host name to the ``address:port`` of its launcher. It may block, and raises `HeteroError` if
            DNS fails.
        peers: Names of the other hosts.
        token: The job's token. With None the hub accepts every caller that reaches the port.
        job_id: Id of the job. The hub rejects launchers of other jobs.
        remote: Whether the job uses endpoints. The hub passes this to the ranks.
        session_options: The other options that the hub passes to the ranks.
        heartbeat_s: Heartbeat interval, seconds.
        num_ranks: Ranks of this host. Without ranks, the hub opens no port for them.
        started_s: Monotonic time of this launcher's start. Times of logged values count from it. None: now.
        tls: TLS settings of this host. None for a job in plaintext.
        admitter: Answers hosts that want to join the job. Only the first trainer host has one.

    Raises:
        PortError: If the port cannot be bound.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        address: str,
        port: int,
        resolve: Callable[[str], str],
        peers: tuple[str, ...],
        token: security.Token | None,
        job_id: str,
        remote: bool,
        session_options: SessionOptions,
        heartbeat_s: float,
        num_ranks: int = 0,
        started_s: float | None = None,
        tls: Tls | None = None,
        admitter: Admitter | None = None,
    ) -> None:
        self._membership = membership
        self._admitter = admitter
        self._resolve_name = resolve
        """Maps the name of a host to an address. `_resolve` also knows the addresses that joined hosts have stated."""
        self._started_s = time.monotonic() if started_s is None else started_s
        self._changed = threading.Condition(threading.RLock())
        self._version = 0
        """Number of changes of ``Membership.news``. A connection sends each version of this host's status once."""
        self._last_news = membership.news, membership.local_news
        """The last ``news`` of the membership, which is for other hosts, and ``local_news``, which is for this one."""
        self._remote = remote
        self._session_options = session_options
        self._heartbeat_s = heartbeat_s
        self._stopping = threading.Event()
        self._refusals: set[str] = set()
        """Reasons of refused messages that were logged."""
        self._interceptor = security.ServerInterceptor(token, job_id=job_id, policies=security.CONTROL_POLICIES)
        self._server = security.control_server(self._interceptor, self._handlers(), num_peers=len(peers))
        self.port = channels.bind(self._server, address, port, tls=tls)
        self._ranks: RankServer | None = None
        if num_ranks:
            self._ranks = RankServer(choose_transport(tls), address, self._answers_to_rank, token=token, job_id=job_id)
        self._connection_options = ConnectionOptions(
            resolve=self._resolve,
            news=self._news,
            membership=self.membership,
            reporter=membership.reporter,
            stopping=self._stopping,
            token=token,
            job_id=job_id,
            heartbeat_s=heartbeat_s,
            tls=tls,
            fault=faults_at("heartbeat"),
        )
        self._peers = {host: PeerConnection(host, self._connection_options) for host in peers}
        self._joined_peers: dict[str, PeerConnection] = {}
        """Connections to hosts that have joined the running job."""

    def start(self) -> None:
        """Start the server and the heartbeats. Does not block."""
        self._server.start()
        if self._ranks is not None:
            self._ranks.start()
        for peer in self._peers.values():
            peer.start()

    def stop(self, *, grace_s: float = 0.5) -> None:
        """Stop the server and the heartbeats. Idempotent."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._ranks is not None:
            self._ranks.stop()
        self._server.stop(grace_s).wait(grace_s + 1.0)
        # Limit the time to wait for the threads, because one of them may be waiting for the answer of a silent host.
        deadline_s = time.monotonic() + self._heartbeat_s
        for peer in (*self._peers.values(), *self._joined_peers.values()):
            peer.join(max(0.0, deadline_s - time.monotonic()))

    def __enter__(self) -> Hub:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The launcher's side

    def update(self, **changes: object) -> None:
        """Change fields of this host's status and send it to all hosts at once."""
        with self.membership() as membership:
            membership.update(**changes)

    def fail(self, cause: Cause, *, generation: int | None = None) -> None:
        """Report a failure of this host, or of its ranks of the given generation. The arbiter decides what follows."""
        with self.membership() as membership:
            membership.fail(cause, generation=generation)

    def wait(self, timeout_s: float) -> None:
        """Block until something has changed, at most ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait(timeout_s)

    @contextlib.contextmanager
    def membership(self) -> Iterator[Membership]:
        """Yield the membership under the lock, to read or change it. Then tick it, and act on its changes.

        That is: connect to hosts that have joined, disconnect from hosts that have left, and wake waiting threads.
        """
        with self._changed:
            yield self._membership
            self._membership.tick()
            self._follow_joined()
            last_news, last_local_news = self._last_news
            news, local_news = self._membership.news, self._membership.local_news
            self._last_news = news, local_news
            # With a new version, the connections send this host's status to all peers at once.
            if news != last_news:
                self._version += 1
            if news != last_news or local_news != last_local_news:
                self._changed.notify_all()

    @property
    def decided(self) -> Cause | None:
        """The job's root cause, None until it is decided. Reading it takes no lock, for callers that must not wait."""
        return self._membership.own.decided

    @property
    def rank_port(self) -> int:
        """Port for the ranks of this host. 0 without ranks."""
        return 0 if self._ranks is None else self._ranks.port

    @property
    def auth_failures(self) -> int:
        """Number of calls and connections that were rejected because the peer did not show the token."""
        num_rejected = 0 if self._ranks is None else self._ranks.greeter.num_rejected
        return self._interceptor.auth_failures + num_rejected

    def _follow_joined(self) -> None:
        """Connect to hosts that have joined, and disconnect from hosts that have left. Does not block."""
        present = self._membership.joined_hosts.present
        if present.keys() == self._joined_peers.keys() or self._stopping.is_set():
            return
        for host in present.keys() - self._joined_peers.keys():
            self._joined_peers[host] = PeerConnection(host, self._connection_options)
            self._joined_peers[host].start()
        for host in self._joined_peers.keys() - present.keys():
            self._joined_peers.pop(host).stop()

    def _resolve(self, host: str) -> str:
        """Return ``address:port`` of a host's launcher. May block and may raise `HeteroError`."""
        # A host that has joined has stated its address. A host from the description of the cluster has only a name.
        joined = self._membership.joined_hosts.present.get(host)
        return joined.address if joined is not None and joined.address else self._resolve_name(host)

    def _is_at(self, host: JoinedHost) -> bool:
        """Return whether the name of a host resolves to the address that the host states."""
        try:
            return self._resolve(host.host) == host.address
        except HeteroError:
            return False

    def _news(self, sent_version: int, timeout_s: float) -> tuple[int, HostStatus]:
        """Wait for a status that is newer than the version that was sent. Return this host's version and status."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != sent_version or self._stopping.is_set(), timeout_s)
            return self._version, self._membership.own

    # The RPCs

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Return the handler of each RPC by its name."""

        def unary(method: Callable[..., object], kind: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
            """Return a handler that parses a request as a message of this kind, and answers with ``method``."""
            # Do not let gRPC parse the request. If its deserializer rejects a request, gRPC goes on counting the
            # request as open, and enough such requests would end the connection.
            return grpc.unary_unary_rpc_method_handler(
                lambda data, context: method(self._parsed(context, functools.partial(parse, kind), data), context),
                response_serializer=lambda reply: reply.SerializeToString(),
            )

        return {"Heartbeat": unary(self._on_heartbeat, pb.HostStatus), "Join": unary(self._on_join, pb.JoinRequest)}

    def _on_heartbeat(self, request: pb.HostStatus, context: grpc.ServicerContext) -> pb.HostStatus:
        """Store the status of another host, and answer with the status of this host. Let a host join if it may."""
        if request.protocol != CONTROL_PROTOCOL:
            # Ignore the status but answer, because the answer tells the caller that the protocols differ. This host
            # does not know who called. The answers to its own heartbeats show which peer has the other protocol.
            self._log_refusal(f"it speaks control protocol {request.protocol}, this host speaks {CONTROL_PROTOCOL}")
            return pb.HostStatus(protocol=CONTROL_PROTOCOL, host=self._membership.own.host)
        status = self._parsed(context, status_from_proto, request)
        with self.membership() as membership:
            is_known = membership.has(status.host)
            if is_known:
                membership.observe(status)
        # Admit an unknown host if it was added to the description of the cluster. Reject any other one. It may have
        # joined through another trainer host a moment ago, or this job has removed it after a long silence.
        if not is_known and not self._admit_described(status):
            why = f"{status.host!r:.100} is not a host of this job"
            self._log_refusal(why)
            context.abort(grpc.StatusCode.NOT_FOUND, why)
        with self._changed:
            # Only the reporter writes the values that scripts have logged.
            return status_to_proto(self._membership.own, has_metrics=status.host == self._membership.reporter)

    def _admit_described(self, status: HostStatus) -> bool:
        """Admit an unknown host that was added to the description of the cluster. Return whether it was admitted."""
        if self._admitter is None or status.state in LEAVING:
            return False
        joined = self._admitter.described(status.host)
        with self.membership() as membership:
            if joined is None or membership.obstacle_to(joined) is not None:
                return False
            membership.admit(joined)
            membership.observe(status)
        return True

    def _on_join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        """Admit a data host to the running job. Return when all living trainer hosts know it."""
        asked = self._parsed(context, request_from_proto, request)
        # Only the first trainer host admits hosts. Name it to the caller, who then asks there.
        if self._admitter is None:
            admitter = self._membership.reporter
            return pb.JoinReply(admitter=admitter, admitter_address=self._resolve(admitter))
        # Before the job, hosts ask a registrar at this port for the description of the cluster. A host that has lost
        # its answer asks again, and may reach this launcher. It is a host of the job from the start, so send it the
        # description. The address proves that no other host has taken its name.
        if self._admitter.has_described(asked.host) and self._is_at(asked.host):
            return self._admitter.reply(asked.host)
        joined = self._admitter.placed(asked.host)
        with self.membership() as membership:
            obstacle = self._admitter.refusal(asked, membership.own) or membership.obstacle_to(joined)
            if obstacle is None:
                membership.admit(joined)
        if obstacle is not None:
            self._log_refusal(f"{joined.host} cannot join: {obstacle.text}")
            return pb.JoinReply(refusal=obstacle.text, exit_code=int(obstacle.exit_code), may_pass=obstacle.may_pass)
        # The other trainer hosts learn about the new host from heartbeats of this host. Until then, they reject the
        # heartbeats of the new host. So wait for this. Answer also if it takes longer, because heartbeats are repeated.
        deadline_s = time.monotonic() + _FORWARD_S
        with self._changed:
            while not self._membership.knows_joined(joined) and time.monotonic() < deadline_s:
                self._changed.wait(SHORT_POLL_S)
        return self._admitter.reply(joined)

    # The ranks of this host

    def _answers_to_rank(self, data: bytes, connection: Connection) -> Iterator[bytes]:
        """Yield the answers to a request of a rank. Raise `HeteroError` if the request is malformed."""
        try:
            request = parse(pb.RankRequest, data)
            kind = request.WhichOneof("kind")
            if kind == "register":
                yield self._on_register(request.register).SerializeToString()
            elif kind == "report":
                self._on_report(record_of(RankReport, request.report))
                # The empty answer tells the rank that the report has arrived.
                yield b""
            elif kind == "watch":
                yield from (update.SerializeToString() for update in self._updates(connection))
            else:
                raise ProtocolError("a rank sent a request of no known kind")
        except ProtocolError as error:
            self._log_refusal(str(error))
            raise

    def _on_register(self, request: pb.RegisterRequest) -> pb.RegisterReply:
        """Store an empty report for a new rank, and answer with the job's options."""
        with self.membership() as membership:
            # The arbiter then waits for the vote of this rank before it decides where all ranks stop.
            membership.store(RankReport(rank=request.rank, generation=request.generation))
        elapsed_s = time.monotonic() - self._started_s
        return pb.RegisterReply(remote=self._remote, elapsed_s=elapsed_s, **fields_of(self._session_options))

    def _on_report(self, report: RankReport) -> None:
        """Store the report of a rank. If the rank fails, wait until the arbiter has the failure."""
        with self.membership() as membership:
            if report.failure is not None:  # a rank does not know the name of its host
                failure = dataclasses.replace(report.failure, host=membership.own.host, of_rank=True)
                report = dataclasses.replace(report, failure=failure)
            membership.store(report)
            # The failure in the last report of a finished rank is that of a stop callback. It does not end the job at
            # once, because other ranks may still save. `hetero.launch.roles` waits for them.
            has_failed = report.failure is not None and not report.finished
            # The type checker does not know what `has_failed` says about ``report.failure``. So repeat the condition.
            if report.failure is not None and not report.finished:
                membership.fail(report.failure, generation=report.generation)
        if has_failed:
            # The rank waits for this answer before it ends. Other ranks fail when this rank ends, and their failures
            # must not reach the arbiter before this failure.
            with self._changed:
                self._changed.wait_for(lambda: self._membership.failure_delivered, _FORWARD_S)

    def _updates(self, connection: Connection) -> Iterator[pb.RankUpdate]:
        """Yield an update for a rank after each change.

        The updates end with the hub or the connection, or when the rank sends anything on this connection.
        The lock is not held while an update is sent, because a slow rank must not block the hub.
        """
        sent: pb.RankUpdate | None = None
        # `is_quiet` also returns False for unread bytes, because they hide the end of a connection. Without this, the
        # thread of a peer that sent bytes and left stayed until the end of the job.
        while connection.is_quiet() and not self._stopping.is_set():
            with self._changed:
                update = self._rank_update()
                if update == sent:
                    # Limit the wait, because the connection may have ended, and then this thread must end too.
                    self._changed.wait(POLL_S)
                    continue
            sent = update
            yield update

    def _rank_update(self) -> pb.RankUpdate:
        """Return what a rank follows: endpoints, hosts in service, a request to stop. The caller holds the lock."""
        membership = self._membership
        endpoints = [
            pb.DirectoryEntry(host=record.host, endpoint=pb.Endpoint(**fields_of(record)))
            for record in membership.endpoints()
        ]
        hosts = [pb.DirectoryEntry(host=host) for host in membership.hosts_in_service()]
        stop_at = membership.own.stop_at
        return pb.RankUpdate(
            # An entry without an endpoint is a host in service. With both, a reader can tell an endpoint that died from
            # one that was lost with its host.
            endpoints=[*endpoints, *hosts],
            stop_requested=membership.stop_requested,
            stop_at=None if stop_at is None else pb.StopPoint(**fields_of(stop_at)),
        )

    def _parsed(
        self, context: grpc.ServicerContext, parse: Callable[[_Message], _Parsed], message: _Message
    ) -> _Parsed:
        """Parse a request. If it is malformed, log the reason and abort the call."""
        try:
            return parse(message)
        except HeteroError as error:
            # Log the text, not the error. A stored log record with the error would keep the call open for gRPC.
            self._log_refusal(str(error))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from error

    def _log_refusal(self, why: str) -> None:
        """Log a problem with a message once, because it may occur with every heartbeat."""
        why = why[:MAX_SUMMARY_CHARS]
        if why not in self._refusals and len(self._refusals) < _MAX_REFUSALS:
            self._refusals.add(why)
            logger.warning("refused a message: %s", why)

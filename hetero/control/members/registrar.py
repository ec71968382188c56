"""Collects the hosts of a job on platforms that tell a host only the address of the main host.

Every other host asks the main host to join, again and again. As soon as the expected number of hosts has asked, the
list is fixed, and each host gets the description of the cluster. Then the launcher of the main host takes over the
port.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from hetero.wire import channels  # before grpc, because channels sets grpc's environment

import grpc  # isort: skip

from hetero.cluster import natural_key
from hetero.cluster.groups import group_document
from hetero.control import security
from hetero.control.members.admission import request_from_proto
from hetero.control.members.joined import JoinedHost
from hetero.errors import ClusterError, ExitCode, HeteroError
from hetero.system.waits import CALL_TIMEOUT_S
from hetero.wire.messages import parse
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.tls import Tls

__all__ = ["Registrar", "document_of"]

logger = logging.getLogger(__name__)


class Registrar:
    """The registrar of a job, on its main host.

    Args:
        own: The main host itself.
        num_hosts: Number of hosts of the job, with the main host.
        groups: Names of the groups in order.
        token: The job's token. None for a job without one.
        tls: TLS settings of this host.
        job_id: Id of the job.
    """

    def __init__(
        self,
        own: JoinedHost,
        *,
        num_hosts: int,
        groups: Sequence[str],
        token: security.Token | None,
        tls: Tls | None,
        job_id: str,
    ) -> None:
        self._own = own
        self._num_hosts = num_hosts
        self._groups = groups
        self._tls = tls
        self.access = security.ServerInterceptor(token, job_id=job_id, policies=security.CONTROL_POLICIES)
        self.port = 0
        """Port that the registrar listens on, while it serves."""
        self._job_id = job_id
        self._changed = threading.Condition()
        self._hosts = {own.host: own}
        """The hosts that have registered, by name."""
        self._fetched: set[str] = set()
        """Other hosts that have received the description of the cluster."""

    def collect(self, address: str, port: int, timeout_s: float, show: Callable[[str], object]) -> dict[str, object]:
        """Wait for all hosts and return the description of the cluster.

        Args:
            address: Numeric address of this host.
            port: Port of the launcher.
            timeout_s: Longest time to wait.
            show: Called about once a second with what is missing.

        Raises:
            ClusterError: If hosts are missing at the end of this time.
            PortError: If the port cannot be bound.
        """
        with self.serving(address, port):
            self._wait(lambda: len(self._hosts) == self._num_hosts, timeout_s, show, self._missing)
            if len(self._hosts) < self._num_hosts:
                raise ClusterError(f"still missing after {timeout_s:.0f} s: {self._missing()}")
            # This host itself fetches nothing, so wait for one host less.
            self._wait(lambda: len(self._fetched) == self._num_hosts - 1, CALL_TIMEOUT_S, show, self._unfetched)
            if len(self._fetched) < self._num_hosts - 1:
                logger.warning("%s; the launcher will answer them", self._unfetched())
        return document_of(self._hosts.values(), self._groups)

    @contextlib.contextmanager
    def serving(self, address: str, port: int) -> Iterator[None]:
        """Answer other hosts inside of the context.

        Raises:
            PortError: If the port cannot be bound.
        """
        handlers = {
            "Join": grpc.unary_unary_rpc_method_handler(
                self._on_join, response_serializer=lambda reply: reply.SerializeToString()
            ),
            # Hosts that already have the description send heartbeats here. The answer is the status UNAVAILABLE, so
            # these hosts send them again later.
            "Heartbeat": grpc.unary_unary_rpc_method_handler(_on_heartbeat),
        }
        server = security.control_server(self.access, handlers, num_peers=self._num_hosts)
        self.port = channels.bind(server, address, port, tls=self._tls)
        server.start()
        try:
            yield
        finally:
            # Wait until the port is free, because the launcher of this host binds it next.
            server.stop(grace=0.5).wait(timeout=2.0)

    def _wait(
        self,
        is_done: Callable[[], bool],
        timeout_s: float,
        show: Callable[[str], object],
        words: Callable[[], str],
    ) -> None:
        """Wait until ``is_done`` returns True or the time is over. Meanwhile show what is missing."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._changed.wait_for(is_done, 1.0) and time.monotonic() < deadline_s:
                show(words())

    def _missing(self) -> str:
        return f"{self._num_hosts - len(self._hosts)} of {self._num_hosts} hosts have not registered yet"

    def _unfetched(self) -> str:
        return f"{self._num_hosts - 1 - len(self._fetched)} hosts have not fetched the list of hosts yet"

    def _on_join(self, data: bytes, context: grpc.ServicerContext) -> pb.JoinReply:
        """Register a host. If all hosts have registered, answer with the description of the cluster."""
        try:
            request = request_from_proto(parse(pb.JoinRequest, data))
        except HeteroError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from error
        host = request.host
        with self._changed:
            registered = self._hosts.get(host.host)
            if host.group not in self._groups:
                found = f"the main host has the groups {', '.join(self._groups)}, and not {host.group!r}"
                refusal = f"{found}; give HETERO_GROUPS the same value on all hosts"
                return pb.JoinReply(refusal=refusal, exit_code=int(ExitCode.DISAGREEMENT))
            if registered is None and len(self._hosts) < self._num_hosts:
                self._hosts[host.host] = host
                logger.info("host %s of group %s has registered", host.host, host.group)
            # All places are taken, or this name has registered from another address or in another group. Each name has
            # one place, so this host is one too many in both cases.
            elif registered != host:
                refusal = f"the job has {self._num_hosts} hosts, and all have registered"
                if registered is not None:
                    refusal = f"another host has registered as {host.host}, of group {registered.group}"
                return pb.JoinReply(refusal=refusal, exit_code=int(ExitCode.USAGE))
            is_complete = len(self._hosts) == self._num_hosts
            # This answer contains the description of the cluster.
            if is_complete:
                self._fetched.add(host.host)
            self._changed.notify_all()
            # Without a description of the cluster, the host asks again.
            if not is_complete:
                return pb.JoinReply(job_id=self._job_id)
            document = document_of(self._hosts.values(), self._groups) | {"current_host": host.host}
            return pb.JoinReply(job_id=self._job_id, cluster_json=json.dumps(document))


def _on_heartbeat(_data: bytes, context: grpc.ServicerContext) -> bytes:
    """Reject a heartbeat of a host that already has the description, because other hosts still lack it."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "the main host waits until all hosts have the list of hosts")
    raise AssertionError("abort raises")


def document_of(hosts: Iterable[JoinedHost], groups: Sequence[str]) -> dict[str, object]:
    """Return the description of a cluster in the schema of ``resourceconfig.json``, without a current host."""
    found = []
    known = list(hosts)
    for name in groups:
        members = sorted((host for host in known if host.group == name), key=lambda host: natural_key(host.host))
        # A group may have no hosts. All hosts of a group have the same instance type.
        if members:
            found.append(group_document(name, members[0].instance_type, [host.host for host in members]))
    return {"instance_groups": found}

"""How a rank calls its launcher: the three calls of `LauncherLink`, over gRPC or over a socket of this host.

A rank of a job with endpoints uses gRPC, because its data plane does so too. A rank of a homogeneous job uses
`hetero.control.host_socket`, because torch forks its loader's workers from the rank, and a process forked from one
with an open gRPC channel can hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from hetero.wire import channels  # before grpc, because channels sets grpc's environment

import grpc  # isort: skip

from hetero.control import security
from hetero.control.host_socket import ADDRESS_PREFIX, SocketLink
from hetero.errors import AuthenticationError, HeteroError
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.tls import Tls

__all__ = ["GrpcLink", "LauncherLink", "open_link"]

_CALL_TIMEOUT_S = 10.0

_abandoned: list[GrpcLink] = []
"""Links that this process inherited in a fork. They are never freed, because freeing a channel takes locks of gRPC, and
the thread that holds such a lock may not exist in this process."""


class LauncherLink(Protocol):
    """One rank's connection to the launcher of its host. It allows one call at a time, and one `watch` beside it."""

    def register(self, request: pb.RegisterRequest) -> pb.RegisterReply:
        """Announce this rank. Block until the launcher answers.

        Raises:
            AuthenticationError: If the launcher rejects this process.
            HeteroError: If the launcher cannot be reached.
        """

    def report(self, report: pb.RankReport) -> bool:
        """Send a report and block until the launcher answers. Return whether it answered."""

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.RankUpdate]:
        """Yield the launcher's updates until the launcher ends or `cancel` is called.

        Raises:
            HeteroError: If the connection breaks.
        """

    def cancel(self) -> None:
        """End the `watch` in progress. Idempotent."""

    def close(self) -> None:
        """Disconnect. Idempotent."""

    def abandon(self) -> None:
        """Give up the connection in a forked child, because it belongs to the parent."""


def open_link(
    address: str, token: security.Token | None, *, job_id: str, rank: int, tls: Tls | None = None
) -> LauncherLink:
    """Return the link to a launcher.

    Args:
        address: ``address:port``, or the address of a `hetero.control.host_socket.HostSocket`.
        token: The job's token, if it has one.
        job_id: Id of the job.
        rank: This rank, for messages.
        tls: TLS settings of this host. None for a job in plaintext.
    """
    if address.startswith(ADDRESS_PREFIX):
        return SocketLink(address, token, rank=rank)
    return GrpcLink(address, token, job_id=job_id, rank=rank, tls=tls)


class GrpcLink:
    """A `LauncherLink` over gRPC. See `open_link` for the arguments."""

    def __init__(self, address: str, token: security.Token | None, *, job_id: str, rank: int, tls: Tls | None) -> None:
        self._address = address
        self._rank = rank
        self._metadata = security.call_metadata(token, job_id)
        self._channel = channels.open_channel(address, name="" if tls is None else tls.host, tls=tls)
        self._watch_call: Any = None

    def register(self, request: pb.RegisterRequest) -> pb.RegisterReply:
        """See `LauncherLink`."""
        try:
            reply: pb.RegisterReply = self._call("Register", request, pb.RegisterReply, wait_for_ready=True)
        except grpc.RpcError as error:
            self._channel.close()
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise AuthenticationError(
                    f"rank {self._rank}: its launcher at {self._address} refuses the token"
                ) from error
            why = f"{error.code().name}, {channels.short_details(error)}"
            raise HeteroError(f"rank {self._rank} cannot reach its launcher at {self._address}: {why}") from error
        return reply

    def report(self, report: pb.RankReport) -> bool:
        """See `LauncherLink`."""
        try:
            self._call("Report", report, pb.RankReportReply)
        except grpc.RpcError:
            return False
        return True

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.RankUpdate]:
        """See `LauncherLink`."""
        method = self._channel.unary_stream(
            "/hetero.v1.Launcher/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.RankUpdate.FromString,
        )
        self._watch_call = method(request, metadata=self._metadata)
        try:
            yield from self._watch_call
        except grpc.RpcError as error:
            raise HeteroError(error.code().name.lower()) from error

    def cancel(self) -> None:
        """See `LauncherLink`."""
        if self._watch_call is not None:
            self._watch_call.cancel()

    def close(self) -> None:
        """See `LauncherLink`."""
        self._channel.close()

    def abandon(self) -> None:
        """See `LauncherLink`."""
        _abandoned.append(self)

    def _call(self, method: str, request: Any, reply: Any, **options: Any) -> Any:
        call = self._channel.unary_unary(
            f"/hetero.v1.Launcher/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return call(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata, **options)

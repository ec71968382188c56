"""The connection between a rank and its launcher, on the side of the rank. `rank_server` is the launcher's side.

The link does not use gRPC. torch forks loader workers from ranks of a job without endpoints, and a process that is
forked from one with an open gRPC channel can hang.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from hetero.control.security import Token, proof_of_rank
from hetero.errors import AuthenticationError, HeteroError
from hetero.system.waits import CALL_TIMEOUT_S
from hetero.wire.channels import MAX_REPLY_BYTES
from hetero.wire.limits import GREETING
from hetero.wire.messages import parse
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.tls import Tls, TlsError
from hetero.wire.transports import choose_transport
from hetero.wire.transports.interface import Connection

__all__ = ["LauncherLink"]


class LauncherLink:
    """One rank's connection to its launcher. It allows one call and one `watch` at a time.

    Args:
        address: ``address:port`` of a `hetero.control.rank_server.RankServer`.
        token: The job's token, if it has one.
        job_id: Id of the job.
        rank: This rank, for messages.
        tls: TLS settings of this host. None for a job in plaintext.
    """

    def __init__(self, address: str, token: Token | None, *, job_id: str, rank: int, tls: Tls | None = None) -> None:
        self._name = f"rank {rank}: its launcher at {address}"
        host, _, port = address.rpartition(":")
        self._place = host.strip("[]"), int(port)
        # Under TLS, the launcher's certificate must have this name. The launcher runs on the same host as this rank.
        self._host = "" if tls is None else tls.host
        self._transport = choose_transport(tls)
        self._hello = GREETING + proof_of_rank(token, job_id)
        self._calls: Connection | None = None
        """Connection for calls, opened with the first call."""
        self._watching: Connection | None = None
        """Connection of the `watch` in progress. None without one."""

    def register(self, request: pb.RegisterRequest) -> pb.RegisterReply:
        """Announce this rank. Block until the launcher answers.

        Raises:
            AuthenticationError: If the launcher rejects this process.
            HeteroError: If the launcher cannot be reached.
        """
        try:
            return parse(pb.RegisterReply, self._call(pb.RankRequest(register=request)))
        except TlsError as error:
            raise HeteroError(f"{self._name} cannot be reached: TLS: {error}") from error
        # A launcher closes the connection of a peer that it does not trust, without an answer.
        except (ConnectionResetError, BrokenPipeError) as error:
            raise AuthenticationError(f"{self._name} refuses the token, or belongs to another job") from error
        except OSError as error:
            raise HeteroError(f"{self._name} cannot be reached: {error}") from error

    def report(self, report: pb.RankReport) -> bool:
        """Send a report and block until the launcher answers. Return whether it answered."""
        try:
            self._call(pb.RankRequest(report=report))
        except (OSError, HeteroError):
            return False
        return True

    def watch(self) -> Iterator[pb.RankUpdate]:
        """Yield the launcher's updates until the launcher ends or `cancel` is called.

        Raises:
            HeteroError: If the connection breaks.
        """
        try:
            self._watching = connection = self._connect(time.monotonic() + CALL_TIMEOUT_S)
            try:
                connection.send(pb.RankRequest(watch=pb.WatchRequest()).SerializeToString())
                while True:
                    yield parse(pb.RankUpdate, _answer_of(connection.receive_message(MAX_REPLY_BYTES)))
            finally:
                self._watching = None
                connection.close()
        except OSError as error:
            raise HeteroError(str(error)) from error

    def cancel(self) -> None:
        """End the `watch` in progress. Idempotent."""
        # Read the attribute once, because another thread may set it to None.
        watching = self._watching
        if watching is not None:
            watching.shut_down()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self.cancel()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the connection for calls. The next call connects again."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def _call(self, request: pb.RankRequest) -> bytes:
        """Send a request and return the answer. Connect first if there is no connection."""
        deadline_s = time.monotonic() + CALL_TIMEOUT_S
        if self._calls is None:
            self._calls = self._connect(deadline_s)
        try:
            self._calls.send(request.SerializeToString(), deadline_s=deadline_s)
            return _answer_of(self._calls.receive_message(MAX_REPLY_BYTES, deadline_s=deadline_s))
        except (OSError, HeteroError):
            # A late answer must not be read as the answer to the next call.
            self._hang_up()
            raise

    def _connect(self, deadline_s: float) -> Connection:
        """Open a connection to the launcher, and prove that this process belongs to the job."""
        connection = self._transport.connect(*self._place, host=self._host, deadline_s=deadline_s)
        try:
            connection.send_raw(self._hello, deadline_s=deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection


def _answer_of(message: bytes | None) -> bytes:
    """Return the received message. None means that the launcher has closed the connection, which is an error."""
    if message is None:
        raise ConnectionResetError("the launcher has closed the connection")
    return message

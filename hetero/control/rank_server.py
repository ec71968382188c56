"""The connections between a launcher and its ranks, on the side of the launcher. They use the transport of batches.

A rank has two connections. One of them is for its calls, and each call has one answer. The other connection brings the
updates that the rank watches. A connection begins with bytes that prove that the peer has the job's token, see
`hetero.control.security.proof_of_rank`.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable, Iterable

from hetero.control.security import Token, proof_of_rank
from hetero.errors import HeteroError
from hetero.wire.channels import MAX_REQUEST_BYTES
from hetero.wire.transports.greeter import Greeter
from hetero.wire.transports.interface import Connection, Transport, UnauthenticatedPeer

__all__ = ["RankServer"]

logger = logging.getLogger(__name__)


class RankServer:
    """Serves ranks from `start` to `stop`. Thread-safe.

    Args:
        transport: How ranks connect.
        address: Numeric address to bind. The system chooses the port.
        answer: Called with a request and its connection, on a thread of the connection. Yields the answers. If it
            raises `HeteroError`, the connection ends.
        token: The job's token. None for a job without one. Then a peer proves only that it knows the job's id.
        job_id: Id of the job.

    Raises:
        PortError: If the address cannot be bound.
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        answer: Callable[[bytes, Connection], Iterable[bytes]],
        *,
        token: Token | None,
        job_id: str,
    ) -> None:
        self._answer = answer
        self._proof = proof_of_rank(token, job_id)
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._is_stopped = False
        self.greeter = Greeter(transport.listen(address), self._admit, name="ranks", expected="the token")
        self.port = self.greeter.port

    def start(self) -> None:
        """Start to accept connections."""
        self.greeter.start()

    def stop(self) -> None:
        """Disconnect every rank. Idempotent. Does not block."""
        self.greeter.stop()
        with self._lock:
            self._is_stopped = True
            for connection in self._connections:
                connection.shut_down()

    def _admit(self, peer: UnauthenticatedPeer, shown: bytes) -> bool:
        """Serve a peer on a separate thread if it shows the proof. Return whether it does."""
        if not hmac.compare_digest(shown, self._proof):
            return False
        connection = peer.admit()
        with self._lock:
            self._connections.add(connection)
            # If `stop` ran a moment ago, it has missed this connection.
            if self._is_stopped:
                connection.shut_down()
        try:
            threading.Thread(target=self._serve, args=(connection,), name="rank", daemon=True).start()
        # The thread may not start, for example when the host runs out of threads.
        except BaseException:
            self._retire(connection)
            raise
        return True

    def _serve(self, connection: Connection) -> None:
        """Answer the requests of one rank until it disconnects. Runs on the thread of the connection."""
        try:
            while (request := connection.receive_message(MAX_REQUEST_BYTES)) is not None:
                for answer in self._answer(request, connection):
                    connection.send(answer)
        except (OSError, HeteroError) as error:
            logger.debug("the connection of a rank ended: %s", error)
        finally:
            self._retire(connection)

    def _retire(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

"""A server of plain connections, in threads of the test's process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Listener:
    """Serves every connection to `place` in a thread of its own, until `stop`.

    Args:
        serve: Given a connection, which is closed after it; may end by `OSError`.
    """

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._serve(connection)

    def stop(self) -> None:
        """Accept no more; connections that there are stay."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

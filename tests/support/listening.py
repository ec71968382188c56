"""Servers of plain connections in the process of the test: one that answers, and one that does not even accept."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator


class Listener:
    """Serves every connection to `place` in a separate thread, until `stop`.

    Args:
        serve: Called with a connection, which is closed afterwards. It may end by `OSError`.
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
        """Accept no more connections. Present ones stay."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def full_listener() -> Iterator[tuple[str, int]]:
    """Yield an address where connections stay pending, because its queue is full and not read."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = listener.getsockname()
        is_full = False
        while not is_full:
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)
            is_full = not select.select([], [waiting], [], 0.2)[1]
        yield place

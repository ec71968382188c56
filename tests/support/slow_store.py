"""A proxy before a server of objects: each request takes some time longer, and is counted."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter

_REQUEST_LINE = re.compile(rb"(GET|HEAD|PUT|POST) (\S+) HTTP/1.1\r\n")


class SlowProxy:
    """Passes bytes on. What a client sends arrives ``delay_s`` later.

    Args:
        port: Port of the server on 127.0.0.1.
        delay_s: Seconds.
    """

    def __init__(self, port: int, delay_s: float) -> None:
        self.requests: Counter[str] = Counter()
        """Requests by kind: ``list``, or the method."""
        self.num_bytes = 0
        """Bytes that the server has sent."""
        self._server_port, self._delay_s = port, delay_s
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_read, to_write = await asyncio.open_connection("127.0.0.1", self._server_port)
            await asyncio.gather(self._requests(reader, to_write), self._answers(to_read, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(2**16):
            for method, path in _REQUEST_LINE.findall(content):
                self.requests["list" if b"list-type=" in path else method.decode()] += 1
            await asyncio.sleep(self._delay_s)
            writer.write(content)
            await writer.drain()
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(2**18):
            self.num_bytes += len(content)
            writer.write(content)
            await writer.drain()
        writer.close()

"""A TCP proxy whose faults a test switches on and off while bytes flow: the root-free twin of a bad network.

A silent drop differs from the kernel's in one point: a new connection is accepted, and then nothing comes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

_CHUNK_BYTES = 2**16
_CALL_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_SLICE_S = 0.02  # of a slow link: how long one piece may take
_RESET = struct.pack("ii", 1, 0)  # a linger of no time: closing resets
_Result = TypeVar("_Result")


class Way(enum.Enum):
    """A direction of a proxied connection."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The faults of one direction. Offsets count per connection, from the time when the faults were set."""

    blackhole: bool = False
    """Nothing passes. The bytes that were sent meanwhile pass when this ends, because TCP would send them again."""
    delay_s: float = 0.0
    """Before every chunk of at most 64 KiB."""
    bytes_per_s: float = math.inf
    corrupt_at: int | None = None
    """Offset of a byte. One bit of it is flipped."""
    corrupt_p: float = 0.0
    """Probability that a bit of a chunk is flipped."""
    seed: int = 0
    """Of that."""
    reset_after: int | None = None
    """Bytes until both sides get a reset."""
    truncate_after: int | None = None
    """Bytes until both sides see an orderly end."""
    half_close_after: int | None = None
    """Bytes until the receiver sees an orderly end. The other direction goes on."""
    duplicate_chunk: int | None = None
    """Number of a chunk that is sent twice."""
    times: int | None = None
    """Most strikes of corrupt, reset, truncate, half_close and duplicate, over all connections. None: any."""


class _Laid:
    """Faults in force, and what has become of them so far."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.random = random.Random(faults.seed)
        self.num_strikes = 0
        self.passes = asyncio.Event()
        if not faults.blackhole:
            self.passes.set()

    def strikes(self) -> bool:
        if self.faults.times is not None and self.num_strikes >= self.faults.times:
            return False
        self.num_strikes += 1
        return True


class _ResetError(ConnectionResetError):
    """Both sides are to see a reset."""


class ChaosProxy:
    """One listening port and where it leads, made by `Chaos.proxy`. Its methods are called by the test's threads."""

    def __init__(self, chaos: Chaos, target: tuple[str, int], address: str, port: int) -> None:
        self._chaos = chaos
        self._target = target
        self._laid = {way: _Laid(Faults()) for way in Way}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self.address, self.port = address, port
        self.num_connections = 0

    # For tests

    def lay(self, faults: Faults, *ways: Way) -> None:
        """Replace the faults of these directions, by default of both. They are in force on return."""
        self._chaos.call(self._lay(faults, ways or tuple(Way)))

    def heal(self) -> None:
        """Let everything pass again, and accept connections. Connections that were cut stay cut."""
        self._chaos.call(self._lay(Faults(), tuple(Way)))
        self._chaos.call(self._listen())

    def blackhole(self, *ways: Way) -> None:
        """Stop all bytes."""
        self.lay(Faults(blackhole=True), *ways)

    def refuse(self) -> None:
        """Refuse new connections."""
        self._chaos.call(self._refuse())

    def reset(self) -> None:
        """Reset every connection that there is."""
        self._chaos.call(self._reset())

    @property
    def num_strikes(self) -> int:
        """How often the faults in force have struck."""
        return sum(laid.num_strikes for laid in self._laid.values())

    # On the loop

    async def _lay(self, faults: Faults, ways: tuple[Way, ...]) -> None:
        for way in ways:
            before, self._laid[way] = self._laid[way], _Laid(faults)
            before.passes.set()  # a thread that waits there looks again

    async def _listen(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.address, self.port))
        listener.listen(1024)
        listener.setblocking(False)
        self._listener, self.port = listener, listener.getsockname()[1]
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _refuse(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _reset(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        await self._refuse()
        await self._reset()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            client, _ = listener.accept()
            self.num_connections += 1
            task = asyncio.create_task(self._serve(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: client.close())  # it may be cancelled before it has begun

    async def _serve(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        server = socket.socket()
        pumps: list[asyncio.Task[None]] = []
        is_orderly = False
        try:
            for side in (client, server):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(loop.sock_connect(server, self._target), _CONNECT_TIMEOUT_S)
            pumps += [
                asyncio.create_task(self._pump(client, server, Way.TO_SERVER)),
                asyncio.create_task(self._pump(server, client, Way.TO_CLIENT)),
            ]
            await asyncio.gather(*pumps)
            is_orderly = True
        except (OSError, asyncio.TimeoutError):
            pass  # what was reset on one side is reset on the other
        finally:
            for pump in pumps:
                pump.cancel()
            try:
                await asyncio.gather(*pumps, return_exceptions=True)
            finally:  # it may be cancelled here as well
                for side in (client, server):
                    if not is_orderly:
                        with contextlib.suppress(OSError):
                            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    side.close()

    async def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        loop = asyncio.get_running_loop()
        laid, flow = self._laid[way], _Flow()
        while True:
            chunk = await loop.sock_recv(source, _CHUNK_BYTES)
            while not self._laid[way].passes.is_set():
                await self._laid[way].passes.wait()
            if self._laid[way] is not laid:
                laid, flow.offset, flow.num_chunks = self._laid[way], 0, 0
            if not chunk:
                _end(sink, socket.SHUT_WR)
                return
            for piece in flow.through(laid, chunk):
                if piece is _RESET_MARK:
                    raise _ResetError
                if piece is _END_MARK or piece is _CUT_MARK:
                    flow.is_cut = True
                    _end(sink, socket.SHUT_WR)
                    if piece is _CUT_MARK:
                        _end(source, socket.SHUT_RDWR)
                    continue
                if laid.faults.delay_s:
                    await asyncio.sleep(laid.faults.delay_s)
                await self._send(sink, piece, laid.faults.bytes_per_s)

    async def _send(self, sink: socket.socket, piece: bytes, bytes_per_s: float) -> None:
        loop = asyncio.get_running_loop()
        size = len(piece) if math.isinf(bytes_per_s) else max(1, int(bytes_per_s * _SLICE_S))
        for begin in range(0, len(piece), size):
            await loop.sock_sendall(sink, piece[begin : begin + size])
            if not math.isinf(bytes_per_s):
                await asyncio.sleep(min(size, len(piece) - begin) / bytes_per_s)


_RESET_MARK, _END_MARK, _CUT_MARK = b"reset", b"end", b"cut"


class _Flow:
    """Where one direction of one connection is."""

    def __init__(self) -> None:
        self.offset = 0
        self.num_chunks = 0
        self.is_cut = False

    def through(self, laid: _Laid, chunk: bytes) -> Iterator[bytes]:
        """Yield the bytes that a chunk becomes, and marks for ends."""
        if self.is_cut:
            return
        faults, begin = laid.faults, self.offset
        self.offset += len(chunk)
        self.num_chunks += 1
        for after, mark in (
            (faults.reset_after, _RESET_MARK),
            (faults.truncate_after, _CUT_MARK),
            (faults.half_close_after, _END_MARK),
        ):
            if after is not None and begin <= after < self.offset and laid.strikes():
                if after > begin:
                    yield chunk[: after - begin]
                yield mark
                return
        if faults.corrupt_at is not None and begin <= faults.corrupt_at < self.offset and laid.strikes():
            chunk = _flip(chunk, faults.corrupt_at - begin)
        if faults.corrupt_p and laid.random.random() < faults.corrupt_p and laid.strikes():
            chunk = _flip(chunk, laid.random.randrange(len(chunk)))
        yield chunk
        if faults.duplicate_chunk == self.num_chunks - 1 and laid.strikes():
            yield chunk


def _flip(chunk: bytes, offset: int) -> bytes:
    return chunk[:offset] + bytes([chunk[offset] ^ 1]) + chunk[offset + 1 :]


def _end(side: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(how)


class Chaos:
    """The thread that runs proxies, as a context manager that closes all of them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos", daemon=True)
        self._proxies: list[ChaosProxy] = []

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._proxies:
            self.call(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._loop.close()

    def proxy(self, target: tuple[str, int], *, address: str = "127.0.0.1", port: int = 0) -> ChaosProxy:
        """Return a proxy that listens. Port 0 is any port."""
        proxy = ChaosProxy(self, target, address, port)
        self.call(proxy._listen())
        self._proxies.append(proxy)
        return proxy

    def drop(self, proxy: ChaosProxy) -> None:
        """Close one proxy and its connections."""
        self._proxies.remove(proxy)
        self.call(proxy.close())

    def call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

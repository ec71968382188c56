"""The proxy makes the faults that other tests rely on."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.support.chaos.proxy import Chaos, ChaosProxy, Faults, Way
from tests.support.listening import Listener

TEXT = bytes(range(256)) * 40


def echo(connection: socket.socket) -> None:
    """Send back what comes, and end when the other side does."""
    while chunk := connection.recv(65536):
        connection.sendall(chunk)


@pytest.fixture
def proxy(chaos: Chaos) -> Iterator[ChaosProxy]:
    listener = Listener(echo)
    yield chaos.proxy(listener.place)
    listener.stop()


@pytest.fixture
def dial(proxy: ChaosProxy) -> Iterator[Callable[[], socket.socket]]:
    opened: list[socket.socket] = []

    def dial() -> socket.socket:
        opened.append(socket.create_connection((proxy.address, proxy.port), timeout=300))
        return opened[-1]

    yield dial
    for each in opened:
        each.close()


def echoed(connection: socket.socket, text: bytes = TEXT) -> bytes:
    """Send the text. Return what comes back: as many bytes, or those until the end."""
    connection.sendall(text)
    return received(connection, len(text))


def received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (chunk := connection.recv(size - len(found))):
        found += chunk
    return found


def test_proxy_without_faults_passes_everything(dial: Callable[[], socket.socket]) -> None:
    assert echoed(dial()) == TEXT


def test_blackhole_holds_back_until_it_ends(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    connection = dial()
    assert echoed(connection) == TEXT
    proxy.blackhole()
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        echoed(connection, b"ping")
    proxy.heal()
    connection.settimeout(10)
    assert received(connection, 4) == b"ping"


def test_blackhole_of_one_way_lets_the_other_pass(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    connection = dial()
    assert echoed(connection, b"a") == b"a"
    proxy.blackhole(Way.TO_CLIENT)
    connection.sendall(b"b")
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    proxy.lay(Faults(), Way.TO_CLIENT)
    connection.settimeout(10)
    assert connection.recv(1) == b"b"  # the request had come through


def test_refuse_and_heal(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    old = dial()
    assert echoed(old, b"a") == b"a"
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        dial()
    assert echoed(old, b"b") == b"b"
    proxy.heal()
    assert echoed(dial(), b"c") == b"c"


def test_reset_after_bytes(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    proxy.lay(Faults(reset_after=100, times=1), Way.TO_CLIENT)
    with pytest.raises(ConnectionResetError):
        echoed(dial())
    assert proxy.num_strikes == 1
    assert echoed(dial()) == TEXT


def test_reset_of_connections_that_there_are(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    connection = dial()
    assert echoed(connection, b"a") == b"a"
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        connection.recv(1)


def test_truncated_after_bytes_ends_in_order(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    proxy.lay(Faults(truncate_after=100), Way.TO_CLIENT)
    assert echoed(dial()) == TEXT[:100]


def test_half_close_ends_one_direction(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    proxy.lay(Faults(half_close_after=3), Way.TO_CLIENT)
    connection = dial()
    assert echoed(connection, b"abcdef") == b"abc"
    connection.sendall(b"more")  # which is not refused


def test_corrupt_flips_one_bit_at_the_offset(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    proxy.lay(Faults(corrupt_at=1000, times=1), Way.TO_CLIENT)
    found = echoed(dial())
    assert [offset for offset in range(len(TEXT)) if found[offset] != TEXT[offset]] == [1000]
    assert echoed(dial()) == TEXT


def test_corrupt_by_chance_is_the_same_for_the_same_seed(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    def spoiled() -> list[bytes]:
        proxy.lay(Faults(corrupt_p=0.5, seed=3), Way.TO_CLIENT)
        connection = dial()
        return [echoed(connection, b"0123456789") for _ in range(20)]

    first = spoiled()
    assert first == spoiled()
    assert 0 < sum(text != b"0123456789" for text in first) < 20


def test_chunk_is_duplicated(proxy: ChaosProxy, dial: Callable[[], socket.socket]) -> None:
    proxy.lay(Faults(duplicate_chunk=0), Way.TO_CLIENT)
    connection = dial()
    connection.sendall(b"ab")
    assert received(connection, 4) == b"abab"


@pytest.mark.parametrize("faults", [Faults(bytes_per_s=50_000.0), Faults(delay_s=0.2)], ids=["rate", "delay"])
def test_slow_link_passes_everything_late(proxy: ChaosProxy, dial: Callable[[], socket.socket], faults: Faults) -> None:
    import time

    proxy.lay(faults, Way.TO_CLIENT)
    begin_s = time.monotonic()
    assert echoed(dial()) == TEXT
    assert time.monotonic() - begin_s >= 0.18


def test_server_that_resets_is_seen_as_that(chaos: Chaos) -> None:
    import struct

    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = chaos.proxy(("127.0.0.1", listener.getsockname()[1]))
        with socket.create_connection((proxy.address, proxy.port), timeout=300) as client:
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            with pytest.raises(ConnectionResetError):
                client.recv(1)

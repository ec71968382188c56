"""Lines of children arrive whole, in order, with their source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.system.line_relay import LineRelay


class Sink:
    """Collects what a relay writes."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, text: str) -> None:
        self.lines.append((name, text))


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def relay(sink: Sink) -> Iterator[LineRelay]:
    relay = LineRelay(sink, tail_lines=3)
    yield relay
    relay.close()


def feed(relay: LineRelay, name: str, *chunks: bytes) -> None:
    """Let a source write ``chunks`` and end."""
    read_end, write_end = os.pipe()
    relay.add(name, read_end)
    for chunk in chunks:
        os.write(write_end, chunk)
    os.close(write_end)


def test_lines_split_over_writes_arrive_whole(relay: LineRelay, sink: Sink) -> None:
    feed(relay, "rank 0", b"one\ntw", b"o\nthree")
    relay.close()
    assert sink.lines == [("rank 0", "one"), ("rank 0", "two"), ("rank 0", "three")]


def test_tail_keeps_the_last_lines_of_its_source(relay: LineRelay) -> None:
    feed(relay, "rank 0", b"".join(b"%d\n" % number for number in range(10)))
    feed(relay, "rank 1", b"other\n")
    relay.close()
    assert relay.tail("rank 0") == ("7", "8", "9")
    assert relay.tail("rank 1") == ("other",)
    assert relay.tail("nobody") == ()


def test_redrawn_line_keeps_its_last_state(relay: LineRelay, sink: Sink) -> None:
    feed(relay, "rank 0", b"10 %\r50 %\r100 %\r\n")
    relay.close()
    assert sink.lines == [("rank 0", "100 %")]


def test_endless_line_is_cut_instead_of_kept(relay: LineRelay, sink: Sink) -> None:
    feed(relay, "rank 0", *([b"x" * 4096] * 15))
    relay.close()
    assert sum(len(text) for _, text in sink.lines) > 0
    assert max(len(text) for _, text in sink.lines) <= 16 * 1024


def test_bytes_that_are_no_text_do_not_stop_the_relay(relay: LineRelay, sink: Sink) -> None:
    feed(relay, "rank 0", b"\xff\xfe\nafter\n")
    relay.close()
    assert sink.lines[-1] == ("rank 0", "after")


def test_close_twice_is_harmless(relay: LineRelay) -> None:
    relay.close()
    relay.close()


def test_discard_relays_what_is_left_and_closes(relay: LineRelay, sink: Sink, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # it never reaches its end
    relay.add("rank 0", descriptor)
    os.write(descriptor, b"last words")
    relay.discard(descriptor)
    relay.close()
    assert sink.lines == [("rank 0", "last words")]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)

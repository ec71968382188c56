"""Descriptors of a consumer's own fetches: forked, closed by a signal handler, or not to be had. Without endpoints."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deliveries import num_descriptors

from hetero.dataplane.reader.own_fetches import OwnFetches
from hetero.wire.faults import CallFailedError, Fault

HANG_S = 1000.0
"""Longer than a test may take."""


class Sent:
    """A fetch whose answer arrives over a pair of sockets."""

    issued_s = 0.0

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.on_late: Callable[[], object] = bool

    def fileno(self) -> int:
        return self.ours.fileno()

    def receive(self) -> CallFailedError:
        self.ours.close()
        return CallFailedError(Fault.BUSY, "on purpose")

    @property
    def is_late(self) -> bool:
        return bool(self.on_late())

    def give_up(self) -> None:
        self.ours.close()


@pytest.fixture
def settled() -> list[Any]:
    return []


@pytest.fixture
def fetches(settled: list[Any]) -> Iterator[OwnFetches]:
    made = OwnFetches(time.monotonic, settle=lambda *given, **_: settled.append(given), hand_over=settled.append)
    with made.lock:
        yield made
        made.close()


@pytest.fixture
def sent() -> Iterator[Any]:
    made = Sent()
    with made.ours, made.theirs:
        yield made


def test_connection_that_a_forked_process_keeps_open_is_not_polled_for_ever(
    fetches: OwnFetches, settled: list[Any], sent: Any
) -> None:
    fetches.add(sent, sent)
    descriptor = sent.fileno()
    with sent.ours.dup():  # as a fork does
        sent.theirs.send(b"answer")
        fetches.receive(HANG_S)
        assert len(settled) == 1
        assert descriptor not in fetches._readable(0.0)


@pytest.mark.parametrize("is_forked", [False, True])
def test_signal_handler_that_closes_ends_the_waiting(fetches: OwnFetches, sent: Any, is_forked: bool) -> None:
    fetches.add(sent, sent)
    copy = os.dup(fetches._wake_descriptor if is_forked else sent.fileno())

    def close(*_: Any) -> None:
        fetches.wake()  # as Fetchers.close does
        fetches.close()

    before = signal.signal(signal.SIGALRM, close)
    try:
        fetches.prepare_to_receive()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        fetches.receive(HANG_S)
    finally:
        signal.signal(signal.SIGALRM, before)
        os.close(copy)
    assert sent.fileno() == -1
    assert not len(fetches)


def test_signal_handler_may_close_while_the_time_of_fetches_is_checked(fetches: OwnFetches, sent: Any) -> None:
    other: Any = Sent()
    fetches.add(sent, sent)
    fetches.add(other, other)
    sent.on_late = fetches.close
    fetches.receive(0.0)
    assert not len(fetches)
    other.theirs.close()


def test_fetch_is_given_up_if_a_signal_handler_has_closed(fetches: OwnFetches, sent: Any) -> None:
    fetches.close()
    num = num_descriptors()
    fetches.add(sent, sent)
    assert sent.fileno() == -1
    assert num_descriptors() == num - 1


def test_close_leaves_no_descriptors_after_they_ran_out(
    fetches: OwnFetches, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "eventfd", fail)
    num = num_descriptors()
    with pytest.raises(OSError, match="too many open files"):
        fetches.add(sent, sent)
    fetches.close()
    assert num_descriptors() == num

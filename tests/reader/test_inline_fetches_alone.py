"""A consumer's own fetches, without endpoints.

Descriptors are forked, closed by a signal handler, or not to be had. Answers arrive before the consumer waits, or then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetero.reader.inline_fetches import InlineFetches
from hetero.wire.faults import CallFailedError, Fault
from tests.support.batch_path.deliveries import num_descriptors

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
def fetches(settled: list[Any]) -> Iterator[InlineFetches]:
    made = InlineFetches(time.monotonic, settle=lambda *given, **_: settled.append(given), hand_over=settled.append)
    with made.lock:
        yield made
        made.close()


@pytest.fixture
def sent() -> Iterator[Any]:
    made = Sent()
    with made.ours, made.theirs:
        yield made


def test_connection_that_a_forked_process_keeps_open_is_not_polled_for_ever(
    fetches: InlineFetches, settled: list[Any], sent: Any
) -> None:
    fetches.add(sent, sent)
    descriptor = sent.fileno()
    with sent.ours.dup():  # as a fork does
        sent.theirs.send(b"answer")
        fetches.receive(HANG_S)
        assert len(settled) == 1
        assert descriptor not in fetches._readable(0.0)


@pytest.mark.parametrize("is_forked", [False, True])
def test_signal_handler_that_closes_ends_the_waiting(fetches: InlineFetches, sent: Any, is_forked: bool) -> None:
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


def test_signal_handler_may_close_while_the_time_of_fetches_is_checked(fetches: InlineFetches, sent: Any) -> None:
    other: Any = Sent()
    fetches.add(sent, sent)
    fetches.add(other, other)
    sent.on_late = fetches.close
    fetches.receive(0.0)
    assert not len(fetches)
    other.theirs.close()


def test_fetch_is_given_up_if_a_signal_handler_has_closed(fetches: InlineFetches, sent: Any) -> None:
    fetches.close()
    num = num_descriptors()
    fetches.add(sent, sent)
    assert sent.fileno() == -1
    assert num_descriptors() == num - 1


def test_close_leaves_no_descriptors_after_they_ran_out(
    fetches: InlineFetches, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "eventfd", fail)
    num = num_descriptors()
    with pytest.raises(OSError, match="too many open files"):
        fetches.add(sent, sent)
    fetches.close()
    assert num_descriptors() == num


class Times:
    """Remembers when each answer counts as arrived."""

    def __init__(self) -> None:
        self.answered_s: list[float | None] = []
        self.fetches = InlineFetches(time.monotonic, settle=self.settle, hand_over=lambda _: None)

    def settle(self, *_: Any, answered_s: float | None = None) -> None:
        self.answered_s.append(answered_s)


@pytest.fixture
def times() -> Iterator[Times]:
    made = Times()
    with made.fetches.lock:
        yield made
        made.fetches.close()


@pytest.mark.parametrize("num_sent", [1, 50])
def test_answers_that_arrived_while_the_consumer_was_away_count_from_before_although_the_kernel_takes_long(
    times: Times, num_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable = times.fetches._readable

    def slow(timeout_s: float) -> list[int]:
        time.sleep(0.005)  # many descriptors, or other threads have the interpreter's lock
        return readable(timeout_s)

    monkeypatch.setattr(times.fetches, "_readable", slow)
    times.fetches.receive(0.0)
    came_back_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        for _ in range(num_sent):
            sent = Sent()
            stack.enter_context(sent.theirs)
            times.fetches.add(sent, sent)  # type: ignore[arg-type]
            sent.theirs.send(b"answer")
        time.sleep(0.005)
        times.fetches.receive(HANG_S)
    assert len(times.answered_s) == num_sent
    assert all(answered_s is not None and answered_s <= came_back_s for answered_s in times.answered_s)


def test_answer_that_arrives_while_the_consumer_waits_counts_from_now(
    times: Times, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable = times.fetches._readable

    def look(timeout_s: float) -> list[int]:
        if timeout_s:  # the first look does not wait
            sent.theirs.send(b"answer")
        return readable(timeout_s)

    times.fetches.receive(0.0)
    times.fetches.add(sent, sent)
    time.sleep(0.005)  # the consumer was away, but nothing has arrived
    monkeypatch.setattr(times.fetches, "_readable", look)
    times.fetches.receive(HANG_S)
    assert times.answered_s == [None]

"""The last resort for ranks that come to no step's end."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from hetero.control.rank import stopping
from hetero.control.rank.stopping import LateStop
from tests.support.control.clocks import Clock


def test_wait_is_over_soon_where_no_endpoint_serves_and_at_half_the_grace_elsewhere(clock: Clock) -> None:
    stop = LateStop(50.0, lambda: None, clock=clock)
    assert not stop.is_wait_over(is_starved=True)
    stop.request()
    clock.now_s += 1.9
    assert not stop.is_wait_over(is_starved=True)
    clock.now_s += 0.2
    stop.request()  # a repeat changes nothing
    assert stop.is_wait_over(is_starved=True)
    assert not stop.is_wait_over(is_starved=False)
    clock.now_s += 23.0
    assert stop.is_wait_over(is_starved=False)


def test_main_thread_is_interrupted_once_at_half_the_grace(clock: Clock) -> None:
    before = signal.getsignal(stopping._SIGNAL)
    ends: list[str] = []

    def end() -> None:
        ends.append(threading.current_thread().name)
        raise SystemExit(143)

    stop = LateStop(50.0, end, clock=clock)
    stop.install()
    try:
        stop.request()
        clock.now_s += 24.9
        stop.interrupt_if_due()
        clock.now_s += 0.2
        helper = threading.Timer(0.1, lambda: [stop.interrupt_if_due() for _ in range(3)])
        helper.start()
        with pytest.raises(SystemExit):
            time.sleep(60.0)  # a script that is blocked in a system call
        helper.join()
    finally:
        signal.signal(stopping._SIGNAL, before)
    assert ends == ["MainThread"]


def test_wait_that_asks_by_itself_is_not_interrupted(clock: Clock) -> None:
    stop = LateStop(50.0, lambda: pytest.fail("interrupted"), clock=clock)
    before = signal.getsignal(stopping._SIGNAL)
    stop.install()
    try:
        stop.request()
        clock.now_s += 30.0
        stop.is_wait_over(is_starved=True)
        stop.interrupt_if_due()
    finally:
        signal.signal(stopping._SIGNAL, before)


def test_process_without_a_handler_is_not_interrupted(clock: Clock) -> None:
    stop = LateStop(50.0, lambda: pytest.fail("interrupted"), clock=clock)
    stop.request()
    clock.now_s += 30.0
    stop.interrupt_if_due()

"""Processes that survive one SIGTERM because their platform may send it to every process, and those that do not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest

from hetero.system.process import start_child
from hetero.system.stop_signals import SHIELD_VARIABLE, end_signal

RANK = """
import os, signal, subprocess, sys, time
from hetero.system.stop_signals import survive_first_sigterm
survive_first_sigterm()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
fork = os.fork()
if fork == 0:
    print("ready", flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
os.kill(child.pid, signal.SIGTERM)
os.kill(fork, signal.SIGTERM)
print(child.wait(), os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
sys.stdin.readline()
"""
BLOCKED = "import signal, sys; print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)"


def start(code: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return start_child(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def say(process: subprocess.Popen[bytes]) -> str:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    return hear(process)


def hear(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def close(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
    process.communicate()


@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGVTALRM])
def test_shielded_rank_survives_the_first_request_and_what_it_starts_does_not(last: signal.Signals) -> None:
    process = start(RANK, {SHIELD_VARIABLE: "1"})
    try:
        assert hear(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert say(process) == f"{-signal.SIGTERM} {-signal.SIGTERM}"
        assert process.poll() is None
        process.send_signal(last)
        assert process.wait(100) == -last
    finally:
        close(process)


def test_other_ranks_end() -> None:
    process = start(RANK, {})
    try:
        assert hear(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == -signal.SIGTERM
    finally:
        close(process)


@pytest.mark.parametrize("is_shielded", [False, True])
def test_shielded_process_starts_with_the_signal_blocked(is_shielded: bool) -> None:
    process = start(BLOCKED, {SHIELD_VARIABLE: "1"} if is_shielded else {})
    try:
        assert hear(process) == str(is_shielded)
    finally:
        close(process)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize(("value", "expected"), [(None, signal.SIGTERM), ("1", signal.SIGVTALRM)])
def test_end_signal_is_one_that_the_process_obeys(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: signal.Signals
) -> None:
    if value is None:
        monkeypatch.delenv(SHIELD_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(SHIELD_VARIABLE, value)
    assert end_signal() is expected

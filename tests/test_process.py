from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from hetero.process import SignalWaiter, describe_exit_status, die_with_parent, limit_threads, thread_limits


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, "ended normally"),
        (1, "exited with 1"),
        (2, "exited with 2"),
        (34, "exited with 34 (HET-34): The data set's code failed on a data host."),
        (-signal.SIGTERM, "killed by SIGTERM"),
        (-signal.SIGKILL, "killed by SIGKILL, likely out of memory"),
        (-signal.SIGSEGV, "killed by SIGSEGV: a crash in native code"),
        (-63, "killed by signal 63"),
        (137, "exited with 137, as a shell reports SIGKILL"),
        (255, "exited with 255"),
    ],
)
def test_exit_status_is_described_in_one_line(status: int, expected: str) -> None:
    found = describe_exit_status(status)
    assert found.startswith(expected)
    assert "\n" not in found


def test_child_dies_with_its_parent() -> None:
    program = textwrap.dedent("""
        import os, sys, time
        from hetero.process import die_with_parent
        parent = os.getpid()
        if os.fork() == 0:
            die_with_parent(parent)
            print("ready", flush=True)
            time.sleep(600)
        sys.stdin.read()
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == ""  # the end of file means that the child is gone, too


def test_child_whose_parent_is_gone_already_ends() -> None:
    child = os.fork()
    if child == 0:
        die_with_parent(1 if os.getppid() != 1 else 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 32


def test_signal_waiter_reports_signals_and_restores() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with SignalWaiter((signal.SIGUSR2,)) as signals:
        assert signals.wait(0.0) == set()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.wait(30.0) == {signal.SIGUSR2}
        read_end, write_end = os.pipe()
        os.write(write_end, b"x")
        assert signals.wait(30.0, descriptors=(read_end,)) == set()
        os.close(read_end)
        os.close(write_end)
    assert signal.getsignal(signal.SIGUSR2) is before


def test_thread_limits_are_one() -> None:
    assert thread_limits()["OMP_NUM_THREADS"] == "1"
    limit_threads()


_LEAVES_AN_ORPHAN = """
import subprocess, sys
from hetero import process
process.adopt_descendants()
child = "from subprocess import *; print(Popen(['sleep', '60'], stdout=DEVNULL, start_new_session=True).pid)"
orphan = int(subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, check=True).stdout)
process.end_descendants()
try:
    process.os.kill(orphan, 0)
except ProcessLookupError:
    print("gone")
"""


def test_end_descendants_finds_an_orphan_in_a_session_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", _LEAVES_AN_ORPHAN], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "gone\n"

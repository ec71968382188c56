from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from hetero.system.cgroups import MemoryUse
from hetero.system.process import (
    SignalWaiter,
    describe_exit_status,
    die_with,
    die_with_parent,
    limit_threads,
    thread_limits,
)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, "ended normally"),
        (1, "exited with 1"),
        (2, "exited with 2"),
        (34, "exited with 34 (HET-34): The data set failed: its code raised, or its files cannot be read."),
        (-signal.SIGTERM, "killed by SIGTERM"),
        (-signal.SIGKILL, "killed by SIGKILL"),
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


@pytest.mark.fault("F10")
@pytest.mark.parametrize(
    ("limit_bytes", "is_own", "words"),
    [
        (2**31, True, " (peak of its control group: 1.5 GiB of 2.0 GiB allowed)"),
        (2**31, False, " (peak of a control group above its own: 1.5 GiB of 2.0 GiB allowed)"),
        (None, True, " (peak of its control group: 1.5 GiB)"),
    ],
)
def test_kill_is_described_with_the_figures_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None, is_own: bool, words: str
) -> None:
    use = MemoryUse(peak_bytes=3 * 2**29, limit_bytes=limit_bytes, is_own=is_own)
    monkeypatch.setattr("hetero.system.process.memory_use", lambda: use)
    monkeypatch.setattr("hetero.system.process._explained_kills", 3)
    monkeypatch.setattr("hetero.system.process.oom_kills", lambda: 5)
    assert describe_exit_status(-signal.SIGKILL) == f"killed by SIGKILL, likely out of memory{words}"
    monkeypatch.setattr("hetero.system.process.memory_use", lambda: None)
    assert describe_exit_status(-signal.SIGKILL) == "killed by SIGKILL, likely out of memory"


@pytest.mark.fault("F10")
def test_kill_is_a_lack_of_memory_only_if_the_kernel_has_counted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int | None] = [3, 4, 4, None]
    monkeypatch.setattr("hetero.system.process._explained_kills", 3)
    monkeypatch.setattr("hetero.system.process.oom_kills", lambda: counts.pop(0))
    found = [describe_exit_status(-signal.SIGKILL).partition(" (")[0] for _ in range(4)]
    assert found == [
        "killed by SIGKILL: the kernel counted no lack of memory here",
        "killed by SIGKILL, likely out of memory",
        "killed by SIGKILL: the kernel counted no lack of memory here",
        "killed by SIGKILL, by another process or out of memory",
    ]


def test_child_dies_with_its_parent() -> None:
    program = textwrap.dedent("""
        import os, sys, time
        from hetero.system.process import die_with_parent
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


def test_process_dies_with_an_ancestor_though_those_between_live() -> None:
    program = textwrap.dedent("""
        import os, sys, time
        from hetero.system.process import die_with
        ancestor = os.getpid()
        if os.fork() == 0:
            if os.fork() == 0:
                os.close(0)
                die_with(ancestor)
                print("ready", flush=True)
                time.sleep(600)
            os.close(1)
            os.wait()
            os._exit(0)
        os.read(0, 1)
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True, env=environment) as ancestor:
        assert ancestor.stdout is not None
        assert ancestor.stdout.readline() == "ready\n"
        ancestor.kill()
        assert ancestor.stdout.read() == ""


def test_process_that_is_to_die_with_one_that_is_gone_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    child = os.fork()
    if child == 0:
        die_with(gone.pid)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 32


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
        assert signals.wait(100.0) == {signal.SIGUSR2}
        read_end, write_end = os.pipe()
        os.write(write_end, b"x")
        assert signals.wait(100.0, descriptors=(read_end,)) == set()
        os.close(read_end)
        os.close(write_end)
    assert signal.getsignal(signal.SIGUSR2) is before


def test_thread_limits_are_one() -> None:
    assert thread_limits()["OMP_NUM_THREADS"] == "1"
    limit_threads()


_LEAVES_AN_ORPHAN = """
import subprocess, sys
from hetero.system import process
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


_REAPS = """
import os, subprocess, sys, time
from hetero.system import process
process.adopt_descendants()
own = process.start_child([sys.executable, "-c", "raise SystemExit(7)"])
# Its child's child ends after it, and so comes to this process.
subprocess.run([sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '0.2'])"], check=True)
deadline_s = time.monotonic() + 30
while time.monotonic() < deadline_s:
    time.sleep(0.05)
    if own.returncode is None and os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        process.reap_adopted()  # leaves the status of an own child to who waits for it
        assert own.wait() == 7
    process.reap_adopted()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        print("none left")
        break
"""


@pytest.mark.fault("F12")
def test_reap_adopted_takes_orphans_and_leaves_own_children() -> None:
    done = subprocess.run([sys.executable, "-c", _REAPS], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "none left\n"


_FEW_FILES = """
import resource, sys
from hetero.system import process
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
try:
    process.allow_descriptors(100)
except process.ResourcesError as error:
    print(int(error.exit_code), error)
else:
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.fault("F29")
def test_allow_descriptors_raises_the_soft_limit_or_names_the_hard_one() -> None:
    def run(hard: int) -> str:
        return subprocess.check_output([sys.executable, "-c", _FEW_FILES, str(hard)], text=True)

    assert run(512) == "(512, 512)\n"
    assert run(64).startswith("24 this process may open 64 files, it needs about 100")


_CANNOT_BE_KILLED = """
import logging, os, subprocess, sys
import psutil
from hetero.system import process
logging.basicConfig(stream=sys.stdout, format="%(message)s")
process.adopt_descendants()
child = subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
if sys.argv[1] == "root":
    os.setresuid(65534, 65534, 65534)  # and the child is root's
else:
    psutil.Process.kill = lambda self: None  # as if it waited for a device
polls = []
process.end_descendants(timeout_s=0.3, on_poll=lambda: polls.append(None))
print("goes on" if len(polls) > 1 else "did not say that it waits")
"""


@pytest.mark.parametrize("way", ["root", "device"])
def test_end_descendants_names_what_cannot_be_killed_and_goes_on(way: str) -> None:
    if way == "root" and os.geteuid() != 0:
        pytest.skip("needs root, to have a child of another user")
    command = [sys.executable, "-c", _CANNOT_BE_KILLED, way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            output = process.communicate(timeout=100.0)[0]
        finally:
            os.kill(pid, signal.SIGKILL)
            process.kill()
    assert f"not ended 0 s after SIGKILL: process {pid}; continuing without waiting for them\ngoes on\n" in output


def test_process_that_is_forked_while_signals_are_waited_for_has_the_default_actions() -> None:
    with SignalWaiter((signal.SIGTERM,)) as waiter:
        pid = os.fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert waiter.wait(0.0) == set()  # the signal was for another process
        os.kill(os.getpid(), signal.SIGTERM)
        assert waiter.wait(100.0) == {signal.SIGTERM}

"""What becomes of the launchers of a simulation that nothing ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.cluster import Role
from hetero.simulate.launchers import HostCommand, Launchers, SimulatedHost

_CANNOT_BE_KILLED = """
import functools, logging, subprocess, sys
from pathlib import Path
import psutil
from hetero.system import process
from hetero.cluster import Role
from hetero.simulate import launchers
logging.basicConfig(stream=sys.stdout, format="%(message)s")
launchers.END_TIMEOUT_S = 0.3
launchers.end_descendants = functools.partial(process.end_descendants, timeout_s=0.3)
psutil.Process.kill = subprocess.Popen.kill = lambda self: None  # as if it waited for a device
host = launchers.SimulatedHost(name="algo-1", group="g", role=Role.TRAINER, address="127.0.0.1", root=Path(sys.argv[1]))
with launchers.Launchers([host]) as running:
    child = process.start_child(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(child.pid, flush=True)
    running._processes["algo-1"] = child
    running._signals = 2
    print("exit code", running.wait(), flush=True)
print("ended", flush=True)
"""


def test_launcher_that_cannot_be_killed_is_named_and_not_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CANNOT_BE_KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            output = process.communicate(timeout=100.0)[0]
        finally:
            os.kill(pid, signal.SIGKILL)
            process.kill()
    assert f"not ended 0 s after SIGKILL: the launcher of algo-1 (process {pid}); continuing" in output
    assert f"exit code {128 + signal.SIGKILL}\n" in output
    assert output.endswith("ended\n")


@pytest.mark.parametrize(("status", "level"), [(143, "INFO"), (30, "ERROR")])
def test_launcher_that_ends_after_a_request_to_stop_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int, level: str
) -> None:
    host = SimulatedHost(name="algo-1", group="g", role=Role.TRAINER, address="127.0.0.1", root=tmp_path)
    # Not as a context manager, which would end the processes that other tests have left behind.
    running = Launchers([host])
    running._signals = 1
    running._processes["algo-1"] = process = subprocess.Popen(["sh", "-c", f"exit {status}"])
    process.wait()
    with caplog.at_level("INFO", logger="hetero"):
        assert running.wait() == status
    assert caplog.records[-1].levelname == level


@pytest.mark.fault("F27")
def test_log_of_a_host_on_a_full_disk_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    host = SimulatedHost(name="algo-1", group="g", role=Role.TRAINER, address="127.0.0.1", root=tmp_path)
    with Launchers([host]) as running:
        running.start(host, HostCommand(arguments=["seq", "3"], directory=tmp_path, environment={}))
        assert running.wait() == 0
    (message,) = [record.message for record in caplog.records]
    assert message == f"{tmp_path}/log.txt lacks lines: No space left on device; make room on its disk"

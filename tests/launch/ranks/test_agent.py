"""How the ranks of a host end, and what the agent writes about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from hetero.launch.ranks.agent import FAILURES_FILE, RANKS_FILE
from hetero.system.process import PARENT_VARIABLE
from tests.support.integration.harness import wait_gone

RUN = """
import sys
from hetero.launch.ranks import agent
agent.SETTLE_S, agent.END_TIMEOUT_S = (float(text) for text in sys.argv[1:3])
status = agent.main(sys.argv[3:])
heavy = {"tensorflow", "torch"} & {name.partition(".")[0] for name in sys.modules}
sys.exit(f"it imported {heavy}" if heavy else status)
"""
"""Runs `main` with times of the test's."""
LAUNCH = """
import os, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], env={**os.environ, "HETERO_PARENT_PID": str(os.getpid())})
"""
"""A process in the launcher's place."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the ranks of a host with a script, which finds its folder in its arguments."""
    started: list[subprocess.Popen[str]] = []

    def start_ranks(
        script: str,
        *,
        variables: Sequence[Mapping[str, str]] = ({"RANK": "0"}, {"RANK": "1"}),
        settle_s: float = 0.1,
        term_grace_s: float = 0.1,
        as_launcher: bool = False,
    ) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(script)
        (tmp_path / RANKS_FILE).write_text(json.dumps(variables))
        command = ["-c", RUN, str(settle_s), str(term_grace_s), str(tmp_path), str(path), str(tmp_path)]
        process = subprocess.Popen(
            [sys.executable, *(["-c", LAUNCH] if as_launcher else []), *command],
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_ranks
    for process in started:
        process.kill()  # its ranks die with it
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def failures(tmp_path: Path) -> list[tuple[int, int]]:
    """Return which ranks failed, and how, in order."""
    return [(found["rank"], found["exit_status"]) for found in json.loads((tmp_path / FAILURES_FILE).read_text())]


def wait_for(paths: list[Path]) -> None:
    """Wait until files are there."""
    deadline_s = time.monotonic() + 30.0
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline_s, f"never came: {[path.name for path in paths if not path.exists()]}"
        time.sleep(0.01)


TELLS = """
import json, os, sys
from pathlib import Path
heavy = [name for name in ("tensorflow", "torch") if name in sys.modules]
found = {"own": os.environ["OWN"], "all": os.environ["ALL"], "arguments": sys.argv[1:], "heavy": heavy}
(Path(sys.argv[1]) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


def test_each_rank_gets_its_variables_and_nothing_imports_a_framework(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL", "of the launcher")
    process = start(TELLS, variables=[{"RANK": "2", "OWN": "a"}, {"RANK": "3", "OWN": "b"}])
    assert process.wait(100.0) == 0, process.stderr.read()
    assert not (tmp_path / FAILURES_FILE).exists()
    for rank, own in ((2, "a"), (3, "b")):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found == {"own": own, "all": "of the launcher", "arguments": [str(tmp_path)], "heavy": []}


SECOND_FAILS_FIRST = """
import os, sys, time
from pathlib import Path
pid = Path(sys.argv[1]) / "pid"
if os.environ["RANK"] == "1":
    pid.with_suffix(".partial").write_text(str(os.getpid()))
    pid.with_suffix(".partial").rename(pid)
    os._exit(7)
while not pid.exists():
    time.sleep(0.01)
while Path("/proc", pid.read_text()).exists():  # until its end was noticed
    time.sleep(0.01)
raise RuntimeError("on purpose")
"""


def test_failures_are_told_in_order_of_time(start: Start, tmp_path: Path) -> None:
    # The settling ends with the last rank.
    process = start(SECOND_FAILS_FIRST, settle_s=30.0, term_grace_s=30.0)
    assert process.wait(100.0) == 1
    assert failures(tmp_path) == [(1, 7), (0, 30)]


THIRD_FAILS = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def end(*_):
    (folder / "asked").touch()
    os._exit(9)
if os.environ["RANK"] == "2":
    while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
        time.sleep(0.01)
    os._exit(3)
signal.signal(signal.SIGTERM, end if os.environ["RANK"] == "0" else signal.SIG_IGN)
(folder / f"pid-{os.getpid()}").touch()
(folder / f"ready-{os.environ['RANK']}").touch()
time.sleep(600)
"""


def test_rank_that_fails_ends_the_others_also_one_that_ignores_sigterm(start: Start, tmp_path: Path) -> None:
    process = start(THIRD_FAILS, variables=[{"RANK": str(rank)} for rank in range(3)], term_grace_s=1.0)
    wait_for([tmp_path / "ready-0", tmp_path / "ready-1"])
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert process.wait(100.0) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert (tmp_path / "asked").exists(), "it was not given the time to end"
    assert failures(tmp_path) == [(2, 3)]  # the others are ended because of it


WAITS = """
import os, sys, time
from pathlib import Path
(Path(sys.argv[1]) / f"pid-{os.getpid()}").touch()
(Path(sys.argv[1]) / f"ready-{os.environ['RANK']}").touch()
time.sleep(600)
"""


def test_ranks_die_with_the_launcher(start: Start, tmp_path: Path) -> None:
    launcher = start(WAITS, as_launcher=True)
    wait_for([tmp_path / "ready-0", tmp_path / "ready-1"])
    left = psutil.Process(launcher.pid).children(recursive=True)
    assert {int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")} < {each.pid for each in left}
    launcher.kill()
    launcher.wait()
    wait_gone(left)

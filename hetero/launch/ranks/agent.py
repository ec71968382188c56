"""The agent: starts the ranks of one host, ends them when one fails, and writes to a file how they failed.

The agent is a process between the launcher and the ranks, and needs no framework. Usage:
``python -m hetero.launch.ranks.agent FOLDER SCRIPT ARGUMENTS...``. The launcher writes `RANKS_FILE` into FOLDER before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero.system.process import PARENT_VARIABLE, die_with_parent
from hetero.system.stop_signals import end_signal
from hetero.system.waits import END_TIMEOUT_S, SHORT_POLL_S

__all__ = ["FAILURES_FILE", "RANKS_FILE", "SETTLE_S", "main"]

RANKS_FILE = "ranks.json"
"""Name of the file with a JSON list: the environment variables to set for each rank, in the order of local ranks."""
FAILURES_FILE = "failures.json"
"""Name of the file that the agent writes if ranks fail. It has a JSON list of objects with ``rank`` and
``exit_status``, in order of time."""
SETTLE_S = 0.3
"""Seconds from the first failure until the other ranks end and the failure is reported. A failing rank may break its
connections before its process ends, because it closes its GPU in between. Another rank may then end first, but both
must be recorded."""

_Failure = dict[str, int]


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of this host. Return 0 if all ended with 0, else write the failures to a file and return 1."""
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    folder, *script = arguments
    all_variables = json.loads(Path(folder, RANKS_FILE).read_text(encoding="utf-8"))
    # The ranks are children of this process, and must end when it ends.
    environ = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    running = {int(variables["RANK"]): _start(script, {**environ, **variables}) for variables in all_variables}
    failures: list[_Failure] = []
    while running and not failures:
        # Wait until a rank has ended. WNOWAIT leaves its status for `Popen.poll`, which tells which rank it was.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        failures = _remove_ended(running)
    if not failures:
        return 0
    failures += _wait_for_ends(running, SETTLE_S)
    # Record no later failures, because this agent causes them when it ends the remaining ranks.
    Path(folder, FAILURES_FILE).write_text(json.dumps(failures), encoding="utf-8")
    for process in running.values():
        # Send the signal to the rank alone, not to its group. Python's resource trackers in the group must outlive the
        # rank, because they remove its semaphores.
        process.send_signal(end_signal())
    # The signal ends a rank by default. A rank that handles the signal gets `END_TIMEOUT_S` seconds to end.
    _wait_for_ends(running, END_TIMEOUT_S)
    for process in running.values():
        process.kill()
    _wait_for_ends(running, END_TIMEOUT_S)
    return 1


def _start(script: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank, a process that runs the script with an environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "hetero.launch.ranks.rank", *script],
        env=environ,
        # A signal to a rank's group then reaches no other rank.
        start_new_session=True,
    )


def _wait_for_ends(running: dict[int, subprocess.Popen[bytes]], timeout_s: float) -> list[_Failure]:
    """Wait until all ranks have ended or the time is over. Return the failures during the wait, in order of time."""
    failures: list[_Failure] = []
    deadline_s = time.monotonic() + timeout_s
    while True:
        failures += _remove_ended(running)
        if not running or time.monotonic() >= deadline_s:
            return failures
        time.sleep(SHORT_POLL_S)


def _remove_ended(running: dict[int, subprocess.Popen[bytes]]) -> list[_Failure]:
    """Remove ranks that have ended from ``running``, and return the failures among them."""
    ended = {rank: process for rank, process in running.items() if process.poll() is not None}
    for rank in ended:
        del running[rank]
    return [
        {"rank": rank, "exit_status": process.returncode} for rank, process in ended.items() if process.returncode != 0
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

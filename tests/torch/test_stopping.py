"""The end of scripts without a launcher whose loader workers get SIGTERM too, are lost, or are still alive."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import multiprocessing, os, signal, sys, time
import hetero
from hetero.torch import DataLoader

class Numbers:
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if sys.argv[1] == "lost":
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        return index

def sleep(is_here):
    is_here.set()
    time.sleep(600)

if __name__ == "__main__":
    hetero.on_stop(lambda: print("saved", flush=True))
    is_here = multiprocessing.Event()
    child = multiprocessing.Process(target=sleep, args=(is_here,))
    child.start()
    is_here.wait()
    child.terminate()
    child.join()
    for number, batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=2)):
        print(number, flush=True)
        sys.stdin.readline()
"""

ALIVE = """
import collections, itertools, multiprocessing, os, signal, sys
import hetero
from hetero.torch import DataLoader

class Numbers:
    def __init__(self, stuck_at=None):
        self.stuck_at = stuck_at

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == self.stuck_at:
            collections.deque(itertools.count(), maxlen=0)  # native code that runs until the worker is killed
        return index

def train():
    global alive
    hetero.on_stop(lambda: print("saved", flush=True))
    ended = DataLoader(Numbers(), num_workers=1, persistent_workers=True)
    stuck = iter(DataLoader(Numbers(stuck_at=1), num_workers=1, prefetch_factor=1))
    spawned = iter(DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"))
    alive = [ended, stuck, spawned]
    print(len(list(ended)), next(stuck), next(spawned), flush=True)

if __name__ == "__main__":
    if sys.argv[1] == "child":
        child = multiprocessing.get_context("fork").Process(target=train)
        child.start()
        child.join()
        sys.exit(child.exitcode)
    train()
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGTERM)
        next(alive[2])
    elif sys.argv[1] == "raised":
        raise SystemExit(3)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    """Start a script, given as text, in another session. Kill what is left of it at the end."""
    with contextlib.ExitStack() as stack:

        def start(text: str, case: str) -> subprocess.Popen[str]:
            script = tmp_path / "script.py"
            script.write_text(text)
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), case],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            stack.callback(_kill_session, process)
            return process

        yield start


def _kill_session(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.fault("F12")
@pytest.mark.parametrize("case", ["group", "lost"])
def test_stop_callbacks_run_although_workers_get_the_signal_or_are_lost(
    start: Callable[[str, str], subprocess.Popen[str]], case: str
) -> None:
    process = start(SCRIPT, case)
    assert process.stdout is not None
    assert process.stdin is not None
    if case == "group":
        assert process.stdout.readline() == "0\n"
        workers = psutil.Process(process.pid).children()
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for number in range(1, 20):  # more than the workers had ready
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{number}\n"
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate("\n", timeout=300)
    assert (output, process.returncode) == ("saved\n", 143)


@pytest.mark.parametrize(
    ("case", "words", "status"), [("stopped", "saved\n", 143), ("raised", "", 3), ("child", "", 0)]
)
def test_process_ends_although_workers_are_alive_at_its_exit(
    start: Callable[[str, str], subprocess.Popen[str]], case: str, words: str, status: int
) -> None:
    process = start(ALIVE, case)
    output, errors = process.communicate(timeout=300)
    assert (output, errors, process.returncode) == (f"4 tensor([0]) tensor([0])\n{words}", "", status)

"""A script without a launcher that SIGTERM stops: its loader workers get the signal too, or are lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
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


@pytest.mark.fault("F12")
@pytest.mark.parametrize("case", ["group", "lost"])
def test_stop_callbacks_run_although_workers_get_the_signal_or_are_lost(tmp_path: Path, case: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), case],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
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
            output, _ = process.communicate("\n", timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (output, process.returncode) == ("saved\n", 143)

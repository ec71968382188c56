"""`hetero launch --platform ray`, as a process."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support.ray.harness import PATIENCE_S, wait_until

CHAIN = Path(__file__).parents[2] / "integration" / "scripts" / "chain.py"
OPTIONS = ["--endpoints-per-host", "1", "--trainer-endpoints", "0", "--nproc-per-node", "1"]
TWO = ["--group", "trainer=GPU:1:1", "--group", "data=CPU:1:1"]


class Driver:
    """The command, running."""

    def __init__(self, address: str, folder: Path, *words: str, script: Path, args: Sequence[str] = ()) -> None:
        self.folder = folder
        (folder / "out").mkdir(exist_ok=True)
        environ = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(CHAIN.parents[3])}
        command = [sys.executable, "-m", "hetero.cli", "launch", "--platform", "ray", *words, *OPTIONS]
        command += ["--output-dir", str(folder / "report"), str(script), "--", *args]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while text not in self.output:
            assert time.monotonic() < deadline_s, self.output[-5000:]
            assert self.process.poll() is None, self.output[-5000:]
            time.sleep(0.1)

    def actor_of(self, host: str) -> psutil.Process:
        """Return the process of the actor that runs the launcher of a host."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_ours = any(str(self.folder / "out") in word for word in words)
                if is_ours and f"--host={host}" in words:
                    return process.parent()  # type: ignore[return-value]
        raise AssertionError(f"{host} has no launcher")

    def check_nothing_is_left(self, host_folders: Path, *, num_killed: int = 0) -> None:
        """Check that all launchers have ended, and that only actors that were killed have left their folder."""
        wait_until(lambda: not self._launchers(), "launchers are left")
        pattern = "hetero-ray-*"
        wait_until(lambda: len(list(host_folders.glob(pattern))) <= num_killed, "folders are left")
        left = list(host_folders.glob(pattern))
        assert len(left) == num_killed
        for folder in left:
            shutil.rmtree(folder)

    def _launchers(self) -> list[list[str]]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if any(str(self.folder / "out") in word for word in words) and process.pid != self.process.pid:
                    found.append(words)
        return found

"""Runs of an example's commands in a folder of their own: to the end, or until a step."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ExampleRuns"]

ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"epoch \d+ step \d+ (?:loss|validation accuracy) .*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRuns:
    """The commands of an example's README, with other options, in one folder."""

    name: str
    """Folder of the example."""
    folder: Path
    """Folder that the commands start in."""
    options: tuple[str, ...]
    """Options of ``train.py``."""

    def make_data(self, *options: str, patterns: tuple[str, ...]) -> None:
        """Make the data and the index of each pattern."""
        self._run(str(self.script.with_name("make_data.py")), *options)
        for pattern in patterns:
            self._run("-m", "hetero", "index", pattern)

    def alone(self, *options: str) -> list[str]:
        """Run the script alone, and return its lines about losses."""
        return self._run(str(self.script), *self.options, *options)

    def simulated_until(self, step: int, *options: str) -> list[str]:
        """Run the script as a job with two data hosts, and ask it to stop at a step.

        Return its lines about losses, which end at this step or later.
        """
        process = self._start(*self._simulate(), *self.options, *options)
        output = []
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                output.append(line)
                if f" step {step} loss " in line:
                    process.send_signal(signal.SIGTERM)
        assert process.returncode == 128 + signal.SIGTERM, "".join(output)
        return _LINE.findall("".join(output))

    @property
    def script(self) -> Path:
        """The training script."""
        return ROOT / "examples" / self.name / "train.py"

    def _simulate(self) -> list[str]:
        groups = ["--group", "data_group=ml.c5.9xlarge:2", "--group", "dnn_group=ml.p3.2xlarge:1"]
        return ["-m", "hetero", "simulate", *groups, "--endpoints-per-host", "1", str(self.script)]

    def _run(self, *arguments: str) -> list[str]:
        with self._start(*arguments) as process:
            output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        return _LINE.findall(output)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

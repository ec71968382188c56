"""The example of the guide."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray"


@pytest.mark.parametrize("runs", [("3",), pytest.param(("1", "3"), marks=pytest.mark.long)])
def test_example_trains_and_continues(cluster: Any, runs: tuple[str, ...], tmp_path: Path) -> None:
    found: list[int] = []
    for epochs in runs:
        environ = {
            **os.environ,
            "RAY_ADDRESS": cluster.get_runtime_context().gcs_address,
            "STORAGE": str(tmp_path),
            "RUN": "squares",
            "EPOCHS": epochs,
        }
        command = [sys.executable, "train.py"]
        done = subprocess.run(
            command, cwd=EXAMPLE, env=environ, capture_output=True, text=True, timeout=1400, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed = r"RayTrainWorker pid=[^)]*\)(?:\x1b\[0m)? {'loss': [^,]+, 'epoch': (\d)}"
        found += map(int, re.findall(printed, done.stdout))
        result = next(line for line in done.stdout.splitlines() if line.startswith("result: "))
        assert f"'epoch': {int(epochs) - 1}" in result
    assert found == [0, 1, 2]


def test_example_has_as_many_new_lines_as_the_guide_says() -> None:
    lines = (EXAMPLE / "train.py").read_text(encoding="utf-8").splitlines()
    assert sum("# hetero" in line for line in lines) == 7

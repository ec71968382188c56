"""The example of the guide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray"


def test_example_trains(cluster: Any, tmp_path: Path) -> None:
    environ = {**os.environ, "RAY_ADDRESS": cluster.get_runtime_context().gcs_address, "STORAGE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=EXAMPLE, env=environ, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = next(line for line in done.stdout.splitlines() if line.startswith("result: "))
    assert "'epoch': 2" in result


def test_example_has_as_many_new_lines_as_the_guide_says() -> None:
    lines = (EXAMPLE / "train.py").read_text(encoding="utf-8").splitlines()
    assert sum("# hetero" in line for line in lines) == 7

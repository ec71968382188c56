"""Jobs of the script arrays.py, which need neither torch nor TensorFlow, and the same run without a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.integration.harness import CHAIN

__all__ = ["ARRAYS", "WITHOUT_TORCH", "check_fed_as_alone"]

ARRAYS = CHAIN.with_name("arrays.py")
WITHOUT_TORCH = ["--framework", "tensorflow"]
"""Ranks that torchrun does not start. Nothing of TensorFlow is imported for them either."""


def check_fed_as_alone(folder: Path, *, num_samples: int = 101, num_ranks: int = 1) -> None:
    """Expect that every rank that wrote into a folder got the batches that it gets without launchers and data hosts."""
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]
    steps = [result["steps"] for result in results]
    assert min(steps) > 0
    with tempfile.TemporaryDirectory() as own:
        command = [sys.executable, str(ARRAYS), "--output", own, "--num-samples", str(num_samples)]
        command += ["--alone", *map(str, steps)]
        environ = {**os.environ, "PYTHONPATH": str(CHAIN.parents[3])}
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
        assert [result["chain"] for result in results] == json.loads((Path(own) / "alone.json").read_text())

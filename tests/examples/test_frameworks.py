"""The scripts for accelerate, Lightning and Hugging Face's Trainer, alone as a user would start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
SHORT = ["--epochs", "2", "--rounds", "1"]


def run(name: str, folder: Path, *arguments: str) -> str:
    """Run a script in a folder of its own; return what it printed."""
    process = subprocess.run(
        [sys.executable, str(FOLDER / name), *SHORT, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_accelerate_learns_and_counts_every_sample_once(tmp_path: Path) -> None:
    counts = re.findall(r"accuracy (\d+)/(\d+)", run("with_accelerate.py", tmp_path))
    assert [total for _, total in counts] == ["179", "179"]
    assert int(counts[-1][0]) > 150


def test_lightning_learns_and_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = re.findall(r"epoch (\d) accuracy ([\d.]+)", run("with_lightning.py", tmp_path, "--checkpoints", "kept"))
    assert [epoch for epoch, _ in whole] == ["0", "1"]
    assert float(whole[-1][1]) > 0.85
    (middle,) = (tmp_path / "kept").glob("*step=70.ckpt")
    output = run("with_lightning.py", tmp_path, "--resume", str(middle))
    assert re.findall(r"epoch (\d) accuracy ([\d.]+)", output) == whole[1:]


def test_trainer_learns_and_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    whole = re.findall(r"'eval_loss': '([\d.]+)'.*'eval_samples': 179", run("with_trainer.py", tmp_path))
    assert len(whole) == 2
    assert float(whole[1]) < float(whole[0])
    checkpoint = tmp_path / "runs" / "trainer-checkpoints" / "checkpoint-70"
    output = run("with_trainer.py", tmp_path, "--resume", str(checkpoint))
    assert re.findall(r"'eval_loss': '([\d.]+)'.*'eval_samples': 179", output) == whole[1:]

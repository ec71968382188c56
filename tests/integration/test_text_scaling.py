"""The script of the distributed-training study as a job: data hosts tokenise, ranks log what all of them found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.integration.harness import Start

pytest.importorskip("transformers")

TRAIN = Path(__file__).parents[2] / "examples" / "text_scaling" / "train.py"
FLAGS = ["--samples", "160", "--validation-samples", "50", "--epochs", "1", "--batch-size", "12", "--validations", "2"]


def test_loss_is_the_same_with_data_hosts_that_tokenise(start: Start, tmp_path: Path) -> None:
    found, losses = [], []
    for name, groups in (("homogeneous", ()), ("heterogeneous", ("--group=data_group=ml.c5.xlarge:1",))):
        command = [sys.executable, "-m", "hetero.cli", "simulate", *groups, "--group=dnn_group=ml.p3.2xlarge:1"]
        command += ["--nproc-per-node=2", "--output-dir", str(tmp_path / name), str(TRAIN), *FLAGS]
        job = start(command, tmp_path, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        assert job.wait(300.0) == 0, job.output
        document = json.loads((tmp_path / name / "report.json").read_text(encoding="utf-8"))
        metrics = document["run"]["metrics"]
        assert {metric["rank"] for metric in metrics} == {0}
        found.append([(metric["name"], metric["step"], metric["value"]) for metric in metrics])
        losses.append(re.findall(r"step (\d) of 6: loss (\d\.\d{6}),", job.output))
    assert [(name, step) for name, step, _ in found[0]] == [
        *(("f1", 3), ("accuracy", 3)),
        *(("f1", 6), ("accuracy", 6)),  # 144 training samples, 24 of them in a step
    ]
    assert found[0] == found[1]
    # After six steps the model may predict one class for all texts. The loss depends on every token.
    assert [step for step, _ in losses[0]] == ["3", "6"]
    assert losses[0] == losses[1]
    accuracies = [value for name, _, value in found[0] if name == "accuracy"]
    assert all(round(50 * value, 6).is_integer() for value in accuracies)  # each of 50 samples counted once

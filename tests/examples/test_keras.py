from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install 'tensorflow>=2.16'"
    ),
    pytest.mark.timeout(800),  # every process that fetches imports it
]

Script = Callable[[str], ModuleType]
FLAGS = ["--rounds=0", "--epochs=1", "--batch-size=128", "--log-every=1", "--num-workers=1"]


def accuracy(output: str) -> float:
    """Return what a run says at its end, after 36 steps that all said their loss."""
    assert len(re.findall(r"^step \d+ mean loss of the epoch \d+\.\d+$", output, re.MULTILINE)) == 36, output
    found = re.search(r"^step 36 validation accuracy (\S+)$", output, re.MULTILINE)
    assert found, output
    return float(found[1])


@pytest.mark.long
def test_digits_with_keras_alone_are_learnt(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script("keras/train_homogeneous.py").main(FLAGS)
    assert accuracy(capsys.readouterr().out) > 0.8


def test_digits_with_hetero_are_learnt(script: Script) -> None:
    """As a program of its own: the processes that fetch import it."""
    path = str(Path(str(script("keras/train.py").__file__)))
    done = subprocess.run([sys.executable, path, *FLAGS], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 0.8


@pytest.mark.parametrize("name", ["train", "train_homogeneous"])
def test_batches_are_of_other_digits_after_an_epoch(script: Script, name: str) -> None:
    module = script(f"keras/{name}.py")
    train, validation = (module.DigitBatches(split, 64, 1) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (71, 8)
    images, labels = train[70]
    assert (images.shape, images.dtype, labels.shape) == ((20, 28, 28, 1), np.uint8, (20,))
    before = [dataset.indexes.copy() for dataset in (train, validation)]
    for dataset in (train, validation):
        dataset.on_epoch_end()
    assert not np.array_equal(train.indexes, before[0])
    assert np.array_equal(validation.indexes, before[1])
    assert np.array_equal(validation[0][0], validation[0][0])

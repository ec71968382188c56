"""Samples in memory do not outlive the processes that have kept them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import numpy as np
import torch
import hetero
from hetero.torch import DataLoader

class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def load(self, index):
        return np.full((100, 100), index, np.uint8)
    def augment(self, sample):
        return torch.from_numpy(sample)

@hetero.dataset(cache="20 MB")
def exit_test_photos():
    return Photos()

if __name__ == "__main__":
    method, persistent, ending = sys.argv[1:]
    options = {"num_workers": 2, "persistent_workers": persistent == "persistent", "multiprocessing_context": method}
    loader = DataLoader(exit_test_photos(), batch_size=8, **({} if method == "none" else options))
    for _ in range(2):
        assert len(list(loader)) == 8
    if ending == "error":
        raise LookupError("on purpose")
"""


@pytest.mark.parametrize(
    ("method", "persistent", "ending"),
    [  # a process that loads itself, then the ends of loader workers
        ("none", "", "end"),
        ("fork", "persistent", "error"),
        pytest.param("none", "", "error", marks=pytest.mark.long),
        pytest.param("fork", "", "end", marks=pytest.mark.long),
        pytest.param("fork", "", "error", marks=pytest.mark.long),
        pytest.param("fork", "persistent", "end", marks=pytest.mark.long),
        pytest.param("spawn", "persistent", "end", marks=pytest.mark.long),
        pytest.param("spawn", "persistent", "error", marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_in_memory(tmp_path: Path, method: str, persistent: str, ending: str) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), method, persistent, ending]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == (ending == "error"), done.stderr
    assert not Path(f"/dev/shm/hetero-cache-{os.geteuid()}/data-exit_test_photos").exists()

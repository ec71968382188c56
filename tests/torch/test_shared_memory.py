"""Shared memory that is too small for torch's workers: told before the first batch, with the numbers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

from hetero.errors import ExitCode, ResourcesError
from hetero.torch import DataLoader, shared_memory


class Large(torch.utils.data.Dataset[Any]):
    """Samples of 64 KiB."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64, 256), float(index))


@dataclasses.dataclass
class Parts:
    one: torch.Tensor
    other: Any


def test_shared_bytes_counts_storages_once_wherever_they_are() -> None:
    tensor = torch.zeros(100)
    batch = {"a": tensor, "b": [tensor[:10], Parts(torch.zeros(5), (torch.zeros(2), "text"))], "c": np.zeros(1000)}
    assert shared_memory.shared_bytes(batch) == (428, 428)
    assert shared_memory.shared_bytes(tensor.share_memory_()) == (400, 0)
    assert shared_memory.shared_bytes("text") == (0, 0)


def test_shared_bytes_of_parts_that_point_at_each_other() -> None:
    parent = Parts(torch.zeros(5), None)
    parent.other = [Parts(torch.zeros(2), parent), 3]
    assert shared_memory.shared_bytes([parent, parent]) == (28, 28)


def fill(num_mib: float, monkeypatch: pytest.MonkeyPatch, *, free_mib: float = 64.0) -> None:
    """Have this process, and what it forks, find shared memory of a size."""
    facts = SimpleNamespace(f_blocks=int(num_mib * 256), f_bavail=int(free_mib * 256), f_frsize=4096)
    fake = SimpleNamespace(statvfs=lambda _: facts)
    monkeypatch.setattr(shared_memory, "os", fake)


@pytest.mark.fault("F28")
def test_batches_that_cannot_fit_are_told_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(1.0, monkeypatch)
    loader = DataLoader(Large(), batch_size=4, num_workers=2, prefetch_factor=3, multiprocessing_context="fork")
    with pytest.raises(ResourcesError) as caught:
        next(iter(loader))
    assert caught.value.exit_code is ExitCode.RESOURCES
    text = str(caught.value)
    assert "/dev/shm) is too small for the batches of 2 workers: 1.00 MiB" in text
    assert "1.50 MiB: 6 batches that wait for the trainer, of 0.25 MiB each" in text
    for word in ("--shm-size", "--ipc=host", "num_workers", "prefetch_factor", "sharing strategies"):
        assert word in text
    assert len(text.splitlines()[0]) <= 120


@pytest.mark.fault("F28")
@pytest.mark.parametrize(
    ("num_mib", "options"),
    [
        (1.5, {"num_workers": 2, "prefetch_factor": 3}),  # six batches of 0.25 MiB just fit
        (1.0, {"num_workers": 2, "prefetch_factor": 2}),
        (1.0, {"num_workers": 0}),
        (0.0, {"num_workers": 2}),  # a file system that does not say
    ],
)
def test_batches_that_may_fit_are_delivered(
    num_mib: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(num_mib, monkeypatch)
    context = "fork" if options["num_workers"] else None
    loader = DataLoader(Large(), batch_size=4, multiprocessing_context=context, **options)
    for _ in range(2):
        assert [int(batch[0, 0, 0]) for batch in loader] == list(range(0, 64, 4))


@pytest.mark.fault("F28")
def test_epoch_of_few_batches_needs_room_for_these_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(0.5, monkeypatch)
    loader = DataLoader(Large(), batch_size=32, num_workers=2, prefetch_factor=3, multiprocessing_context="fork")
    with pytest.raises(ResourcesError, match=r"4\.00 MiB: 2 batches"):
        next(iter(loader))
    fill(4.0, monkeypatch)
    assert len(list(loader)) == 2


@pytest.mark.fault("F28")
@pytest.mark.parametrize("own_collation", [False, True])
def test_batch_that_does_not_fit_any_more_is_told_where_torch_would_hang(
    own_collation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(64.0, monkeypatch, free_mib=0.1)
    collate = torch.stack if own_collation else None  # torch's own puts its tensors there in the first place
    loader = DataLoader(Large(), batch_size=4, num_workers=1, collate_fn=collate, multiprocessing_context="fork")
    if own_collation:
        with pytest.raises(ResourcesError, match=r"is full: 64\.00 MiB, 0\.10 MiB free, and the next .* 0\.25 MiB"):
            next(iter(loader))
    else:
        assert len(list(loader)) == 16


_SMALL = """
from hetero.errors import ResourcesError
from hetero.torch import DataLoader
from tests.torch.test_shared_memory import Large
for batch_size in (1, 4):
    try:
        loader = DataLoader(Large(), batch_size=batch_size, num_workers=2, prefetch_factor=4)
        print(sum(1 for _ in loader))
    except ResourcesError as error:
        print(error)
try:
    kept = list(DataLoader(Large(), num_workers=2, prefetch_factor=1))
except ResourcesError as error:
    print(error)
"""


@pytest.mark.fault("F28")
@pytest.mark.netns
def test_batches_in_a_real_file_system_of_one_mebibyte(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SMALL)
    mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    command = ["unshare", "-m", "bash", "-c", mount, "-", sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("needs a mount namespace: root")
    lines = done.stdout.splitlines()
    assert lines[0] == "64", done.stderr
    # One worker may find the place full of the other's first batches before it can tell that there would be too many.
    errors = [line for line in lines if line.startswith("shared memory (/dev/shm) is ")]
    assert len(errors) == 2
    assert "too small for the batches of 2 workers: 1.00 MiB" in errors[0] or "full: 1.00 MiB, 0." in errors[0]
    assert "full: 1.00 MiB, 0." in errors[1]  # of batches that are kept, and torch's own collation notices

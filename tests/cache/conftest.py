from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero import datasets
from hetero.batches.seeds import preserved_generators
from hetero.cache import folders, tiers
from hetero.cache.loads import COUNTS


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Give each test an empty registry, counts from 0, and a folder in place of ``/dev/shm``."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(folders, "MEMORY", path)
    monkeypatch.setattr(tiers, "MEMORY", path)
    for name in ("_FREE_SHARE_OF_MEMORY", "_FREE_SHARE_OF_DISK"):
        monkeypatch.setattr(tiers, name, 0.0)
    monkeypatch.setattr(datasets, "_factories", {})
    for name in COUNTS:
        COUNTS[name] = 0
    with preserved_generators():
        yield path
    tiers.close_tiers()
    shutil.rmtree(path)

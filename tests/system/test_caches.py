"""The caches of the CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.decide.canary.conducting import level_2_bytes


def cache(folder: Path, cpu: int, index: int, level: str, size: str, shared: str) -> None:
    path = folder / f"cpu{cpu}" / "cache" / f"index{index}"
    path.mkdir(parents=True)
    for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
        (path / name).write_text(f"{text}\n")


def test_level_2_caches_of_all_cpus_are_added_once(tmp_path: Path) -> None:
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2")):
        cache(tmp_path, cpu, 0, "1", "48K", str(cpu))
        cache(tmp_path, cpu, 2, "2", "2048K" if cpu < 2 else "1M", shared)
        cache(tmp_path, cpu, 3, "3", "480M", "0-2")
    assert level_2_bytes(tmp_path) == 3 * 2**20


@pytest.mark.parametrize("size", ["", "large", None])
def test_unknown_sizes_are_none(tmp_path: Path, size: str | None) -> None:
    if size is not None:
        cache(tmp_path, 0, 2, "2", size, "0")
    assert level_2_bytes(tmp_path) is None

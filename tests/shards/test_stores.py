"""Shards of a store: read in few requests, copied once for all processes of a host, and compared with the index."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hetero import cli, shards
from hetero.errors import ConfigError
from hetero.shards import copies
from hetero.shards.stores import facts_of
from tests.support.shards import FORMATS, row, write_shards

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
pytest.importorskip("zstandard")

from tests.support.counted_store import LOG, CountedFileSystem, register  # noqa: E402


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Register the store, and return the file of its requests."""
    register()
    monkeypatch.setenv(LOG, str(tmp_path / "requests"))
    return tmp_path / "requests"


def plain(sample: dict[str, Any]) -> Any:
    import json

    return json.loads(sample["json"]) if "__key__" in sample else sample


def made(folder: Path, ending: str, **options: Any) -> Any:
    """Return the rows of indexed shards in the store."""
    write_shards(folder / "data", ending, [40, 30, 30])
    # The command has processes of its own, which do not know the store. They read the same files by their paths.
    assert cli.main(["index", str(folder / "data" / f"*.{ending}"), "--processes=1"]) == 0
    make = getattr(shards, ending.partition(".")[0])
    return make(f"counted://{folder}/data/*.{ending}", scratch=folder / "scratch", **options)


@pytest.mark.parametrize("ending", FORMATS)
def test_rows_of_a_store_are_those_of_the_files(tmp_path: Path, ending: str, store: Path) -> None:
    rows = made(tmp_path, ending)
    assert [plain(rows[number]) for number in range(100)] == [row(number) for number in range(100)]
    requests = store.read_text().splitlines()
    assert sum(request.startswith("list") for request in requests) == 1
    # Each byte was read once.
    read = sum(int(request.split()[1]) for request in requests if request.startswith("get"))
    assert read == sum(path.stat().st_size for path in (tmp_path / "data").glob("shard*"))


def test_processes_of_a_host_share_a_copy(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_PIECE_BYTES", 512)
    rows = made(tmp_path, "parquet")
    children = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            os._exit(0 if [rows[number] for number in range(100)] == [row(number) for number in range(100)] else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    requests = store.read_text().splitlines()
    read = sum(int(request.split()[1]) for request in requests if request.startswith("get"))
    assert read == sum(path.stat().st_size for path in (tmp_path / "data").glob("shard*"))


def test_changed_shard_of_a_store_is_refused(tmp_path: Path) -> None:
    rows = made(tmp_path, "jsonl")
    shard = tmp_path / "data" / "shard-001.jsonl"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(ConfigError, match="shard-001.jsonl has changed since it was indexed: it has .* bytes"):
        rows[40]
    shard.write_bytes(content[:-10] + b"x" * 10)
    with pytest.raises(ConfigError, match="shard-001.jsonl has changed .* other bytes at its ends"):
        rows[40]
    shard.write_bytes(content)
    assert rows[40] == row(40)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.zst"])
def test_wait_for_a_shard_is_told_from_computing_and_measured_again_without_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr("hetero.shards.rows.SHARD_WAITS_S", waits_s := defaultdict(float))
    monkeypatch.setattr(CountedFileSystem, "delay_s", 0.02)
    rows = made(tmp_path, ending).map(lambda row: (time.sleep(0.2), row)[1])
    urls = [f"counted://{tmp_path}/data/shard-00{number}.{ending}" for number in range(2)]
    assert [rows[number] for number in (0, 41, 1)] == [row(0), row(41), row(1)]
    # What the user's function waits for is not the shard's.
    assert list(waits_s) == urls
    assert all(0.015 < wait_s < 0.2 for wait_s in waits_s.values())
    wait_s, num_bytes = rows.hetero_read_cold(60.0)
    size = sum(path.stat().st_size for path in (tmp_path / "data").glob("shard*"))
    assert 0.3 < wait_s / (3 * 0.02 / 100) < 10  # what waits for a CPU is not told exactly
    assert num_bytes == pytest.approx(size / 100)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_without_endpoints_sums_the_waits_for_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    hetero_torch = pytest.importorskip("hetero.torch", reason="needs torch")
    # What the process itself has waited for before is not the loader's.
    monkeypatch.setattr("hetero.metrics.reading.SHARD_WAITS_S", waits_s := defaultdict(float))
    monkeypatch.setattr("hetero.shards.rows.SHARD_WAITS_S", waits_s)
    monkeypatch.setattr(CountedFileSystem, "delay_s", 0.02)
    rows = made(tmp_path, "jsonl").map(lambda row: row["id"])
    loader = hetero_torch.DataLoader(rows, batch_size=10, num_workers=num_workers)
    assert [int(number) for batch in loader for number in batch] == list(range(100))
    waits_s = loader.step_timer.summary().shard_waits_s
    assert sorted(waits_s) == [f"counted://{tmp_path}/data/shard-00{number}.jsonl" for number in range(3)]
    assert min(waits_s.values()) > 0.015


def test_copies_are_bounded(tmp_path: Path) -> None:
    rows = made(tmp_path, "tar", scratch_bytes=1)
    assert [plain(rows[number])["id"] for number in (0, 45, 99, 1)] == [0, 45, 99, 1]
    assert len(list((tmp_path / "scratch").glob("*.copy"))) == 1
    assert len(list((tmp_path / "scratch").glob("*.pieces"))) == 1


def test_copies_that_a_killed_measurement_has_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = made(tmp_path, "jsonl", scratch_bytes=1)
    if (pid := os.fork()) == 0:
        # The clock is read before and after each read.
        readings = iter([1.0])
        monkeypatch.setattr("hetero.shards.rows.wait_clock_s", lambda: next(readings, None) or os._exit(0))
        rows.hetero_read_cold(60.0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    left = [path.suffix for path in (tmp_path / "scratch").glob("*/*")]
    assert {".copy", ".pieces", ".opened"} <= set(left)
    assert plain(rows[0])["id"] == 0
    assert not [*(tmp_path / "scratch").glob("*/*.copy"), *(tmp_path / "scratch").glob("*/*.pieces")]


def test_missing_store_and_shard_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere://x cannot be read"):
        facts_of("nowhere://x")
    with pytest.raises(ConfigError, match="cannot read counted:///no/file"):
        facts_of("counted:///no/file")
    with pytest.raises(ConfigError, match="there is no index counted:///no/hetero-index.npz"):
        shards.tar(["counted:///no/a.tar", "counted:///no/b.tar"])

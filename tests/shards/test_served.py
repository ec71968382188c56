"""Real endpoints: the same batches in windows as without them, and few bytes are read again if one is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero import cli
from hetero.control.rank import session as control
from tests.support.shards import write_shards

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from hetero.torch import DataLoader  # noqa: E402
from tests.support.torch.endpoints import ServedJob, imported_script  # noqa: E402

SCRIPT = """
    import hetero
    from hetero import shards

    @hetero.dataset
    def served_rows(files):
        return shards.parquet(files, lanes=4, chunk_rows=10, columns=["id"]).map(lambda row: row["id"])

    @hetero.dataset
    def stored_rows(folder, scratch):
        import os
        from tests.support import counted_store

        counted_store.register()
        # The server of a host's endpoints builds the data set, so each host has a disk of its own.
        rows = shards.tar(
            f"counted://{folder}/*.tar",
            lanes=4,
            chunk_rows=10,
            window_bytes=150_000,
            scratch=f"{scratch}/{os.getpid()}",
        )
        return rows.map(lambda row: int(row["__key__"].split("/")[1]))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with imported_script(tmp_path_factory.mktemp("script"), "served_rows_script", SCRIPT) as module:
        yield module


@pytest.fixture
def job(script: Any, tmp_path: Path) -> Iterator[ServedJob]:
    job = ServedJob(tmp_path, Path(script.__file__))
    yield job
    job.stop()
    hetero.spec.set_describer(None)


def test_endpoints_deliver_the_same_windows(
    script: Any, job: ServedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_shards(tmp_path / "data", "parquet", [400] * 5)

    def batches() -> list[Any]:
        loader: Any = DataLoader(script.served_rows(files=files), batch_size=10, shuffle="window")
        return [batch.tolist() for batch in loader]

    expected = batches()
    job.start(2)
    monkeypatch.setattr(control, "_session", job)
    assert batches() == expected


def test_bytes_that_four_hosts_read(
    script: Any, job: ServedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted_store = pytest.importorskip("tests.support.counted_store", reason="needs fsspec")
    files = write_shards(tmp_path / "data", "tar", [100] * 160)
    num_bytes = sum(map(os.path.getsize, files))
    assert cli.main(["index", str(tmp_path / "data" / "*.tar"), "--processes=1"]) == 0
    monkeypatch.setenv(counted_store.LOG, str(tmp_path / "requests"))
    job.start(1, num_hosts=4)
    monkeypatch.setattr(control, "_session", job)
    before = 0
    for lost_after, most in ((None, 1.05), (600, 1.15)):
        # With another folder for copies, the files are read again.
        spec = script.stored_rows(folder=str(tmp_path / "data"), scratch=str(tmp_path / f"scratch-{lost_after}"))
        loader: Any = DataLoader(spec, batch_size=10, shuffle="window")
        found = []
        for number, batch in enumerate(loader):
            found += batch.tolist()
            if number == lost_after:
                job.lose_host(1)
        assert sorted(found) == list(range(16000))
        num_read, before = counted_store.num_read_bytes() - before, counted_store.num_read_bytes()
        print(f"{num_read / num_bytes:.3f} of the data")
        assert num_bytes <= num_read <= most * num_bytes

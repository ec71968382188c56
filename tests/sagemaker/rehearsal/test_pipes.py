"""Pipe mode: a FIFO per epoch, each whole, in order, and never waited for without end."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pytest

from hetero.sagemaker.rehearsal.pipes import PipeFeeder

SECONDS = 20.0


def read(path: Path) -> bytes:
    """Read a FIFO in another process, which can be given up."""
    return subprocess.run(["cat", str(path)], stdout=subprocess.PIPE, check=True, timeout=SECONDS).stdout


def test_pipe_has_every_epoch_whole_and_in_order(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]) * 300_000)  # more than a pipe holds
    whole = b"".join(path.read_bytes() for path in files)
    with PipeFeeder(tmp_path, "train", files):
        assert not (tmp_path / "train_1").exists()
        assert [read(tmp_path / f"train_{epoch}") == whole for epoch in range(3)] == [True] * 3


def test_pipe_of_gzip_files_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one "))
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"two"))
    with PipeFeeder(tmp_path, "train", [tmp_path / "a.gz", tmp_path / "b.gz"], is_compressed=True):
        assert read(tmp_path / "train_0") == b"one two"


@pytest.mark.parametrize("content", [gzip.compress(b"x" * 1000)[:-9], gzip.compress(b"")[:10] + b"\xff" * 50])
def test_pipe_of_a_damaged_gzip_file_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    (tmp_path / "a.gz").write_bytes(content)
    with PipeFeeder(tmp_path, "train", [tmp_path / "a.gz"], is_compressed=True) as feeder:
        for epoch in range(2):  # a later reader does not wait for ever
            read(tmp_path / f"train_{epoch}")
    assert feeder.has_failed
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot feed {tmp_path / 'train_0'}",
        f"cannot feed {tmp_path / 'train_1'}",
    ]


def test_pipe_that_is_closed_early_goes_on_with_the_next_epoch(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"x" * 1_000_000)
    with PipeFeeder(tmp_path, "train", [data]):
        with (tmp_path / "train_0").open("rb", buffering=0) as file:
            assert file.read(10) == b"x" * 10
        assert len(read(tmp_path / "train_1")) == 1_000_000


def test_pipe_that_nobody_reads_on_ends(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"x" * 1_000_000)
    with PipeFeeder(tmp_path, "idle", [data]), PipeFeeder(tmp_path, "train", [data]):
        file = (tmp_path / "train_0").open("rb", buffering=0)
        file.read(10)
    file.close()

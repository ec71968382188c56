"""Data sets with open files, and torch's forked workers."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hetero
from hetero.audit.ledger import DIRECTORY_VARIABLE, close_current
from hetero.torch import DataLoader

NUM_RECORDS = 2000


class Records:
    """Reads a record per sample from a file that is opened once. Counts on the position of its file."""

    def __init__(self, path: str) -> None:
        self.file = Path(path).open("rb", buffering=0)  # noqa: SIM115 - open as long as the data set
        self.builder = os.getpid()

    def __del__(self) -> None:
        if self.file:
            self.file.close()

    def __len__(self) -> int:
        return NUM_RECORDS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(8 * index)
        return torch.tensor([int(np.frombuffer(self.file.read(8), np.int64)[0]), self.builder == os.getpid()])


class Lazy(Records):
    """Opens its file for the first sample."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file: Any = None
        self.builder = os.getpid()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file = self.file or Path(self.path).open("rb", buffering=0)  # noqa: SIM115 - as above
        return super().__getitem__(index)


class Connected(Records):
    """Has a connection, which no sample uses."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file.close()
        self.connection = socket.socketpair()

    def __del__(self) -> None:
        for end in self.connection:
            end.close()

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.builder == os.getpid()])


class Closed(Connected):
    """Has nothing open."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        super().__del__()


@hetero.dataset(name="shared_files_records")
def records(path: str) -> Records:
    return Records(path)


@hetero.dataset(name="shared_files_lazy")
def lazy(path: str) -> Lazy:
    return Lazy(path)


@hetero.dataset(name="shared_files_connected")
def connected(path: str) -> Connected:
    return Connected(path)


@hetero.dataset(name="shared_files_closed")
def closed(path: str) -> Closed:
    return Closed(path)


@hetero.dataset(name="shared_files_own", fork_built=False)
def own(path: str) -> Closed:
    return Closed(path)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "records").write_bytes(np.arange(NUM_RECORDS).tobytes())
    close_current()
    yield str(tmp_path / "records")
    close_current()


def read(dataset: Any, num_epochs: int = 1) -> tuple[list[int], bool]:
    """Return the numbers that two forked workers deliver, and whether the worker itself has built each sample's data
    set."""
    loader = DataLoader(dataset, batch_size=10, num_workers=2, multiprocessing_context="fork")
    rows = torch.cat([batch for _ in range(num_epochs) for batch in loader])
    assert len(set(rows[:, 1].tolist())) == 1
    return rows[:, 0].tolist(), bool(rows[0, 1])


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (records, "its code has opened {path}"),
        (connected, "its code has opened a connection"),
        (own, "its factory has fork_built=False"),
    ],
)
def test_each_forked_worker_builds_what_must_not_be_shared(
    factory: Any, why: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert read(factory(path), num_epochs=2) == ([*range(NUM_RECORDS)] * 2, True)
    told = [line for line in caplog.messages if "each of torch's workers builds its own data set" in line]
    assert len(told) == 1
    assert told[0].endswith(why.format(path=path))


def test_forked_workers_share_a_data_set_that_has_nothing_open(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert read(closed(path)) == ([*range(NUM_RECORDS)], False)
    assert "workers" not in caplog.text


def test_samples_that_were_computed_before_the_fork_leave_no_file_to_the_workers(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has a fingerprint of the data set, for which the process of the script computes samples."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "ledger"))
    loader = DataLoader(lazy(path), batch_size=10, num_workers=2, multiprocessing_context="fork")
    next(iter(loader))  # The workers of this pass end with it.
    rows = torch.cat(list(loader))
    assert rows[:, 0].tolist() == [*range(NUM_RECORDS)]
    assert rows[:, 1].all()


def test_workers_that_share_the_file_of_an_object_are_warned_of(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "ledger"))
    read(Lazy(path), num_epochs=2)
    (told,) = [line for line in caplog.messages if "may be wrong" in line]
    assert f"Lazy may be wrong, because its code has opened {path} in this process" in told

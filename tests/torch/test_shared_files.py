"""Data sets with open files, and torch's forked workers."""

from __future__ import annotations

import functools
import gc
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
from hetero.torch import DataLoader, local_dataset

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


class Mapped(Records):
    """Maps its file into memory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file.close()
        self.numbers = np.memmap(path, np.int64, "r")

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([int(self.numbers[index]), self.builder == os.getpid()])


class InSharedMemory(Mapped):
    """Has memory that torch shares between processes."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.numbers = torch.tensor(self.numbers).share_memory_()  # type: ignore[assignment]


@functools.cache
def module_wide(path: str) -> Any:
    return Path(path).open("rb", buffering=0)


class FileOfModule(Records):
    """Has a file that its module keeps open. No sample reads it, because what workers would read is left to chance."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file.close()
        self.file = module_wide(path)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.builder == os.getpid()])

    def __del__(self) -> None:
        pass


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


@hetero.dataset(name="shared_files_mapped")
def mapped(path: str) -> Mapped:
    return Mapped(path)


@hetero.dataset(name="shared_files_in_shared_memory")
def in_shared_memory(path: str) -> InSharedMemory:
    return InSharedMemory(path)


@hetero.dataset(name="shared_files_of_module")
def of_module(path: str) -> FileOfModule:
    return FileOfModule(path)


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


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """What data sets log here and in forked workers."""
    handler = logging.FileHandler(tmp_path / "log")
    local_dataset.logger.addHandler(handler)
    yield tmp_path / "log"
    local_dataset.logger.removeHandler(handler)
    handler.close()


def read(dataset: Any, num_epochs: int = 1) -> tuple[list[int], bool]:
    """Return the numbers that two forked workers deliver, and whether the worker itself has built each sample's data
    set."""
    loader = DataLoader(dataset, batch_size=10, num_workers=2, multiprocessing_context="fork")
    rows = torch.cat([batch for _ in range(num_epochs) for batch in loader])
    assert len(set(rows[:, 1].tolist())) == 1
    return rows[:, 0].tolist(), bool(rows[0, 1])


@pytest.mark.parametrize(("factory", "what"), [(records, "{path}"), (connected, "a connection")])
def test_each_forked_worker_builds_what_must_not_be_shared(
    factory: Any, what: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert read(factory(path), num_epochs=2) == ([*range(NUM_RECORDS)] * 2, True)
    (told,) = [line for line in caplog.messages if "each of torch's workers builds its own data set" in line]
    assert told.endswith(f"because {what.format(path=path)} was opened while its code ran here")


@pytest.mark.parametrize("factory", [closed, mapped, in_shared_memory])
def test_forked_workers_share_what_does_no_harm(factory: Any, path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert read(factory(path)) == ([*range(NUM_RECORDS)], False)
    assert "workers" not in caplog.text


def test_each_forked_worker_builds_a_data_set_that_its_factory_does_not_share(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loader = DataLoader(own(path), batch_size=10, num_workers=2, multiprocessing_context="fork")
    rows = torch.cat(list(loader))
    assert rows[:, 0].tolist() == [*range(NUM_RECORDS)]
    assert rows[:, 1].all()
    assert not [each for each in gc.get_objects() if type(each) is Closed]  # the script keeps none
    assert "workers" not in caplog.text


def test_file_that_workers_share_although_each_builds_its_data_set_is_warned_of(path: str, log: Path) -> None:
    try:
        _, is_own = read(of_module(path))
    finally:
        module_wide(path).close()
        module_wide.cache_clear()
    assert is_own
    said = log.read_text()
    assert said.count("samples of data set shared_files_of_module") == 1
    assert f"when it was built before the fork, {path} was opened, and no worker has opened it again" in said


def test_samples_that_were_computed_before_the_fork_leave_no_file_to_the_workers(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    """The ledger has a fingerprint of the data set, for which the process of the script computes samples."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "ledger"))
    loader = DataLoader(lazy(path), batch_size=10, num_workers=2, multiprocessing_context="fork")
    next(iter(loader))  # The workers of this pass end with it.
    rows = torch.cat(list(loader))
    assert rows[:, 0].tolist() == [*range(NUM_RECORDS)]
    assert rows[:, 1].all()
    assert "may be wrong" not in log.read_text()


def test_workers_that_share_the_file_of_an_object_are_warned_of(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "ledger"))
    loader = DataLoader(Lazy(path), batch_size=10, num_workers=1, multiprocessing_context="fork")
    for _ in range(2):
        list(loader)
    (told,) = [line for line in caplog.messages if "may be wrong" in line]
    assert f"Lazy may be wrong: {path} was opened while its code ran here" in told

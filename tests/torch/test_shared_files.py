"""Data sets with open files, and torch's forked workers."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hetero
from hetero.audit.ledger import DIRECTORY_VARIABLE, close_current
from hetero.torch import DataLoader

NUM_RECORDS = 400


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
        time.sleep(0.0001)  # lets another worker move a position that it shares
        return torch.tensor([int(np.frombuffer(self.file.read(8), np.int64)[0]), self.builder == os.getpid()])


class Writable(Records):
    """Could write to its file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file.close()
        self.file = Path(path).open("r+b", buffering=0)  # noqa: SIM115 - open as long as the data set


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


class LateConnected(Connected):
    """Connects for the first sample."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        super().__del__()
        self.connection = ()  # type: ignore[assignment]

    def __getitem__(self, index: int) -> torch.Tensor:
        self.connection = self.connection or socket.socketpair()
        return super().__getitem__(index)


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
    """Reads a file that its module keeps open."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.file.close()
        self.file = module_wide(path)

    def __del__(self) -> None:
        pass


class AlsoMapped(Records):
    """Reads a file by its position, and has mapped it too."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.numbers = np.memmap(path, np.int64, "r")


class Closed(Connected):
    """Has nothing open."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        super().__del__()


@hetero.dataset(name="shared_files_records")
def records(path: str) -> Records:
    return Records(path)


@hetero.dataset(name="shared_files_writable")
def writable(path: str) -> Writable:
    return Writable(path)


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


@hetero.dataset(name="shared_files_also_mapped")
def also_mapped(path: str) -> AlsoMapped:
    return AlsoMapped(path)


@hetero.dataset(name="shared_files_closed")
def closed(path: str) -> Closed:
    return Closed(path)


@hetero.dataset(name="shared_files_own", fork_built=False)
def own(path: str) -> Closed:
    return Closed(path)


def _read_and_fail(path: str) -> str:
    raise RuntimeError(f"{path} has {len(LATEST[-1][0])} numbers")


LATEST: list[Lazy] = []


@hetero.dataset(name="shared_files_failing_fingerprint", fingerprint=_read_and_fail)
def failing_fingerprint(path: str) -> Lazy:
    LATEST.append(Lazy(path))
    return LATEST[-1]


WARNED = """
import logging
import multiprocessing
import hetero
from hetero.torch import DataLoader

class Numbers:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index

    def set_epoch(self, epoch):
        pass

@hetero.dataset(fork_built=False)
def numbers():
    return Numbers()

if __name__ == "__main__":
    logging.basicConfig()
    loader = DataLoader(numbers(), batch_size=10, num_workers=3, multiprocessing_context="fork")
    for _ in range(2):
        list(loader)
"""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "records").write_bytes(np.arange(NUM_RECORDS).tobytes())
    close_current()
    yield str(tmp_path / "records")
    close_current()


@pytest.fixture
def ledger(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let runs have a ledger, whose fingerprint of the data set needs samples."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "ledger"))
    return tmp_path / "ledger"


def read(dataset: Any, num_epochs: int = 1) -> tuple[list[int], bool]:
    """Return the numbers that two forked workers deliver, and whether the worker itself has built each sample's data
    set."""
    loader = DataLoader(dataset, batch_size=10, num_workers=2, multiprocessing_context="fork")
    rows = torch.cat([batch for _ in range(num_epochs) for batch in loader])
    assert len(set(rows[:, 1].tolist())) == 1
    return rows[:, 0].tolist(), bool(rows[0, 1])


@pytest.mark.parametrize(
    "subject", [records, writable, lazy, of_module, also_mapped, closed, mapped, in_shared_memory, Records]
)
def test_each_forked_worker_has_its_own_position_in_files(
    subject: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    try:
        assert read(subject(path), num_epochs=2) == ([*range(NUM_RECORDS)] * 2, False)
    finally:
        module_wide(path).close()
        module_wide.cache_clear()
    assert "workers" not in caplog.text


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize(
    ("subject", "name", "advice"),
    [
        (connected, "shared_files_connected", "give @hetero.dataset the argument fork_built=False"),
        (LateConnected, "LateConnected", "return it from a function with @hetero.dataset(fork_built=False)"),
    ],
)
def test_connection_that_workers_share_is_warned_of_once(
    subject: Any, name: str, advice: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, is_own = read(subject(path), num_epochs=2)
    assert not is_own
    (line,) = [line for line in caplog.messages if "may be wrong" in line]
    assert name in line
    assert "may be wrong: a connection was opened while its code ran here" in line
    assert advice in line


@pytest.mark.parametrize("has_ledger", [False, True])
def test_each_forked_worker_builds_a_data_set_that_its_factory_does_not_share(
    has_ledger: bool, path: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    if has_ledger:
        request.getfixturevalue("ledger")
    gc.collect()
    caplog.set_level(logging.INFO)
    loader = DataLoader(own(path), batch_size=10, num_workers=2, multiprocessing_context="fork")
    rows = torch.cat(list(loader))
    assert rows[:, 0].tolist() == [*range(NUM_RECORDS)]
    assert rows[:, 1].all()
    if not has_ledger:
        assert not [each for each in gc.get_objects() if type(each) is Connected]  # the script keeps none
    assert "workers" not in caplog.text


@pytest.mark.usefixtures("ledger")
def test_file_that_a_failing_fingerprint_has_opened_is_not_shared(path: str) -> None:
    try:
        assert read(failing_fingerprint(path)) == ([*range(NUM_RECORDS)], False)
        assert LATEST[-1].file
    finally:
        LATEST.clear()


def test_warnings_of_a_build_are_logged_here_and_by_one_of_three_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WARNED)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert found.stderr.count("is never called") == 2, found.stderr


class Waiting(torch.utils.data.Dataset[int]):
    """Samples come when an event is set, as those of a worker that hangs come never."""

    def __init__(self) -> None:
        self.event = multiprocessing.Event()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        assert self.event.wait(300.0)
        return index


def test_workers_that_send_no_batch_are_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Waiting()
    monkeypatch.setattr("hetero.torch.local._SLOW_S", 0.01)
    monkeypatch.setattr(caplog.handler, "emit", lambda record: (caplog.records.append(record), dataset.event.set()))
    loader = DataLoader(dataset, batch_size=None, num_workers=1)
    assert [list(loader) for _ in range(2)] == [[0, 1]] * 2
    (record,) = caplog.records
    assert "Waiting: its loader workers have sent no batch for 0 s. Libraries" in record.getMessage()

"""The next epoch's batches are fetched while this one ends, and no batch changes by that."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

import hetero
from hetero.control.rank import session as control
from hetero.loaders import pipeline, remote
from hetero.torch import DataLoader
from tests.support.torch.endpoints import ServedJob, imported_script
from tests.support.torch.loaders import rebuilt_by_tool
from tests.support.waiting import wait_for

NUM_SAMPLES = 40
SCRIPT = f"""
    import random

    import torch

    import hetero

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return {NUM_SAMPLES}

        def __getitem__(self, index):
            return index, torch.rand(3), random.random()

    @hetero.dataset
    def ahead_test_noisy():
        return Noisy()

    class Fails(Noisy):
        def __getitem__(self, index):
            if random.random() < 0.1:
                raise ValueError(f"sample {{index}} fails")
            return index

    @hetero.dataset
    def ahead_test_fails():
        return Fails()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The script's data sets, in this process too."""
    with imported_script(tmp_path_factory.mktemp("script"), "ahead_test_script", SCRIPT) as module:
        yield module


@pytest.fixture(scope="module")
def served(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedJob]:
    """Two endpoints."""
    job = ServedJob(tmp_path_factory.mktemp("served"), Path(script.__file__))
    try:
        job.start(2)
        yield job
    finally:
        job.stop()


@pytest.fixture
def fetched(served: ServedJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Make loaders fetch from endpoints. Return a function that counts the batches that have arrived."""
    monkeypatch.setattr(control, "_session", served)
    monkeypatch.setattr(pipeline, "_num_verified", {})
    yield lambda: remote.fleet_for(served).stats.batches
    served.disconnect()
    hetero.spec.set_describer(None)


def plain(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


def loader_of(script: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(script.ahead_test_noisy(), batch_size=4, shuffle=True, seed=5, **options)


def counts(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return how many batches were requested, and how many delivered."""
    extent = loader.step_timer.extent
    return extent.num_requested, extent.num_passed


# Workers of torch. These tests come first, because workers must not be forked beside the connections of endpoints.


class Processes(torch.utils.data.Dataset[Any]):
    """Says which process computes a sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@hetero.dataset
def ahead_test_processes() -> Processes:
    return Processes()


SCALE = 1


class Scaled(torch.utils.data.Dataset[Any]):
    """Reads a global that the script changes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return SCALE * index


@hetero.dataset
def ahead_test_scaled() -> Scaled:
    return Scaled()


def as_tensor(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples)


def closure() -> Callable[[list[int]], torch.Tensor]:
    factor = 1
    return lambda samples: factor * torch.tensor(samples)


@pytest.mark.parametrize(
    ("make", "options", "num_processes"),
    [
        (ahead_test_processes, {}, 1),
        (ahead_test_processes, {"collate_fn": as_tensor}, 1),
        # torch starts new workers for each pass, which see what the script has changed
        (Processes, {}, 2),
        (ahead_test_processes, {"collate_fn": closure()}, 2),
        (ahead_test_processes, {"worker_init_fn": functools.partial(int)}, 2),
    ],
)
def test_workers_of_torch_go_on_if_their_data_set_cannot_change(
    make: Callable[[], Any], options: dict[str, Any], num_processes: int
) -> None:
    loader = DataLoader(make(), batch_size=2, num_workers=1, **options)
    pids = [{pid for batch in loader for pid in batch.tolist()} for _ in range(2)]
    assert [len(each) for each in pids] == [1, 1]
    assert len(pids[0] | pids[1]) == num_processes


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_of_torch_are_started_anew_when_a_global_has_changed(
    persistent_workers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(ahead_test_scaled(), batch_size=8, num_workers=1, persistent_workers=persistent_workers)
    found = [batch.tolist() for batch in loader]
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2)
    found += [batch.tolist() for batch in loader]
    assert found == [list(range(8)), list(range(0, 16, 2))]


class Mixup:
    """A collation that the loop switches off, as timm's."""

    def __init__(self) -> None:
        self.enabled = True

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.as_tensor(each) for each in samples]) + 100 * self.enabled


def test_workers_of_torch_are_started_anew_when_the_loop_has_changed_the_collate_fn() -> None:
    mixup = Mixup()
    factory = hetero.dataset(name="ahead_test_mixed", collate_fn=mixup)(lambda: list(range(4)))
    loader = DataLoader(factory(), batch_size=4, num_workers=1)
    found = [batch.tolist() for batch in loader]
    mixup.enabled = False
    found += [batch.tolist() for batch in loader]
    assert found == [[100, 101, 102, 103], [0, 1, 2, 3]]


class Curriculum(torch.utils.data.Dataset[int]):
    """Samples depend on the epoch that the script sets, as those of many published data sets."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.epoch if index else os.getpid()


def test_persistent_workers_are_started_anew_when_the_script_has_changed_the_object() -> None:
    dataset = Curriculum()
    loader = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    found = []
    for epoch in (0, 0, 1):
        dataset.set_epoch(epoch)
        found += [batch.tolist() for batch in loader]
    pids, epochs = zip(*found, strict=True)
    assert epochs == (0, 0, 1)
    assert pids[0] == pids[1] != pids[2]


def test_persistent_workers_are_started_anew_when_the_object_has_another_transform() -> None:
    dataset = Curriculum()
    loader = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    pids = []
    for transform in (abs, abs, hex):
        dataset.transform = transform  # type: ignore[attr-defined]
        pids += [batch.tolist()[0] for batch in loader]
    assert pids[0] == pids[1] != pids[2]


def test_workers_of_torch_end_with_the_pass_where_shared_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.torch.local.is_roomy", lambda num_bytes: num_bytes < 2 * 2 * 8)
    loader = DataLoader(ahead_test_processes(), batch_size=2, num_workers=1)
    pids = [pid for _ in range(2) for batch in loader for pid in batch.tolist()]
    assert len(set(pids)) == 2


EXITS = """
import signal
import torch
from hetero.torch import DataLoader
import hetero

@hetero.dataset
def exits():
    return torch.utils.data.TensorDataset(torch.arange(64))

if __name__ == "__main__":
    loader = DataLoader(exits(), batch_size=4, num_workers=2)
    keep = [loader, lambda: loader]  # a cycle with the module, which is freed only after the exit handlers
    assert [len(list(loader)) for _ in range(2)] == [16, 16]
    print("done", flush=True)
"""


def test_process_with_kept_workers_ends(tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text(EXITS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "done\n"
    assert done.stderr == ""


# Endpoints.


@pytest.mark.integration
def test_first_batches_of_the_next_epoch_arrive_during_another_loaders_pass(
    script: Any, fetched: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, validation = loader_of(script), loader_of(script, name="validation")
    found = [(plain(train), plain(validation)) for _ in range(3)]
    requested, delivered = (counts(train)[i] + counts(validation)[i] for i in (0, 1))
    wait_for(lambda: fetched() == requested)
    windows = [counts(each)[0] - counts(each)[1] for each in (train, validation)]
    assert min(windows) >= 3
    assert sum(windows) == requested - delivered
    # The first batches of both loaders are there. No endpoint is needed for them.
    monkeypatch.setattr("hetero.reader.fetchers.Fetchers._start_first", lambda _: None)
    passes = [iter(train), iter(validation)]
    sizes = [min(window, NUM_SAMPLES // 4) for window in windows]  # a window that has grown may reach further
    found.append(tuple(plain([next(each) for _ in range(size)]) for each, size in zip(passes, sizes, strict=True)))
    monkeypatch.undo()
    local = [loader_of(script), loader_of(script)]
    for each in found:
        expected = [plain(one) for one in local]
        assert [batches == whole[: len(batches)] for batches, whole in zip(each, expected, strict=True)] == [True, True]


@pytest.mark.integration
def test_loader_that_a_tool_has_rebuilt_goes_on_with_the_next_epoch_too(
    script: Any, fetched: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_of(script)
    rebuilt: Any = rebuilt_by_tool(loader)
    found = [plain(rebuilt) for _ in range(2)]
    requested, delivered = counts(loader)
    assert requested >= delivered + 3
    wait_for(lambda: fetched() == requested)
    monkeypatch.setattr("hetero.reader.fetchers.Fetchers._start_first", lambda _: None)
    third = iter(rebuilt)
    found.append(plain([next(third) for _ in range(3)]))
    monkeypatch.undo()
    local = loader_of(script)
    assert found == [plain(local), plain(local), plain(local)[:3]]


@pytest.mark.integration
@pytest.mark.parametrize("change", ["set_epoch", "break", "load_state_dict", "shard"])
def test_what_was_requested_wrongly_is_discarded_and_counted(
    script: Any, fetched: Callable[[], int], change: str
) -> None:
    loader = loader_of(script)

    def run(loader: DataLoader[Any]) -> list[Any]:
        found = [plain(loader)]
        state = loader.state_dict()
        if change == "set_epoch":
            loader.set_epoch(7)
        elif change == "break":
            found.append(plain([next(iter(loader))]))
        elif change == "load_state_dict":
            found.append(plain(loader))
            loader.load_state_dict(state)
        else:
            loader._pipeline.shard = lambda: pipeline.Shard(1, 2)  # type: ignore[method-assign]
        return [*found, plain(loader)]

    found = run(loader)
    num_requested, num_delivered = counts(loader)
    assert num_delivered == sum(map(len, found))
    assert (
        num_requested >= num_delivered + 6
    )  # the window has at least three: those that were discarded, and its present ones
    control._session.disconnect()  # type: ignore[union-attr]
    session, control._session = control._session, None
    try:
        assert found == run(loader_of(script))
    finally:
        control._session = session


@pytest.mark.integration
def test_loop_that_never_asks_for_the_end_of_its_pass_discards_nothing(script: Any, fetched: Callable[[], int]) -> None:
    loader = loader_of(script)
    found = []
    for _ in range(3):
        batches = iter(loader)
        found.append(plain([next(batches) for _ in range(len(loader))]))
    requested, delivered = counts(loader)
    assert requested - delivered <= loader.step_timer.summary().max_in_flight
    session, control._session = control._session, None
    try:
        local = loader_of(script)
        assert found == [plain(local) for _ in range(3)]
    finally:
        control._session = session


@pytest.mark.integration
def test_epochs_shorter_than_the_window(script: Any, fetched: Callable[[], int]) -> None:
    loader = DataLoader(script.ahead_test_noisy(), batch_size=NUM_SAMPLES, shuffle=True, seed=5)
    found = [plain(loader) for _ in range(5)]
    assert all(len(each) == 1 for each in found)
    assert len({str(each) for each in found}) == 5
    requested, delivered = counts(loader)
    assert 3 <= requested - delivered <= loader.step_timer.summary().max_in_flight


@pytest.mark.integration
def test_failure_in_the_next_epoch_is_raised_in_the_next_epoch(script: Any, fetched: Callable[[], int]) -> None:
    def outcomes(loader: DataLoader[Any]) -> list[str]:
        found = []
        for _ in range(3):
            batches = iter(loader)
            while True:
                try:
                    found.append(str(next(batches).tolist()))
                except StopIteration:
                    break
                except ValueError as error:
                    found.append(str(error).splitlines()[0].partition(" on ")[0][:20])
            found.append("end")
        return found

    loader = DataLoader(script.ahead_test_fails(), batch_size=1, seed=1)
    found = outcomes(loader)
    assert [each for each in found if each == "end"] == ["end"] * 3
    assert len(found) == 3 * (NUM_SAMPLES + 1)
    session, control._session = control._session, None
    try:
        expected = outcomes(DataLoader(script.ahead_test_fails(), batch_size=1, seed=1))
    finally:
        control._session = session
    assert [each == "end" or each.startswith("[") for each in found] == [
        each == "end" or each.startswith("[") for each in expected
    ]


@pytest.mark.integration
def test_dropped_loader_ends_its_threads_at_once(script: Any, fetched: Callable[[], int]) -> None:
    def fetchers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("hetero-fetcher")]

    gc.disable()
    try:
        loader = loader_of(script)
        assert len(plain(loader)) == 10
        assert fetchers()
        del loader
        wait_for(lambda: not fetchers())
    finally:
        gc.enable()

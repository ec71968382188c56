"""The loader in a job, local and with endpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.data

import hetero
from hetero.errors import ConfigError, DatasetError
from hetero.torch import DataLoader
from tests.support.torch.loaders import FakeSession, loader_test_noisy


def test_loader_registers_its_timer_and_stops_between_steps(join: Any) -> None:
    session = join(FakeSession())
    session.stops_at = 4
    loader = DataLoader(range(10), name="train")
    with pytest.raises(SystemExit):
        list(loader)
    assert loader.state_dict()["batches"] == 3
    assert [timer.name for timer in session.timers] == ["train"]
    assert session.timers[0].summary().num_steps == 3


def test_loader_first_batches_are_checked_for_purity(join: Any) -> None:
    class Impure(torch.utils.data.Dataset[int]):
        calls = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            self.calls += 1
            return self.calls

    join(FakeSession(purity_checks=1))
    with pytest.raises(DatasetError, match="purity"):
        list(DataLoader(Impure()))
    assert len(list(zip(range(3), DataLoader(Impure()), strict=False))) == 3


def test_loader_object_in_a_job_with_endpoints_raises(join: Any) -> None:
    join(FakeSession(remote=True))
    with pytest.raises(ConfigError, match=r"@hetero\.dataset"):
        DataLoader(range(10))


@hetero.dataset(collate_fn=sum)
def loader_test_summed() -> range:
    return range(10)


def test_loader_collate_fn_in_a_job_with_endpoints_must_be_the_decorators(join: Any) -> None:
    join(FakeSession(remote=True))
    DataLoader(loader_test_summed(), collate_fn=sum)
    with pytest.raises(ConfigError, match=r"@hetero\.dataset\(collate_fn=\.\.\.\)"):
        DataLoader(loader_test_noisy(), collate_fn=sum)
    with pytest.raises(ConfigError, match="worker_init_fn"):
        DataLoader(loader_test_noisy(), worker_init_fn=print)


def test_loader_with_the_other_default_function_in_a_job_with_endpoints_raises(join: Any) -> None:
    join(FakeSession(remote=True))
    DataLoader(loader_test_noisy(), collate_fn=torch.utils.data.default_collate)
    DataLoader(loader_test_noisy(), batch_size=None, collate_fn=torch.utils.data.default_convert)
    with pytest.raises(ConfigError, match="collate_fn"):
        DataLoader(loader_test_noisy(), collate_fn=torch.utils.data.default_convert)


class Unpicklable(torch.utils.data.Dataset[int]):
    """Holds an object that cannot be sent to another process. A worker has it if it is forked."""

    def __init__(self) -> None:
        self.scale = lambda value: value * 10

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return self.scale(index)


def test_loader_in_a_homogeneous_job_takes_functions_and_objects_that_cannot_be_pickled(join: Any) -> None:
    join(FakeSession())
    seen = []
    options: dict[str, Any] = {"collate_fn": lambda samples: [*seen, *samples], "worker_init_fn": seen.append}
    loader = DataLoader(Unpicklable(), batch_size=2, num_workers=1, **options)
    assert list(loader) == [[0, 0, 10], [0, 20, 30], [0, 40]]


def test_loader_in_a_homogeneous_job_starts_workers_as_it_is_told(join: Any) -> None:
    join(FakeSession())
    loader = DataLoader(range(5), batch_size=2, num_workers=1, multiprocessing_context="forkserver")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_loader_in_a_child_of_a_rank_raises_at_its_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LAUNCHER", "127.0.0.1:17170")
    monkeypatch.setenv("HETERO_REMOTE", "1")
    loader = DataLoader(loader_test_noisy(4), batch_size=2)
    assert len(loader) == 2
    with pytest.raises(ConfigError, match="a process that a rank has started requests batches"):
        next(iter(loader))
    assert len(list(torch.utils.data.DataLoader(range(4), num_workers=1))) == 4


def test_loader_in_a_child_of_a_rank_without_data_hosts_loads_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LAUNCHER", "127.0.0.1:17170")
    monkeypatch.setenv("HETERO_REMOTE", "0")
    assert len(list(DataLoader(loader_test_noisy(4), batch_size=2, num_workers=1))) == 2

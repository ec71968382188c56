"""Ranks that would train on some samples twice and on others never: their seeds or samplers differ."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from hetero.errors import DatasetMismatchError
from hetero.torch import DataLoader
from hetero.torch.order import ranks as rank_orders
from tests.support.torch.loaders import loader_test_noisy

WORLD_SIZE = 3


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes this process one of three ranks of a process group, with a store of their own."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(rank_orders, "_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: WORLD_SIZE)

    def become(rank: int) -> None:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(rank_orders, "_num_loaders", type(rank_orders._num_loaders)())

    return become


def first_batch(**options: Any) -> Any:
    return next(iter(DataLoader(loader_test_noisy(), batch_size=2, **options)))


@pytest.mark.parametrize(
    "options",
    [
        lambda rank: {"seed": rank},
        lambda rank: {"generator": torch.Generator().manual_seed(rank)},
    ],
)
def test_other_seed_on_another_rank_is_an_error_that_names_both(
    options: Callable[[int], dict[str, Any]], on_rank: Callable[[int], None]
) -> None:
    on_rank(2)
    first_batch(shuffle=True, **options(7))
    on_rank(1)
    with pytest.raises(DatasetMismatchError, match="its seed is 8 on rank 1 and 7 on rank 2"):
        first_batch(shuffle=True, **options(8))


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},  # the order does not depend on it
        {"shuffle": True, "shard": (0, 1)},  # each rank has all samples
        {"shuffle": True, "name": "other"},
    ],
)
def test_loaders_that_share_no_shuffled_order_may_have_other_seeds(
    options: dict[str, Any], on_rank: Callable[[int], None]
) -> None:
    on_rank(0)
    first_batch(**{**options, "name": None}, seed=7)
    on_rank(1)
    first_batch(**options, seed=8)


def test_loader_of_one_rank_alone_is_not_compared_with_that_of_another_line(on_rank: Callable[[int], None]) -> None:
    on_rank(0)
    next(iter(DataLoader(loader_test_noisy(), batch_size=2, shuffle=True, seed=123)))  # only rank 0 looks at one
    first_batch(shuffle=True, seed=7)
    on_rank(1)
    first_batch(shuffle=True, seed=7)


def of_own_generator(rank: int) -> Iterable[int]:
    return list(map(int, np.random.default_rng(rank).permutation(300)))[rank::WORLD_SIZE]


def of_common_generator(rank: int) -> Iterable[int]:
    return list(map(int, np.random.default_rng(0).permutation(300)))[rank::WORLD_SIZE]


def padded(rank: int) -> Iterable[int]:
    return [index % 298 for index in range(rank, 300, WORLD_SIZE)]


def with_replacement(rank: int) -> Iterable[int]:
    return list(map(int, np.random.default_rng(rank).integers(0, 300, 100)))


def same(rank: int) -> Iterable[int]:
    return list(range(100))


class Chosen(torch.utils.data.Sampler[int]):
    def __init__(self, indices: Iterable[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


@pytest.mark.parametrize(
    ("choose", "has_warning"),
    [
        (of_own_generator, True),
        (of_common_generator, False),
        (padded, False),
        (with_replacement, False),
        (same, False),
    ],
)
def test_samplers_that_share_samples_by_chance_are_said(
    choose: Callable[[int], Iterable[int]],
    has_warning: bool,
    on_rank: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for rank in range(WORLD_SIZE):
        on_rank(rank)
        for _ in range(2):
            list(DataLoader(list(range(300)), batch_size=4, sampler=Chosen(choose(rank))))
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["sampler Chosen: ranks 1 and 0 have" in text for text in found[:1]] == ([True] if has_warning else [])


JOB = """
import sys
import torch, torch.distributed
from hetero.torch import DataLoader

rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
for seed in (3, 3 + rank):
    loader = DataLoader(list(range(8)), batch_size=2, shuffle=True, seed=seed)
    try:
        next(iter(loader))
        print("batch", flush=True)
    except ValueError as error:
        print(error)
    except Exception as error:
        print(type(error).__name__, str(error).partition(chr(10))[0])
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_seeds_are_compared_through_the_process_group(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(rank), str(tmp_path / "store")], stdout=-1, stderr=-2, text=True
        )
        for rank in range(2)
    ]
    found = sorted(rank.communicate(timeout=300)[0].splitlines() for rank in ranks)
    assert found[0][0] == found[1][0] == "batch"
    assert sum("DatasetMismatchError loader list: its seed is" in line for lines in found for line in lines) == 1

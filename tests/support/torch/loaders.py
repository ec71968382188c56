"""What the tests of the loader share: a data set that draws, batches as plain lists, a session."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import hetero
from hetero.metrics.logged import MetricLog


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from every global generator."""

    def __init__(self, num_samples: int = 23) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        return index, torch.rand(2), random.random() + float(np.random.rand())


@hetero.dataset
def loader_test_noisy(num_samples: int = 23) -> Noisy:
    return Noisy(num_samples)


def plain(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


def indices(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


class FakeSession:
    rank = 0
    world_size = 1

    def __init__(self, *, remote: bool = False, purity_checks: int = 0) -> None:
        self.remote = remote
        self.options = SimpleNamespace(
            purity_checks=purity_checks, warmup_steps=0, emulate_step_s=None, profile=False, max_pass_batches=None
        )
        self.metrics = MetricLog()
        self.timers: list[Any] = []
        self.stops = 0
        self.stops_at = 0

    def register_timer(self, timer: Any) -> None:
        self.timers.append(timer)

    def check_stop(self, timer: object) -> None:
        self.stops += 1
        if self.stops_at == self.stops:
            raise SystemExit(143)


def fail_to_start(worker_index: int) -> None:
    """A ``worker_init_fn`` that spawned workers can import."""
    raise ZeroDivisionError("division by zero")


def be_rank(patch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """Make torch report this process as a rank of a process group, unless the world size is 1."""
    patch.setattr(torch.distributed, "is_initialized", lambda: world_size > 1)
    patch.setattr(torch.distributed, "get_rank", lambda: rank)
    patch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(world_size))


def rebuilt_by_tool(loader: Any, **options: Any) -> torch.utils.data.DataLoader[Any]:
    """Return torch's loader, made of the attributes that a tool reads to rebuild one."""
    seen = vars(loader)
    return torch.utils.data.DataLoader(
        seen["dataset"], batch_sampler=seen["batch_sampler"], collate_fn=seen["collate_fn"], **options
    )

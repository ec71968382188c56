"""A loader that Ray Train has prepared takes a batch ahead of the loop. Needs no cluster."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("ray.train")

import torch
from ray.train.torch.train_loop_utils import _WrappedDataLoader  # what prepare_data_loader returns
from torch.utils.data import TensorDataset

from hetero.torch import DataLoader


def loader_and_batches(state: dict[str, object] | None = None) -> tuple[DataLoader[Any], Any]:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True, seed=3)
    if state is not None:
        loader.load_state_dict(state)
    wrapped = _WrappedDataLoader(loader, torch.device("cpu"), auto_transfer=True)
    return loader, (numbers.tolist() for (numbers,) in wrapped)


@pytest.mark.parametrize("steps", [0, 4, 9, 10])
def test_state_of_a_prepared_loader_counts_what_the_loop_has_had(steps: int) -> None:
    _, whole = loader_and_batches()
    loader, batches = loader_and_batches()
    trained = list(itertools.islice(batches, steps))
    _, rest = loader_and_batches(loader.state_dict())
    assert trained + (list(rest) if steps < 10 else []) == list(whole)

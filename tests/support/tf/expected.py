"""What a dataset must yield, computed without TensorFlow and without endpoints."""

from __future__ import annotations

from typing import Any

from hetero.batches.fetch import fetch
from hetero.batches.request import BatchRequest
from hetero.batches.seeds import preserved_generators
from hetero.datasets import build
from hetero.loaders.sampling import BuiltInOrder, Shard
from hetero.spec import DatasetSpec


def batches(
    spec: DatasetSpec, *, epoch: int, batch_size: int, seed: int = 0, shuffle: bool = False, drop_last: bool = False
) -> list[Any]:
    """Return the batches of an epoch on the only rank."""
    built = build(spec)
    order = BuiltInOrder(num_samples=len(built), batch_size=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
    found = []
    for planned in order.batches(epoch, Shard()):
        request = BatchRequest(spec=spec, work=planned.work, seed=seed, epoch=epoch, position=planned.position)
        with preserved_generators():
            found.append(fetch(built, request))
    return found


def indices(
    num_samples: int, *, epoch: int, batch_size: int, seed: int = 0, shuffle: bool = False, shard: Shard | None = None
) -> list[list[int]]:
    """Return the indices of an epoch's batches."""
    order = BuiltInOrder(num_samples=num_samples, batch_size=batch_size, seed=seed, shuffle=shuffle)
    return [list(map(int, planned.work.labels)) for planned in order.batches(epoch, shard or Shard())]

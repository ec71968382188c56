"""What the ranks of soak_script.py are fed without faults, computed by this process: no launcher, no host, no torch."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from hetero.batches.fetch import fetch
from hetero.batches.request import BatchRequest
from hetero.batches.seeds import preserved_generators
from hetero.datasets import build
from hetero.loaders.sampling import BuiltInOrder, Shard
from tests.chaos import soak_script

_NUM_SAMPLES, _BATCH_SIZE, _SEED = 331, 4, 17  # of the script


def undisturbed(num_steps: int, *, width: int = 64, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Return what the script writes on one rank: the chain of its batches, and their indices."""
    chain, indices = "", []
    with preserved_generators():
        for batch in itertools.islice(_batches(width, Shard(rank, world_size)), num_steps):
            fed = hashlib.sha256(chain.encode())
            for name in sorted(batch):
                fed.update(name.encode() + np.asarray(batch[name]).tobytes())
            chain = fed.hexdigest()
            indices.append(batch["index"].tolist())
    return {"chain": chain, "indices": indices}


def _batches(width: int, shard: Shard) -> Iterator[dict[str, Any]]:
    spec = soak_script.noisy(num_samples=_NUM_SAMPLES, width=width)
    built = build(spec)
    order = BuiltInOrder(num_samples=_NUM_SAMPLES, batch_size=_BATCH_SIZE, seed=_SEED, shuffle=True)
    for epoch in itertools.count():
        for planned in order.batches(epoch, shard):
            yield fetch(
                built,
                BatchRequest(spec=spec, work=planned.work, seed=_SEED, epoch=epoch, position=planned.position),
            )

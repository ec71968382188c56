"""What endpoints serve in `bench_compression.py`: prepared batches that compress as real data do."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data
from pipelines import load

import hetero

_NUM_BATCHES = 8
_TEXTS = 512
"""Of a batch of tokens: 2 MB instead of a quarter."""


class Prepared(torch.utils.data.Dataset[Any]):
    """Batches, one after the other, without end.

    Args:
        kind: ``photos``: 64 decoded photographs, uint8, 9.6 MB, as `pipelines.jpeg` makes them. ``tokens``: ids
            and mask of 512 texts, int64 and bool, as `pipelines.text` does.
        root: Folder of the photographs.
    """

    def __init__(self, kind: str, root: str) -> None:
        pipeline = load({"photos": "jpeg", "tokens": "text"}[kind])
        size = pipeline.batch_size if kind == "photos" else _TEXTS
        collate = pipeline.collate or torch.utils.data.default_collate
        samples = pipeline.build(size * _NUM_BATCHES, root)
        self._batches = [
            collate([samples[index] for index in range(begin, begin + size)])
            for begin in range(0, size * _NUM_BATCHES, size)
        ]

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Any:
        return self._batches[index % _NUM_BATCHES]


@hetero.dataset(name="prepared", seeding="batch")
def prepared(kind: str, root: str) -> Any:
    """Return the data set."""
    return Prepared(kind, root)

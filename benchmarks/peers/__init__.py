"""Ways to feed a trainer, each with two preprocessing processes, as competitors of the harness.

Their configuration: ``pipeline`` (a name in `pipelines`), ``root`` (its photographs), and what their docstrings add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from harness import Competitor
from pipelines import load

__all__ = ["LENGTH_BATCHES", "NUM_PROCESSES", "PipelineCompetitor", "touch"]

NUM_PROCESSES = 2
"""Preprocessing processes of every competitor."""

LENGTH_BATCHES = 2_000
"""Of an epoch: none of the runs should see its end, and drawing its order should not count."""

_PAGE_BYTES = 4096


def touch(batch: Any) -> int:
    """Read a byte of every page of a batch, as any consumer does at least. Return the number of bytes of the batch."""
    array = batch.numpy() if hasattr(batch, "numpy") else batch
    if isinstance(array, np.ndarray):
        if array.size:
            array.reshape(-1).view(np.uint8)[::_PAGE_BYTES].sum()
        return array.nbytes
    if isinstance(batch, Mapping):
        return sum(map(touch, batch.values()))
    if isinstance(batch, list | tuple):
        return 8 * len(batch) if batch and isinstance(batch[0], int | float) else sum(map(touch, batch))
    return 8


class PipelineCompetitor(Competitor):
    """Runs one of the pipelines in torch. Subclasses define how."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        # A trainer has imported torch and its script before it makes a loader.
        import torch

        torch.set_num_threads(1)
        self.pipeline = load(config["pipeline"])
        self.root = config["root"]
        self.length = LENGTH_BATCHES * self.pipeline.batch_size

    def dataset(self) -> Any:
        """Build the pipeline's data set here."""
        return self.pipeline.build(self.length, self.root)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of one epoch after the other."""
        while True:
            yield from self.epoch()

    def epoch(self) -> Iterator[Any]:
        """Yield one epoch."""
        raise NotImplementedError

    def consume(self, batch: Any) -> tuple[int, int]:
        """Touch it."""
        return self.pipeline.batch_size, touch(batch)

"""What it costs to compute the batches, without sending them: a part of the CPU time of every competitor."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from pipelines import load

from peers import NUM_PROCESSES, PipelineCompetitor


class ComputingAlone(PipelineCompetitor):
    """Two processes that compute batches, drop them, and tell their size."""

    def start(self) -> None:
        """Start the processes."""
        context = multiprocessing.get_context("spawn")
        self._sizes: Queue[int] = context.Queue(maxsize=2)
        args = self.pipeline.name, self.length, self.root, self._sizes
        self._processes = [
            context.Process(target=_compute, args=(number, *args), daemon=True) for number in range(NUM_PROCESSES)
        ]
        for process in self._processes:
            process.start()

    def epoch(self) -> Iterator[int]:
        """Yield sizes without end."""
        while True:
            yield self._sizes.get()

    def consume(self, batch: int) -> tuple[int, int]:
        """Count it."""
        return self.pipeline.batch_size, batch

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _compute(number: int, name: str, length: int, root: str, sizes: Queue[int]) -> None:
    """Compute batches in random order without end."""
    import torch
    from torch.utils.data import default_collate

    from peers import touch

    torch.set_num_threads(1)
    pipeline = load(name)
    dataset: Any = pipeline.build(length, root)
    collate = pipeline.collate or default_collate
    order = np.random.default_rng(number)
    random.seed(number)
    np.random.seed(number)
    while True:
        batch = collate([dataset[index] for index in order.integers(0, length, pipeline.batch_size).tolist()])
        sizes.put(touch(batch))

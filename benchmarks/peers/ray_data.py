"""Ray Data: an actor pool of two maps batches of indices, `iter_torch_batches` delivers.

Batches of fixed shapes travel as columns, one row per sample. Where shapes vary a batch travels as
one row of pickled bytes, which is what users do when nested samples do not fit a table.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
import torch.utils.data
from pipelines import load

from peers import NUM_PROCESSES, PipelineCompetitor

_OBJECT_STORE_BYTES = 2 * 2**30


class Fetch:
    """Computes the samples of a batch of indices, in an actor."""

    def __init__(self, name: str, root: str, length: int, in_columns: bool) -> None:
        torch.set_num_threads(1)
        self._pipeline = load(name)
        self._dataset = self._pipeline.build(length, root)
        self._in_columns = in_columns

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, Any]:
        samples = [self._dataset[int(index)] for index in rows["id"]]
        batch = (self._pipeline.collate or torch.utils.data.default_collate)(samples)
        if self._in_columns:
            leaves = batch if isinstance(batch, list | tuple) else [batch]
            return {f"leaf{number}": leaf.numpy() for number, leaf in enumerate(leaves)}
        return {"batch": [pickle.dumps(batch, protocol=5)]}


class RayData(PipelineCompetitor):
    """One local Ray with a CPU for each actor, and one for its own tasks."""

    min_warmup_s = 7.0  # it starts actors, and works itself up to full speed meanwhile

    def start(self) -> None:
        """Start Ray."""
        ray.init(
            num_cpus=NUM_PROCESSES + 1,
            include_dashboard=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        self._in_columns = self.pipeline.has_fixed_shapes

    def epoch(self) -> Iterator[Any]:
        """Yield one epoch."""
        batch_size = self.pipeline.batch_size
        rows = ray.data.range(self.length).map_batches(
            Fetch,
            fn_constructor_args=(self.pipeline.name, self.root, self.length, self._in_columns),
            batch_size=batch_size,
            compute=ray.data.ActorPoolStrategy(size=NUM_PROCESSES),
            num_cpus=1,
        )
        if self._in_columns:
            yield from rows.iter_torch_batches(batch_size=batch_size, prefetch_batches=4)
        else:
            for row in rows.iter_batches(batch_size=1, prefetch_batches=4, batch_format="numpy"):
                yield pickle.loads(row["batch"][0])  # noqa: S301 - made by our own actor

    def stop(self) -> None:
        """End Ray."""
        ray.shutdown()

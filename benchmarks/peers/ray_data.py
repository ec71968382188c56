"""Ray Data: an actor pool of two maps batches of indices, `iter_torch_batches` delivers.

Two Ray nodes, as in a cluster: the trainer's node offers no CPUs, and the other one computes. On a single node batches
would go through shared memory, which is not possible between two machines.
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
from ray.cluster_utils import Cluster

from peers import NUM_PROCESSES, PipelineCompetitor

_OBJECT_STORE_BYTES = 2**30
"""Of each node."""
_BLOCK_BYTES = 2**24
"""Target of Ray's blocks. By default they grow to 128 MiB before any of their batches is delivered, 453 batches of text
or 20 s of work here. A run of two seconds would then find a whole block or none."""
_EPOCHS = 10
"""Epochs in one Ray data set. Ray computes ahead until its stores are full, so it would notice the end of an epoch."""


class Fetch:
    """Computes the samples of a batch of indices, in an actor."""

    def __init__(self, name: str, root: str, length: int, in_columns: bool) -> None:
        torch.set_num_threads(1)
        self._pipeline = load(name)
        self._dataset = self._pipeline.build(length, root)
        self._length = length
        self._in_columns = in_columns

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, Any]:
        samples = [self._dataset[int(index) % self._length] for index in rows["id"]]
        batch = (self._pipeline.collate or torch.utils.data.default_collate)(samples)
        if self._in_columns:
            leaves = batch if isinstance(batch, list | tuple) else [batch]
            return {f"leaf{number}": leaf.numpy() for number, leaf in enumerate(leaves)}
        return {"batch": [pickle.dumps(batch, protocol=5)]}


class RayData(PipelineCompetitor):
    """A CPU for each actor, and one for Ray's own tasks."""

    min_warmup_s = 7.0  # it starts actors, and works itself up to full speed meanwhile

    def start(self) -> None:
        """Start both nodes."""
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._cluster.add_node(num_cpus=NUM_PROCESSES + 1, object_store_memory=_OBJECT_STORE_BYTES)
        ray.init(address=self._cluster.address, logging_level=logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.target_max_block_size = _BLOCK_BYTES
        self._in_columns = self.pipeline.has_fixed_shapes

    def epoch(self) -> Iterator[Any]:
        """Yield one epoch."""
        batch_size = self.pipeline.batch_size
        rows = ray.data.range(_EPOCHS * self.length).map_batches(
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
        """End both nodes."""
        ray.shutdown()
        self._cluster.shutdown()

"""The published PyTorch sample's way, in our own words: what users of heterogeneous clusters run today.

A feeding process iterates over a ``DataLoader`` with two workers, turns each tensor into bytes and puts them into a
``multiprocessing.Queue``. A gRPC server takes them from the queue and streams them as protobuf messages. The
trainer parses the messages and makes tensors from the bytes. Both sides know shapes and types by
convention, so pipelines whose shapes vary cannot be run this way.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data
from pipelines import load
from transports import messages

from peers import LENGTH_BATCHES, NUM_PROCESSES, PipelineCompetitor
from peers.local_torch import limit_threads

_QUEUE_BATCHES = 8


class PublishedSample(PipelineCompetitor):
    """Three processes on the data host's side: two loader workers feed a third, a fourth serves."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if not self.pipeline.has_fixed_shapes:
            raise ValueError("shapes are agreed by convention there: batches of varying shapes cannot be sent")

    def start(self) -> None:
        """Start the data host's processes and connect."""
        sample = torch.utils.data.default_collate([self.dataset()[0]])
        self._convention = [(leaf.shape[1:], leaf.numpy().dtype) for leaf in sample]
        context = multiprocessing.get_context("spawn")
        port = context.Queue()
        self._server = context.Process(
            target=serve, args=(self.pipeline.name, self.root, self.pipeline.batch_size, port)
        )
        self._server.start()
        self._port = port.get(timeout=120)

    def epoch(self) -> Iterator[Any]:
        """Yield what the server streams."""
        with messages.read(self._port, messages.batch_class().FromString) as stream:
            for message in stream:
                yield [
                    torch.from_numpy(np.frombuffer(data, dtype).reshape(-1, *shape).copy())
                    for data, (shape, dtype) in zip(message.leaves, self._convention, strict=True)
                ]

    def stop(self) -> None:
        """End the server."""
        self._server.terminate()
        self._server.join(5.0)


def fill(name: str, root: str, batch_size: int, queue: Any) -> None:
    """Feed the queue. This is the feeding process."""
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(
        load(name).build(batch_size * LENGTH_BATCHES, root),
        batch_size=batch_size,
        shuffle=True,
        num_workers=NUM_PROCESSES,
        worker_init_fn=limit_threads,
    )
    while True:
        for batch in loader:
            queue.put([leaf.numpy().tobytes() for leaf in batch])


def serve(name: str, root: str, batch_size: int, port: Any) -> None:
    """Serve the content of the queue. This is the serving process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(_QUEUE_BATCHES)
    context.Process(target=fill, args=(name, root, batch_size, queue)).start()
    batch_class = messages.batch_class()

    def batches() -> Iterator[Any]:
        while True:
            yield batch_class(leaves=queue.get())

    with messages.serve(batches, batch_class.SerializeToString) as facts:
        port.put(facts["port"])
        threading.Event().wait()

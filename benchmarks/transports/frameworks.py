"""Frameworks that deliver ready-made batches: hetero, torch's loader processes, tf.data service."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import harness
import ready_batches
import ready_feeds

from transports import Transport


class Hetero(Transport, ready_feeds.Hetero):
    """Endpoints of a real pool, a real reader: framing, checksums, order, window."""


class TorchWorkers(Transport, ready_feeds.TorchWorkers):
    """``torch.utils.data.DataLoader``: a process per endpoint, shared memory."""


class TfDataService(Transport):
    """A dispatcher, a worker per endpoint, ready-made tensors, uncompressed."""

    def start(self) -> None:
        """Start dispatcher and workers."""
        dispatcher = harness.server("tf-dispatcher", {})
        self._address = dispatcher.ask()["address"]
        workers = [
            harness.server("tf-worker", {"dispatcher": self._address}) for _ in range(self.config["num_endpoints"])
        ]
        self._children = [*workers, dispatcher]
        for worker in workers:
            worker.ask()

    def batches(self) -> Iterator[Any]:
        """Yield arrays over the received memory."""
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensors(tf.constant(ready_batches.ready_batch(self.config["nbytes"]))).repeat()
        dataset = dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode="parallel_epochs", service=f"grpc://{self._address}", compression=None
            )
        )
        yield from dataset.as_numpy_iterator()

    def stop(self) -> None:
        """End dispatcher and workers."""
        for child in self._children:
            child.stop(2.0)


@contextlib.contextmanager
def serve_tf_dispatcher(_config: Mapping[str, Any]) -> Iterator[Any]:
    """Be the dispatcher."""
    import tensorflow as tf

    server = tf.data.experimental.service.DispatchServer()
    yield {"address": server.target.split("://")[1]}
    server.stop()


@contextlib.contextmanager
def serve_tf_worker(config: Mapping[str, Any]) -> Iterator[Any]:
    """Be a worker."""
    import tensorflow as tf

    server = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(dispatcher_address=config["dispatcher"], heartbeat_interval_ms=1000)
    )
    yield {}
    server.stop()

"""Frameworks that deliver ready-made batches: hetero, torch's loader processes, tf.data service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from feeds import ready_batches, ready_feeds
from peers import tf_service

from transports import Transport


class Hetero(Transport, ready_feeds.Hetero):
    """Endpoints of a real pool, a real reader: framing, checksums, order, window."""


class HeteroTls(Hetero):
    """The same under mutual TLS."""

    under_tls = True


class HeteroLoader(Transport, ready_feeds.HeteroLoader):
    """The loader that users have, over the same endpoints."""


class HeteroAudited(HeteroLoader):
    """The same with a ledger."""

    has_ledger = True


class TorchWorkers(Transport, ready_feeds.TorchWorkers):
    """``torch.utils.data.DataLoader``: a process per endpoint, shared memory."""


class TfDataService(Transport):
    """A dispatcher, a worker per endpoint, ready-made tensors, uncompressed."""

    def start(self) -> None:
        """Start dispatcher and workers."""
        self._service = tf_service.Service(self.config["num_endpoints"], heartbeat_interval_ms=1000)

    def batches(self) -> Iterator[Any]:
        """Yield arrays over the received memory."""
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensors(tf.constant(ready_batches.ready_batch(self.config["nbytes"]))).repeat()
        dataset = dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode="parallel_epochs", service=self._service.url, compression=None
            )
        )
        yield from dataset.as_numpy_iterator()

    def stop(self) -> None:
        """End dispatcher and workers."""
        self._service.stop()

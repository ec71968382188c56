"""Mix-ins for competitors: ready-made batches from endpoints of a real pool or from torch's loader processes.

Their configuration: the number of processes ``num_endpoints``, and ``nbytes`` of a batch unless the benchmark names a
data set.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Competitor

from feeds import ready_batches, served
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.datasets import get_factory
from hetero.reader.reader import Reader
from hetero.spec import DatasetSpec
from hetero.wire.certificates import make_certificates
from hetero.wire.tls import Tls


class Feed(Competitor):
    """What both have."""

    pin_memory = False
    """Deliver into pinned memory."""

    def spec(self) -> DatasetSpec:
        """Return the data set, one of `ready_batches`, whose every sample is a batch."""
        return ready_batches.ready_batches(self.config["nbytes"])

    def local(self) -> Any:
        """Build the data set here."""
        spec = self.spec()
        return get_factory(spec.name).function(**spec.arguments)


class Hetero(Feed):
    """Endpoints of a real pool, a real reader: framing, checksums, order, window."""

    under_tls = False
    """Mutual TLS between them."""

    def start(self) -> None:
        """Start the endpoints."""
        self._exits = contextlib.ExitStack()
        options = {"script": served.READY_SCRIPT, "num_endpoints": self.config["num_endpoints"]}
        tls = self._make_tls() if self.under_tls else None
        if tls is not None:
            options["tls_dir"] = str(tls.directory)
        pool = self._exits.enter_context(harness.server("endpoints", options))
        self._fleet = self._exits.enter_context(served.fleet(pool.ask(), tls=tls))

    def batches(self) -> Iterator[Any]:
        """Yield in order."""
        spec = self.spec()
        requests = (
            BatchRequest(
                spec=spec, work=IndexedWork(np.array([step])), seed=0, epoch=0, position=step, collate=False, step=step
            )
            for step in itertools.count()
        )
        reader = Reader(self._fleet, requests, prefetch_factor=served.PREFETCH_FACTOR, allocate=self._allocate())
        return self._exits.enter_context(reader)

    def stop(self) -> None:
        """End reader, fleet and endpoints."""
        self._exits.close()

    def _make_tls(self) -> Tls:
        folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        make_certificates(folder, ["algo-1"])
        return Tls(folder, "algo-1")

    def _allocate(self) -> Any:
        if not self.pin_memory:
            return None
        from hetero.torch.pinned import allocate_pinned

        return allocate_pinned


class HeteroLoader(Feed):
    """The loader that users have, over endpoints of a real pool."""

    has_ledger = False
    """Enter what is delivered into a ledger, as ``--audit`` does."""

    def start(self) -> None:
        """Start the endpoints and make the loader."""
        from hetero.audit.ledger import DIRECTORY_VARIABLE
        from hetero.torch import DataLoader

        self._exits = contextlib.ExitStack()
        if self.has_ledger:
            os.environ[DIRECTORY_VARIABLE] = self._exits.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        options = {"script": served.READY_SCRIPT, "num_endpoints": self.config["num_endpoints"]}
        served.Session(self._exits.enter_context(harness.server("endpoints", options)).ask()).enter()
        self._loader: DataLoader[Any] = DataLoader(
            self.spec(), batch_size=None, pin_memory=self.pin_memory, prefetch_factor=served.PREFETCH_FACTOR
        )

    def batches(self) -> Iterator[Any]:
        """Yield tensors in order."""
        yield from self._loader

    def stop(self) -> None:
        """End the endpoints."""
        self._exits.close()


class TorchWorkers(Feed):
    """``torch.utils.data.DataLoader``: a process per endpoint, forked, shared memory."""

    def batches(self) -> Iterator[Any]:
        """Yield tensors over shared memory."""
        import torch.utils.data

        yield from torch.utils.data.DataLoader(
            self.local(),
            batch_size=None,
            num_workers=self.config["num_endpoints"],
            multiprocessing_context="fork",
            pin_memory=self.pin_memory,
        )

"""Compressed batches from real endpoints: the same bytes, fewer on the way."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero.reader.reader import Reader
from hetero.wire.compression import COMPRESSIONS

pytest.importorskip("lz4")
pytest.importorskip("zstandard")

BATCH_BYTES = 8_000_000
"""Of the data set ``reusing``, whose collation fills one array again and again."""


def without(job: Any, module: str) -> None:
    """Have the endpoints' processes fail to import a module."""
    job.script.write_text(f"import sys\nsys.modules[{module!r}] = None\n" + job.script.read_text())


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_reader_with_compression_delivers_local_bytes(job: Any, tools: Any, name: str) -> None:
    job.pool(num_endpoints=2)
    fleet = job.fleet()
    wanted = tools.requests(tools.spec(width=20_000))
    compressed = [replace(request, compression=name) for request in wanted]
    assert tools.digest(list(Reader(fleet, iter(compressed)))) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.received_bytes > 12 * 4 * 20_000 * 8 * 0.8  # random numbers hardly shrink
    assert fleet.stats.uncompressed == fleet.stats.retries == 0


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_window_counts_what_compressed_batches_hold(job: Any, tools: Any, name: str) -> None:
    job.pool()
    fleet = job.fleet()
    wanted = [
        replace(request, compression=name)
        for request in tools.requests(tools.spec("reusing"), num_batches=12, batch_size=1)
    ]
    received: list[tuple[int, int]] = []

    def note(nbytes: int, saved_bytes: int) -> None:
        received.append((nbytes, saved_bytes))

    with Reader(fleet, iter(wanted), prefetch_factor=12, on_received=note) as reader:
        window = reader._window
        for request in wanted:
            tools.wait_for(lambda: window.outcomes)
            with fleet.lock:
                assert window._held_bytes >= BATCH_BYTES * len(window.outcomes)
            assert np.unique(next(reader)).tolist() == request.work.indices.tolist()
        assert window._held_bytes == 0
    assert fleet.stats.batches == 12
    assert fleet.stats.received_bytes < 12 * BATCH_BYTES / 20
    assert fleet.stats.received_bytes + fleet.stats.saved_bytes >= 12 * BATCH_BYTES
    assert sum(nbytes - saved_bytes for nbytes, saved_bytes in received) == fleet.stats.received_bytes
    assert sum(saved_bytes for _, saved_bytes in received) == fleet.stats.saved_bytes


@pytest.mark.parametrize(("name", "module"), [("lz4", "lz4.block"), ("zstd", "zstandard")])
def test_endpoint_without_the_package_sends_as_it_is_and_is_named_once(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture, name: str, module: str
) -> None:
    without(job, module)
    job.pool(num_endpoints=2)
    fleet = job.fleet()
    wanted = tools.requests(tools.spec())
    with caplog.at_level(logging.WARNING, "hetero"):
        for _ in range(2):
            compressed = [replace(request, compression=name) for request in wanted]
            assert tools.digest(list(Reader(fleet, iter(compressed)))) == tools.digest(tools.local(job.script, wanted))
    assert (fleet.stats.uncompressed, fleet.stats.saved_bytes, fleet.stats.retries) == (24, 0, 0)
    package = {"lz4": "lz4", "zstd": "zstandard"}[name]
    (warning,) = [record.getMessage() for record in caplog.records if "compressed" in record.getMessage()]
    assert warning.startswith(
        f"batches from algo-1 are not compressed, because the package {package} is not installed there: pip"
    )

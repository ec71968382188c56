"""What does a cache of decoded images save, from the second epoch on?

Question: how many samples per CPU-second of the data host does the jpeg pipeline make, with and without
``@hetero.dataset(cache=...)``? Are the batches the same?

Method: two endpoints on this machine, `hetero.torch.DataLoader`, epochs of 15 batches of 64 photographs of about 500 x
375 pixels. The warm-up is two epochs, so every measured sample was loaded before. The figure is the CPU time of the
endpoints: on separate hosts, the trainer's is elsewhere. The disk is a folder whose files the kernel keeps in memory.

    python benchmarks/bench_cache.py --short
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import bench_pipelines
import harness
from harness import Column, Trial
from peers import endpoint_script, hetero_endpoints

EPOCH_BATCHES = 15
BOUND = 3.0

COLUMNS = harness.columns(
    "samples_per_s",
    Column(title="samples per CPU-s of the supply", metric="samples_per_supply_cpu_s", form="{:,.0f}"),
    *("trainer_cpu_s_per_gb", "supply_cpu_s_per_gb", "first_batch_s"),
    Column(title="first 45 batches, digest", metric="digest", form="{:.0f}"),
)


class Digesting(hetero_endpoints.HeteroEndpoints):
    """Also reads three epochs at the beginning, and remembers a digest of them."""

    def start(self) -> None:
        """Start the endpoints, and read three epochs."""
        super().start()
        hasher = hashlib.blake2b(digest_size=6)
        for _ in range(3):
            for images, labels in self._loader:
                hasher.update(images.numpy().tobytes() + labels.numpy().tobytes())
        self._digest = int.from_bytes(hasher.digest(), "little")

    def facts(self) -> dict[str, Any]:
        """Return the digest too."""
        return {**super().facts(), "digest": self._digest}


COMPETITORS = {"without": Digesting, "memory": Digesting, "disk": Digesting}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=4.0, short_seconds=2.0)
    args = parser.parse_args(argv)
    plan = harness.plan("cache", parser, args)
    if not args.estimate:
        bench_pipelines.make_photos()
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        os.environ[endpoint_script.CACHE_VARIABLE] = folder  # not in the configuration, which is published
        rows = plan.compare(__file__, make_trials(), warmup_batches=2 * EPOCH_BATCHES, min_batches=EPOCH_BATCHES)
    title = "A cache of decoded images"
    text = harness.report(title, rows, COLUMNS, figures, ratio_metric="samples_per_supply_cpu_s")
    plan.write(rows, text)
    return 0


def make_trials() -> list[Trial]:
    """Return the rows to measure."""
    caches = {"without": "", "memory": "memory", "disk": "disk"}
    shared = {"pipeline": "jpeg", "root": str(bench_pipelines.PHOTOS), "epoch_batches": EPOCH_BATCHES}
    return [
        Trial(
            competitor=name,
            group="jpeg",
            config={**shared, "cache": cache},
            environment=bench_pipelines.ENVIRONMENT,
            fresh=False,
            start_s=12.0,
            warmup_s=3.0,
        )
        for name, cache in caches.items()
    ]


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say whether the cache saves enough, and whether the batches are the same."""
    lines = [
        harness.target(
            f"samples per CPU-s, {name} x without",
            harness.ratio(rows, name, "without", "samples_per_supply_cpu_s"),
            BOUND,
        )
        for name in ("memory", "disk")
    ]
    digests = {value for row in rows for value in row.values("digest")}
    return [*lines, harness.target("different digests of three epochs", len(digests), 1, at_most=True)]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS)
    sys.exit(main())

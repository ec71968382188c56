"""Measures how long this process waits for storage, apart from computing."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from pathlib import Path

__all__ = ["MAX_SHARDS", "SHARD", "SHARD_WAITS_S", "run_delay_s", "slowest_shards", "wait_clock_s"]

MAX_SHARDS = 5
"""Shards that a report names. No measurement chose it: a reader of a report looks at a few."""
SHARD = "shard "
"""Begin of the name of a statistic of an endpoint that is the wait for a shard."""
SHARD_WAITS_S: defaultdict[str, float] = defaultdict(float)
"""Seconds that this process has waited for each shard, by path or URL. `hetero.shards` counts them."""
_SCHEDULING = Path("/proc/thread-self/schedstat")


def wait_clock_s() -> float:
    """Return the reading of a clock that runs while this thread waits, mostly for storage.

    It stands still while the thread computes, or waits for a CPU that another thread uses. A reading takes 5 us.
    """
    return time.perf_counter() - time.thread_time() - run_delay_s()


def run_delay_s() -> float:
    """Return how many seconds this thread has waited for a CPU, or 0 if the system does not count them."""
    try:
        return int(_SCHEDULING.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def slowest_shards(waits_s: dict[str, float]) -> dict[str, float]:
    """Return the entries with the longest waits, at most `MAX_SHARDS`."""
    return dict(heapq.nlargest(MAX_SHARDS, waits_s.items(), key=lambda entry: entry[1]))

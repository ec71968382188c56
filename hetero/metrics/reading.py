"""Measures how long this process waits for storage, apart from computing."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "MAX_SHARDS",
    "SHARD",
    "SHARD_WAITS_S",
    "off_cpu_s",
    "run_delay_s",
    "shard_waits_s",
    "slowest_shards",
    "take_shard_waits_s",
    "wait_clock_s",
]

MAX_SHARDS = 8
"""Slowest shards that a process or host names. An endpoint's packet to its pool has room for this many of the longest
paths (tests/metrics/test_reading.py)."""
SHARD = "shard "
"""Begin of the name of a statistic of an endpoint that is the wait for a shard."""
SHARD_WAITS_S: defaultdict[str, float] = defaultdict(float)
"""Seconds that this process has waited for each shard, by path or URL. `hetero.shards` counts them with `off_cpu_s`."""


def off_cpu_s() -> float:
    """Return the reading of a clock that stands still while this process computes. A reading takes 0.3 us.

    Threads of a library count too, because a tokenizer or a Parquet reader computes in them while its caller waits. So
    the clock may run backwards: where two threads compute, it loses a second in a second.
    """
    return time.perf_counter() - time.process_time()


def wait_clock_s() -> float:
    """Return the reading of a clock that runs while this thread waits, mostly for storage.

    It also stands still while the thread waits for a CPU that another process uses. A reading takes 11 us, which is
    too long for each block: with it, rows of 1 kB took 4.4 us instead of 3.5 us.
    """
    return off_cpu_s() - run_delay_s()


def run_delay_s(thread: str = "thread-self") -> float:
    """Return how many seconds a thread has waited for a CPU, or 0 if the system does not count them.

    Args:
        thread: Its folder in ``/proc``.
    """
    try:
        return int(Path("/proc", thread, "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def take_shard_waits_s() -> dict[str, float]:
    """Return `SHARD_WAITS_S`, which is empty afterwards."""
    # Other threads may add shards meanwhile, so take one after the other.
    return dict(SHARD_WAITS_S.popitem() for _ in range(len(SHARD_WAITS_S)))


def slowest_shards(waits_s: Mapping[str, float]) -> dict[str, float]:
    """Return the entries with the longest waits, at most `MAX_SHARDS`."""
    return dict(heapq.nlargest(MAX_SHARDS, waits_s.items(), key=lambda entry: entry[1]))


def shard_waits_s(statistics: Mapping[str, float]) -> dict[str, float]:
    """Return the waits for shards that are among the statistics of endpoints."""
    return {name.removeprefix(SHARD): value for name, value in statistics.items() if name.startswith(SHARD)}

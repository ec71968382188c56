"""How fast the processes of a host are if they share its CPUs."""

from __future__ import annotations

import functools
import itertools

__all__ = ["fair_share", "pace"]


def fair_share(cpus: float, num_processes: int, each: float, num_threads: int, thread: float) -> float:
    """Return the CPU share that a process or thread gets at most. The system divides CPU time in equal shares.

    If a process or thread needs less than its share, it leaves the rest to the others.

    Args:
        cpus: CPUs to share.
        num_processes: Processes that need a share of ``each``.
        each: Between 0 and 1.
        num_threads: Threads that need a share of ``thread``.
        thread: Between 0 and 1.
    """
    if num_processes * each + num_threads * thread <= cpus:
        return 1.0
    equal = cpus / (num_processes + num_threads)
    # The side that needs less than an equal share gets all it needs.
    if each < equal and num_threads:
        return min(1.0, (cpus - num_processes * each) / num_threads)
    if thread < equal and num_processes:
        return min(1.0, (cpus - num_threads * thread) / num_processes)
    return equal


# A timeline asks thousands of times, with few different arguments.
@functools.lru_cache(maxsize=65536)
def pace(
    vcpus: int, cpu_s: float, wait_s: float, slower: tuple[tuple[float, float], ...],
    thread: float, num_busy: int, num_threads: int, receiving: float,
) -> tuple[float, float]:  # fmt: skip
    """Return how fast each busy process is, relative to one that is alone, and how many times longer a step takes.

    Args:
        vcpus: CPUs of the host.
        cpu_s: CPU seconds of a sample in a process that is alone.
        wait_s: Seconds that it waits for storage.
        slower: Pairs of a share of busy CPUs, in ascending order, and how many times more CPU time a sample then costs.
        thread: CPU share that a thread of a rank needs during a step.
        num_busy: Processes that make a batch.
        num_threads: Threads of ranks that are in a step.
        receiving: CPUs that receiving batches takes.
    """
    alone_s = cpu_s + wait_s
    need = cpu_s / alone_s if alone_s > 0 else 1.0
    cpus = max(1.0, vcpus - receiving)
    share = fair_share(cpus, num_busy, need, num_threads, thread)
    left = max(1e-9, cpus - num_threads * min(thread, share))
    busy = min(1.0, (num_busy * need + num_threads * min(thread, share) + receiving) / vcpus)
    # Contention is a matter of the whole host: memory bandwidth and hyper-threads.
    factor = _interpolated(busy, slower)
    stretch = max(1.0, thread / share) if num_threads else 1.0
    own_s = cpu_s * factor
    # Either each process takes its own time to compute and wait, or the CPUs that are left are always busy.
    sample_s = max(own_s + wait_s, own_s * max(1, num_busy) / left)
    return alone_s / sample_s, stretch


def _interpolated(share: float, points: tuple[tuple[float, float], ...]) -> float:
    """Return the factor at a share. Beyond the last point it grows as between the last two."""
    for (left, low), (right, high) in itertools.pairwise(points):
        if share <= right:
            return low + (high - low) * (share - left) / (right - left)
    if len(points) < 2:
        return points[0][1]
    (left, low), (right, high) = points[-2:]
    return high + (high - low) * (share - right) / (right - left)

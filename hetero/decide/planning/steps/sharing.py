"""How fast the processes of a host are if they share its CPUs."""

from __future__ import annotations

import functools
import itertools

__all__ = ["fair_share", "pace"]


def fair_share(cpus: float, num_processes: int, each: float, num_threads: int, thread: float) -> float:
    """Return the largest share of a CPU that a process or thread gets. The system divides CPU time in equal shares.

    If processes need less than an equal share, they leave the rest to the threads, and the other way round.

    Args:
        cpus: CPUs to share.
        num_processes: Number of processes.
        each: Share of a CPU that each process needs, between 0 and 1.
        num_threads: Number of threads.
        thread: Share of a CPU that each thread needs, between 0 and 1.
    """
    if num_processes * each + num_threads * thread <= cpus:
        return 1.0
    equal = cpus / (num_processes + num_threads)
    # The processes get all that they need, and the threads divide the rest.
    if each < equal and num_threads:
        return min(1.0, (cpus - num_processes * each) / num_threads)
    # The threads get all that they need, and the processes divide the rest.
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
    # Share of a CPU that a process needs. It needs none while it waits for storage.
    process_share = cpu_s / alone_s if alone_s > 0 else 1.0
    cpus = max(1.0, vcpus - receiving)
    largest_share = fair_share(cpus, num_busy, process_share, num_threads, thread)
    thread_cpus = num_threads * min(thread, largest_share)
    cpus_for_processes = max(1e-9, cpus - thread_cpus)
    busy_share = min(1.0, (num_busy * process_share + thread_cpus + receiving) / vcpus)
    # A sample costs more CPU time on a busy host, because processes share memory bandwidth and hyper-threads.
    own_cpu_s = cpu_s * _interpolated(busy_share, slower)
    # Either each process takes its own time to compute and wait, or the CPUs for the processes are always busy.
    sample_s = max(own_cpu_s + wait_s, own_cpu_s * max(1, num_busy) / cpus_for_processes)
    step_factor = max(1.0, thread / largest_share) if num_threads else 1.0
    return alone_s / sample_s, step_factor


def _interpolated(share: float, points: tuple[tuple[float, float], ...]) -> float:
    """Return the factor at a share, on straight lines between points (share, factor).

    Beyond the last point, the last line goes on.
    """
    if len(points) < 2:
        return points[0][1]
    lines = itertools.pairwise(points)
    (left, low), (right, high) = next((line for line in lines if share <= line[1][0]), points[-2:])
    return low + (high - low) * (share - left) / (right - left)

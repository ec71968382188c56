"""How fast the processes of a host are if they share its CPUs."""

from __future__ import annotations

import functools
import itertools

__all__ = ["fair_share", "pace"]


def fair_share(cpus: float, num_processes: int, process_need: float, num_threads: int, thread_need: float) -> float:
    """Return the largest share of a CPU that a process or thread gets. The system divides CPU time in equal shares.

    If processes need less than an equal share, they leave the rest to the threads, and the other way round.

    Args:
        cpus: CPUs to share.
        num_processes: Number of processes.
        process_need: Share of a CPU that each process needs, between 0 and 1.
        num_threads: Number of threads.
        thread_need: Share of a CPU that each thread needs, between 0 and 1.
    """
    if num_processes * process_need + num_threads * thread_need <= cpus:
        return 1.0
    equal_share = cpus / (num_processes + num_threads)
    # The processes get all that they need, and the threads divide the rest.
    if process_need < equal_share and num_threads:
        return min(1.0, (cpus - num_processes * process_need) / num_threads)
    # The threads get all that they need, and the processes divide the rest.
    if thread_need < equal_share and num_processes:
        return min(1.0, (cpus - num_threads * thread_need) / num_processes)
    return equal_share


# A timeline asks thousands of times, with few different arguments.
@functools.lru_cache(maxsize=65536)
def pace(
    vcpus: int, cpu_s: float, wait_s: float, cost_factors: tuple[tuple[float, float], ...],
    thread_need: float, num_busy: int, num_threads: int, receiving_cpus: float,
) -> tuple[float, float]:  # fmt: skip
    """Return how fast each busy process is, relative to one that is alone, and how many times longer a step takes.

    Args:
        vcpus: CPUs of the host.
        cpu_s: CPU seconds of a sample in a process that is alone.
        wait_s: Seconds that it waits for storage.
        cost_factors: Pairs of a share of busy CPUs, in ascending order, and how many times more CPU time a sample then
            costs.
        thread_need: CPU share that a thread of a rank needs during a step.
        num_busy: Processes that make a batch.
        num_threads: Threads of ranks that are in a step.
        receiving_cpus: CPUs that receiving batches takes.
    """
    alone_s = cpu_s + wait_s
    # Share of a CPU that a process needs. It needs none while it waits for storage.
    process_need = cpu_s / alone_s if alone_s > 0 else 1.0
    # Divide the CPUs: receiving first, then the threads of ranks, then the rest for the processes.
    cpus = max(1.0, vcpus - receiving_cpus)
    largest_share = fair_share(cpus, num_busy, process_need, num_threads, thread_need)
    thread_cpus = num_threads * min(thread_need, largest_share)
    cpus_for_processes = max(1e-9, cpus - thread_cpus)
    busy_share = min(1.0, (num_busy * process_need + thread_cpus + receiving_cpus) / vcpus)
    # A sample costs more CPU time on a busy host, because processes share memory bandwidth and hyper-threads.
    busy_cpu_s = cpu_s * _interpolated(busy_share, cost_factors)
    # Either each process takes its own time to compute and wait, or the CPUs for the processes are always busy.
    sample_s = max(busy_cpu_s + wait_s, busy_cpu_s * max(1, num_busy) / cpus_for_processes)
    # A thread that gets less of a CPU than it needs makes the step longer.
    step_factor = max(1.0, thread_need / largest_share) if num_threads else 1.0
    return alone_s / sample_s, step_factor


def _interpolated(share: float, points: tuple[tuple[float, float], ...]) -> float:
    """Return the factor at a share, on straight lines between points (share, factor).

    Beyond the last point, the last line goes on.
    """
    if len(points) < 2:
        return points[0][1]
    lines = itertools.pairwise(points)
    # Take the first line that ends at or after the share, or the last line.
    (left, low), (right, high) = next((line for line in lines if share <= line[1][0]), points[-2:])
    return low + (high - low) * (share - left) / (right - left)

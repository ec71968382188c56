"""How fast the processes of a host run when they share its vCPUs.

The operating system divides CPU time fairly: a process that needs less than its fair share gets all that it needs, and
the others divide the rest. A process that waits for storage needs no CPU meanwhile. The curve of a host says how much
slower each process is when many are busy, because they share memory bandwidth and the two threads of a core.
"""

from __future__ import annotations

import functools
import itertools
import math

from planning.workload import Curve

__all__ = ["fair_share", "progress", "speed_at"]


def speed_at(curve: Curve, busy: float) -> float:
    """Return the speed of one process when this share of the vCPUs is busy."""
    for (left, left_speed), (right, right_speed) in itertools.pairwise(curve):
        if busy <= right:
            return left_speed + (right_speed - left_speed) * (busy - left) / (right - left)
    return curve[-1][1]


def fair_share(cpus: float, demands: tuple[tuple[int, float], ...]) -> float:
    """Return the largest CPU share that a process can get, at most 1.

    Args:
        cpus: CPUs to divide.
        demands: Pairs of a number of processes and how much of a CPU each of them needs.
    """
    left, remaining = cpus, sorted(demands, key=lambda demand: demand[1])
    total = sum(count for count, _ in remaining)
    for count, need in remaining:
        if not total or need * total > left:
            break
        left -= need * count
        total -= count
    return 1.0 if not total else min(1.0, max(left, 0.01) / total)


@functools.lru_cache(maxsize=65536)
def progress(
    vcpus: int, curve: Curve, duty: float, num_busy: int, num_threads: int, thread_need: float, taken: float
) -> tuple[float, float]:
    """Return how fast a busy process progresses, and the CPU share that a rank's thread can get.

    A process that progresses with 1 takes as long for a batch as if it were alone on the host.

    Args:
        vcpus: vCPUs of the host.
        curve: See `planning.workload.Curve`.
        duty: CPU share of a process that is alone.
        num_busy: Processes that compute a batch, at least 1.
        num_threads: Threads of ranks in a step.
        thread_need: How much of a CPU each of these threads needs.
        taken: CPUs that receiving takes.
    """
    cpus = max(1.0, vcpus - taken)
    share = fair_share(cpus, ((num_busy, duty), (num_threads, thread_need)))
    ranks_cpus = num_threads * min(thread_need, share)
    available = max(0.1, cpus - ranks_cpus)
    speed = speed_at(curve, min(1.0, (num_busy * duty + ranks_cpus + taken) / vcpus))
    service, think = duty / speed, 1.0 - duty
    if num_busy <= available or think < 1e-9:
        alone = 1.0 / (service + think)
        return alone * min(1.0, available / num_busy) if think < 1e-9 else alone, share
    whole = math.floor(available)
    part = available - whole
    served = (1.0 - part) * _served(num_busy, whole, service, think) if whole else 0.0
    served += part * _served(num_busy, whole + 1, service, think)
    return served / num_busy, share


@functools.lru_cache(maxsize=65536)
def _served(num_processes: int, cpus: int, service: float, think: float) -> float:
    """Return the progress of all processes together that wait for storage and then need one of ``cpus`` in turn.

    Both times are exponential (the machine repair model): state j has j processes that need a CPU.
    """
    weight, weights, served = 1.0, 1.0, 0.0
    for needing in range(1, num_processes + 1):
        busy = min(needing, cpus)
        weight *= (num_processes - needing + 1) * service / (think * busy)
        weights += weight
        served += weight * busy / service
        if weights > 1e200:
            weight, weights, served = weight * 1e-200, weights * 1e-200, served * 1e-200
    return served / weights

"""How many endpoints a data host runs."""

from __future__ import annotations

import math

from hetero.decide.planning.machines import Machine
from hetero.decide.planning.steps.uncertain import UncertainFigures
from hetero.metrics.profile.profile import Profile

__all__ = ["MEMORY_SHARE", "MOST_PROCESSES_PER_CPU", "endpoints_on", "processes_per_cpu"]

MOST_PROCESSES_PER_CPU = 8
"""Largest number of processes per CPU that a plan proposes for data that waits for storage."""
MEMORY_SHARE = 0.9
"""Share of a host's memory that endpoints may use."""


def processes_per_cpu(cpu_s: float, wait_s: float) -> float:
    """Return how many processes keep one CPU busy, 1 to 8. A process that waits leaves its CPU to others.

    Args:
        cpu_s: CPU seconds of a sample.
        wait_s: Seconds that a sample waits, mostly for storage.
    """
    # While one process computes for ``cpu_s``, ``wait_s / cpu_s`` others wait.
    return min(MOST_PROCESSES_PER_CPU, 1 + wait_s / cpu_s) if cpu_s > 0 else 1.0


def endpoints_on(
    machine: Machine,
    figures: UncertainFigures,
    profile: Profile,
    *,
    wanted: int | None,
    has_enough_memory: bool = False,
) -> tuple[int, bool]:
    """Return the number of endpoints of a data host, and whether its memory limits this number.

    Args:
        machine: The host's type.
        figures: What a sample costs on it.
        profile: Has the memory that an endpoint needs.
        wanted: The number that the user wants. None means one per vCPU, or more if they wait for storage.
        has_enough_memory: Whether to assume that the memory suffices for any number.
    """
    cpu_s, wait_s = figures.costs_on(machine, machine.vcpus)
    # Position 0 of each array has the mean figures. They decide, because the host has the same number in all draws.
    number = wanted or math.floor(machine.vcpus * processes_per_cpu(float(cpu_s[0]), float(wait_s[0])))
    supply = profile.supply[0]
    # Memory of each endpoint alone, and memory that all endpoints of a host share.
    private_bytes = supply.endpoint_private_bytes.value if supply.endpoint_private_bytes else 0.0
    shared_bytes = supply.endpoint_shared_bytes.value if supply.endpoint_shared_bytes else 0.0
    if machine.memory_bytes is None or private_bytes <= 0 or has_enough_memory:
        return number, False
    num_fitting = int((machine.memory_bytes * MEMORY_SHARE - shared_bytes) // private_bytes)
    return max(0, min(number, num_fitting)), num_fitting < number

"""CPU time of a Ray cluster on this machine, by node, and of the whole machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from harness import descendants
from harness.usage import cpu_s

__all__ = ["CpuTimes"]

_IDLE_FIELDS = (3, 4)
"""Positions of idle and iowait after the name of a line in /proc/stat."""
_GUEST_FIELDS = 8
"""Fields before those of guests, whose time is part of the fields of user time."""


class CpuTimes:
    """CPU seconds since it was made.

    Args:
        cluster: What `ray_jobs.cluster.serve` yields.
        driver: Process id of the driver.
    """

    def __init__(self, cluster: Mapping[str, Any], driver: int) -> None:
        self._trees = {
            "trainer_node_cpu_s": [cluster["trainer_raylet"]],
            "data_node_cpu_s": [cluster["data_raylet"]],
            "all_cpu_s": [cluster["pid"], driver],
        }
        self._before = self._now()

    def since(self) -> dict[str, float]:
        """Return the CPU seconds of the processes of each node, of the whole job, and of the machine."""
        return {name: value - self._before[name] for name, value in self._now().items()}

    def _now(self) -> dict[str, float]:
        found = {name: sum(map(_tree_cpu_s, pids)) for name, pids in self._trees.items()}
        return {**found, "machine_cpu_s": _machine_cpu_s()}


def _tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of all below it."""
    return cpu_s([psutil.Process(pid), *descendants(pid)])


def _machine_cpu_s() -> float:
    """Return the CPU seconds of everything on this machine, including the kernel's interrupts."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", maxsplit=1)[0].split()[1 : 1 + _GUEST_FIELDS]
    ticks = sum(int(field) for position, field in enumerate(fields) if position not in _IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")

"""Space in /dev/shm, which torch's own loader workers, NCCL and gloo need. hetero itself uses none of it."""

from __future__ import annotations

import os

from hetero.doctor.finding import Finding, error, ok, warning
from hetero.doctor.surroundings import Surroundings

__all__ = ["FOLDER", "examine"]

FOLDER = "/dev/shm"
_SCARCE_BYTES = 512 * 2**20
"""Enough for eight workers with two batches of 32 MiB each."""


def examine(surroundings: Surroundings) -> list[Finding]:
    """Check the size and the free space of shared memory."""
    del surroundings
    to_do = "give the container more: docker run --shm-size=8g, or --ipc=host"
    try:
        facts = os.statvfs(FOLDER)
    except OSError as problem:
        return [error(f"there is no {FOLDER} ({problem.strerror}): torch's loader workers and NCCL fail", to_do)]
    room, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    found = f"{FOLDER} has {_mib(room)}, {_mib(free)} of it free"
    details = {"bytes": room, "free_bytes": free}
    if not os.access(FOLDER, os.W_OK):
        return [error(f"{FOLDER} cannot be written to: torch's loader workers and NCCL fail", to_do, **details)]
    if room < _SCARCE_BYTES:
        hint = " (64 MiB is Docker's default)" if room == 64 * 2**20 else ""
        why = "a homogeneous job's loader workers, or NCCL, may run out of it"
        return [warning(f"{found}{hint}: {why}", to_do, **details)]
    if free < _SCARCE_BYTES:
        to_do = f"look at what is in {FOLDER} and remove what no process uses any more"
        return [warning(f"{found}: it is nearly full", to_do, **details)]
    return [ok(found, **details)]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"

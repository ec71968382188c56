"""How many more endpoints the memory of a host holds.

Each endpoint builds the data set for itself. The first endpoint is added only if this host has memory for an endpoint
as large as the endpoints on data hosts. After that, the largest endpoint of this host gives the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.control.status import HostStatus
from hetero.documents.quantities import bytes_text
from hetero.errors import ConfigError
from hetero.metrics.hosts import HostUsage
from hetero.system.cgroups import free_memory
from hetero.system.memory import process_memory

__all__ = ["MemoryLimit", "limit_of", "limit_of_this_host"]

_SHARE = 0.7
"""Share of the free memory that additional endpoints may use. The rest is for the growth of endpoints and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The largest number of endpoints, and the reason for it."""

    endpoints: int
    reason: str


def limit_of(running: int, *, endpoint_bytes: int | None, free_bytes: int, total_bytes: int) -> MemoryLimit:
    """Return how many endpoints a host can run. Pure.

    Args:
        running: Endpoints that the host runs already. The result is never smaller.
        endpoint_bytes: Memory of one endpoint. If it is None, because the memory is not known, no endpoint is added.
        free_bytes: Free memory of the host.
        total_bytes: Memory of the host.
    """
    if endpoint_bytes is None:
        num_more, size_text = 0, "it is not known how much an endpoint uses"
    else:
        # Use only a share of the free memory, because endpoints and ranks grow. The measured memory of an endpoint may
        # be 0.
        num_more = int(_SHARE * free_bytes / max(1, endpoint_bytes))
        size_text = f"an endpoint uses {bytes_text(endpoint_bytes)}"
    return MemoryLimit(
        endpoints=running + num_more,
        reason=f"{bytes_text(free_bytes)} of {bytes_text(total_bytes)} of the host's memory are free, and {size_text}",
    )


def size_on_data_hosts(statuses: Iterable[HostStatus]) -> int | None:
    """Return an upper bound of an endpoint's memory: the most that a data host has used, divided by its endpoints.

    Args:
        statuses: The statuses of the data hosts.

    Returns:
        Bytes, or None if no data host with endpoints has reported its use.
    """
    sizes_bytes = []
    for status in statuses:
        if not status.usage_json or not status.endpoints:
            continue
        try:
            usage = HostUsage.from_json(status.usage_json)
        except ConfigError:
            # A malformed part of a status is logged when the report is written.
            continue
        sizes_bytes.append(usage.memory_peak_bytes // len(status.endpoints))
    return max(sizes_bytes, default=None)


def _free_and_total_bytes() -> tuple[int, int]:
    """Return the free memory and the whole memory of this host. A limit of a container makes less memory free."""
    machine, container_free_bytes = psutil.virtual_memory(), free_memory()
    if container_free_bytes is None:
        return machine.available, machine.total
    return min(container_free_bytes, machine.available), machine.total


def _private_bytes(pid: int) -> int | None:
    found = process_memory(Path("/proc") / str(pid))
    return None if found is None else found.private_bytes


def limit_of_this_host(
    running: int,
    *,
    used_pids: Sequence[int],
    data_hosts: Iterable[HostStatus],
    free_and_total_bytes: Callable[[], tuple[int, int]] = _free_and_total_bytes,
    private_bytes: Callable[[int], int | None] = _private_bytes,
) -> MemoryLimit:
    """Return how many endpoints this host can run.

    Args:
        running: Endpoints that this host runs.
        used_pids: Processes of the endpoints that ranks use. Other endpoints lack the data set, so they use less
            memory than they will need.
        data_hosts: Statuses of the data hosts.
        free_and_total_bytes: Returns the free memory and the whole memory of this host.
        private_bytes: Returns the private memory of a process, None if it is not known.
    """
    own_sizes = [size for pid in used_pids if (size := private_bytes(pid)) is not None]
    endpoint_bytes = max(own_sizes) if own_sizes else size_on_data_hosts(data_hosts)
    free_bytes, total_bytes = free_and_total_bytes()
    return limit_of(running, endpoint_bytes=endpoint_bytes, free_bytes=free_bytes, total_bytes=total_bytes)

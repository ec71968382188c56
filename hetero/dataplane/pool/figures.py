"""What other threads read from a pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hetero.control.directory import EndpointRecord
from hetero.dataplane.pool.slot import Slot
from hetero.errors import HeteroError
from hetero.system.memory import process_memory

__all__ = ["PoolFigures"]

_MEMORY_INTERVAL_S = 10.0


class PoolFigures:
    """The state of a pool, for any thread. `hetero.dataplane.pool.pool.EndpointPool` sets the fields."""

    _changed: threading.Condition
    """Guards the other fields."""
    _slots: Sequence[Slot]
    _published: tuple[EndpointRecord, ...]
    _failure: HeteroError | None
    _num_restarts: int
    _num_stuck: int
    _memory: tuple[int, int] | None = None
    _memory_s: float | None = None

    @property
    def num_used(self) -> int:
        """Endpoints in the directory that have received a request."""
        with self._changed:
            return sum(slot.is_used and slot.record is not None for slot in self._slots)

    @property
    def used_pids(self) -> tuple[int, ...]:
        """Process ids of endpoints that have received a request, so they build or have built a data set."""
        with self._changed:
            return tuple(slot.pid for slot in self._slots if slot.pid and slot.is_used)

    @property
    def num_running(self) -> int:
        """Endpoint processes, including those that start, but not those that left and are idle."""
        with self._changed:
            return sum(slot.is_started and not slot.is_idle_after_leaving for slot in self._slots)

    @property
    def failure(self) -> HeteroError | None:
        """The error that made the pool give up, None if it has not given up."""
        with self._changed:
            return self._failure

    @property
    def records(self) -> tuple[EndpointRecord, ...]:
        """The endpoints that serve now."""
        with self._changed:
            return self._published

    @property
    def num_restarts(self) -> int:
        """Crashed processes that were started again."""
        with self._changed:
            return self._num_restarts

    @property
    def num_stuck(self) -> int:
        """Processes that were killed because they were stuck."""
        with self._changed:
            return self._num_stuck

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the living endpoints."""
        with self._changed:
            return tuple(slot.pid for slot in self._slots if slot.pid)

    def memory(self) -> tuple[int, int] | None:
        """Return the private bytes of all endpoints together, and the most shared bytes of one. None without endpoints.

        The kernel counts the pages of a process for this. The result is therefore up to 10 s old.
        """
        now_s = time.monotonic()
        with self._changed:
            is_old = self._memory_s is None or now_s - self._memory_s >= _MEMORY_INTERVAL_S
            if not is_old:
                return self._memory
            self._memory_s = now_s
        found = [each for pid in self.pids if (each := process_memory(Path(f"/proc/{pid}"))) is not None]
        memory = None
        if found:
            memory = sum(each.private_bytes for each in found), max(each.shared_bytes for each in found)
        with self._changed:
            self._memory = memory
        return memory

    def statistics(self) -> dict[str, float]:
        """Return sums of the endpoints' `EndpointStatistics` over all processes, including ended ones."""
        total: dict[str, float] = {}
        with self._changed:
            for slot in self._slots:
                for part in (slot.past_statistics, slot.statistics):
                    for name, value in part.items():
                        total[name] = total.get(name, 0) + value
        return total

    def counters(self) -> dict[str, int]:
        """Return this host's counters under the names that the report uses."""
        statistics = self.statistics()
        of_caches = {
            "samples taken from the cache": int(statistics.get("num_kept", 0)),
            "samples loaded for the cache": int(statistics.get("num_loaded", 0)),
            "damaged samples in the cache": int(statistics.get("num_damaged", 0)),
        }
        return {
            **{name: count for name, count in of_caches.items() if count},
            "authentication failures": int(statistics.get("auth_failures", 0)),
            "endpoint restarts": self.num_restarts,
            "stuck endpoints": self.num_stuck,
            "milliseconds of computing batches": int(1000 * statistics.get("busy_s", 0)),
            "batches computed": int(statistics.get("num_batches", 0)),
            "emulation overruns": int(statistics.get("num_overruns", 0)),
        }

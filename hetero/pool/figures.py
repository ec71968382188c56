"""The state of a pool that other threads read."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hetero.control.members.directory import EndpointRecord
from hetero.errors import HeteroError
from hetero.pool.slot import Slot

__all__ = ["PoolFigures"]


class PoolFigures:
    """The state of a pool, for any thread. `hetero.pool.pool.EndpointPool` sets the fields."""

    failure: HeteroError | None
    """The error that made the pool give up, None if it has not given up."""
    records: tuple[EndpointRecord, ...]
    """The endpoints that serve now."""
    num_restarts: int
    """Crashed processes that were started again."""
    num_stuck: int
    """Processes that were killed because they were stuck."""
    _changed: threading.Condition
    """Guards the slots. The fields above are replaced as a whole."""
    _slots: Sequence[Slot]

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
    def pids(self) -> tuple[int, ...]:
        """Process ids of the living endpoints."""
        with self._changed:
            return tuple(slot.pid for slot in self._slots if slot.pid)

    def memory(self) -> tuple[int, int] | None:
        """Return the private bytes of all endpoints together, and the largest number of shared bytes of one endpoint.

        Endpoints report these numbers every 10 s, and when they end. None if no endpoint has reported them.
        """
        with self._changed:
            reported = [slot.memory for slot in self._slots if slot.memory is not None]
        if not reported:
            return None
        # Endpoints share nearly the same memory, so it counts once.
        return sum(private for private, _ in reported), max(shared for _, shared in reported)

    def statistics(self) -> dict[str, float]:
        """Return sums of the endpoints' statistics over all processes, including ended ones.

        `hetero.endpoint.endpoint.Endpoint.statistics` has their names.
        """
        total: dict[str, float] = {}
        with self._changed:
            for slot in self._slots:
                for statistics in (slot.past_statistics, slot.statistics):
                    for name, value in statistics.items():
                        total[name] = total.get(name, 0) + value
        return total

    def counters(self) -> dict[str, int]:
        """Return this host's counters under the names that the report uses."""
        statistics = self.statistics()
        # These counters are left out if they are 0, because most data sets have no cache.
        of_caches = {
            "parts of batches computed": int(statistics.get("num_parts", 0)),
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
            "milliseconds later than emulated": int(1000 * statistics.get("late_s", 0)),
        }

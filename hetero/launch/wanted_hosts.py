"""The number of data hosts that a running job could use, for autoscalers. Pure.

The estimate needs no idle time of hosts and no starving ranks. It follows from two measurements of the same window: how
many batches per second the ranks would take if they never waited, and how long an endpoint computes on a batch.
"""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero.control.members.directory import EndpointRecord
from hetero.control.status import HostStatus
from hetero.launch.reporting.summaries import longest_summary
from hetero.metrics.headspace import needed_for_headspace

__all__ = ["BATCHES_COUNTER", "BUSY_COUNTER", "Estimate", "WantedHosts", "Window", "window_of"]

BATCHES_COUNTER = "batches computed"
BUSY_COUNTER = "milliseconds of computing batches"
_MAX_BUSY = 0.9
"""Share of their time that endpoints may compute. Above it, batches queue and ranks begin to wait."""
_MIN_WINDOWS = 3
_MAX_WINDOWS = 12
_MAX_AGE_S = 120.0
"""If there is no new measurement for this time, the earlier ones are forgotten."""
_STUDENT_90 = {3: 2.92, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.86, 10: 1.833, 11: 1.812, 12: 1.796}
"""Quantile of Student's distribution for an interval of 90 %, by the number of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The number of data hosts that would keep the ranks from waiting."""

    hosts: int
    low: int
    """Lower end of the interval that contains the number in 90 % of cases, if the job stays as it is."""
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Totals since the start of the job. The difference of two such totals describes the time between them."""

    steps: Mapping[int, tuple[int, float]]
    """Number of measured steps and their seconds of compute, by rank, for the loader that has taken the most time."""
    num_batches: int
    """Batches that endpoints of any host have computed."""
    busy_s: float
    """Seconds that endpoints have computed, over all of their slots."""
    slots_per_data_host: float
    """Batches that a data host computes at the same time. 0 without data hosts."""
    trainer_slots: int
    """Batches that the endpoints on trainer hosts compute at the same time."""


class WantedHosts:
    """Collects windows, and estimates the number from the latest ones.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._before: Window | None = None
        self._began_s = clock()
        """Time when the present window began."""
        self._clock = clock
        self._values: collections.deque[tuple[float, float]] = collections.deque(maxlen=_MAX_WINDOWS)
        """Time of each window's end, and the number that follows from it."""

    def observe(self, now: Window) -> Estimate | None:
        """Add the latest totals. Return an estimate, or None while there are fewer than three windows."""
        now_s = self._clock()
        value = None if self._before is None else _wanted(self._before, now)
        # Reports of ranks and of endpoints come at different times, so a window lasts until both have changed.
        has_stopped = value is None and now_s - self._began_s > _MAX_AGE_S
        if value is not None:
            self._values.append((now_s, value))
        if has_stopped:
            self._values.clear()
        if value is not None or self._before is None or has_stopped:
            self._before, self._began_s = now, now_s
        # Three windows are always kept. If windows last longer than a minute, there would be no estimate otherwise.
        while len(self._values) > _MIN_WINDOWS and now_s - self._values[0][0] > _MAX_AGE_S:
            self._values.popleft()
        if len(self._values) < _MIN_WINDOWS:
            return None
        values = [number for _, number in self._values]
        mean = statistics.fmean(values)
        error = statistics.stdev(values) / math.sqrt(len(values))
        reach = _STUDENT_90[len(values)] * error
        return Estimate(
            hosts=math.ceil(mean), low=max(0, math.ceil(mean - reach)), high=max(0, math.ceil(mean + reach))
        )


def window_of(
    trainers: Sequence[HostStatus], others: Sequence[HostStatus], endpoints: Sequence[EndpointRecord]
) -> Window:
    """Return the totals in the last statuses of the hosts.

    Args:
        trainers: Status of each trainer host.
        others: Status of each data host, including hosts that have left.
        endpoints: The endpoints that serve now.
    """
    names = {status.host for status in trainers}
    slots: collections.Counter[str] = collections.Counter()
    for record in endpoints:
        slots[record.host] += record.num_slots
    of_data_hosts = [number for host, number in slots.items() if host not in names]
    counters = [status.counters for status in (*trainers, *others)]
    return Window(
        steps={
            report.rank: (longest.num_steps_measured, longest.compute_total_s)
            for status in trainers
            for report in status.ranks
            if (longest := longest_summary(report.summaries_json)) is not None
        },
        num_batches=sum(found.get(BATCHES_COUNTER, 0) for found in counters),
        busy_s=sum(found.get(BUSY_COUNTER, 0) for found in counters) / 1000,
        slots_per_data_host=statistics.fmean(of_data_hosts) if of_data_hosts else 0.0,
        trainer_slots=sum(number for host, number in slots.items() if host in names),
    )


def _wanted(before: Window, now: Window) -> float | None:
    """Return the number of data hosts wanted between two totals. None if the time between them shows too little."""
    num_batches, busy_s = now.num_batches - before.num_batches, now.busy_s - before.busy_s
    if not now.steps or num_batches <= 0 or busy_s <= 0 or now.slots_per_data_host <= 0:
        return None
    # Batches per second that the ranks would take if they never waited.
    demand = 0.0
    for rank, (steps, compute_s) in now.steps.items():
        steps_before, compute_before_s = before.steps.get(rank, (0, 0.0))
        # A restarted rank counts from zero again.
        if steps <= steps_before or compute_s <= compute_before_s:
            return None
        demand += (steps - steps_before) / (compute_s - compute_before_s)
    batches_per_slot_s = _MAX_BUSY * num_batches / busy_s
    slots = needed_for_headspace(demand, batches_per_slot_s)
    return max(0.0, slots - now.trainer_slots) / now.slots_per_data_host

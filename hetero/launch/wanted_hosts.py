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

__all__ = ["BATCHES_COUNTER", "BUSY_COUNTER", "Estimate", "Totals", "WantedHosts", "totals_of"]

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
class Totals:
    """Totals since the start of the job. The difference of two totals describes the window of time between them."""

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
        self._before: Totals | None = None
        """Totals at the beginning of the present window. None before the first call of `observe`."""
        self._began_s = clock()
        """Time when the present window began."""
        self._clock = clock
        self._numbers: collections.deque[tuple[float, float]] = collections.deque(maxlen=_MAX_WINDOWS)
        """Time of each window's end, and the number of data hosts that follows from the window."""

    def observe(self, now: Totals) -> Estimate | None:
        """Add the latest totals. Return an estimate, or None while there are fewer than three windows."""
        now_s = self._clock()
        # Ranks and endpoints report at different times. The number is None until all ranks and some endpoint have made
        # progress since the window began. Until then, the window goes on.
        number = None if self._before is None else _wanted_number(self._before, now)
        # Without progress for a long time, the job pauses. Windows from before a pause may say nothing about the time
        # after it.
        is_job_paused = number is None and now_s - self._began_s > _MAX_AGE_S
        if number is not None:
            self._numbers.append((now_s, number))
        if is_job_paused:
            self._numbers.clear()
        has_window_ended = number is not None or is_job_paused
        if has_window_ended or self._before is None:
            self._before, self._began_s = now, now_s
        # Three windows are always kept. If windows last longer than a minute, there would be no estimate otherwise.
        while len(self._numbers) > _MIN_WINDOWS and now_s - self._numbers[0][0] > _MAX_AGE_S:
            self._numbers.popleft()
        if len(self._numbers) < _MIN_WINDOWS:
            return None
        # The interval is the mean, plus and minus Student's quantile times the standard error of the mean.
        numbers = [number for _, number in self._numbers]
        mean = statistics.fmean(numbers)
        standard_error = statistics.stdev(numbers) / math.sqrt(len(numbers))
        half_width = _STUDENT_90[len(numbers)] * standard_error
        return Estimate(
            hosts=math.ceil(mean), low=max(0, math.ceil(mean - half_width)), high=math.ceil(mean + half_width)
        )


def totals_of(
    trainers: Sequence[HostStatus], others: Sequence[HostStatus], endpoints: Sequence[EndpointRecord]
) -> Totals:
    """Return the totals in the last statuses of the hosts.

    Args:
        trainers: Status of each trainer host.
        others: Status of each data host, including hosts that have left.
        endpoints: The endpoints that serve now.
    """
    trainer_names = {status.host for status in trainers}
    slots: collections.Counter[str] = collections.Counter()
    for record in endpoints:
        slots[record.host] += record.num_slots
    data_host_slots = [num_slots for host, num_slots in slots.items() if host not in trainer_names]
    all_counters = [status.counters for status in (*trainers, *others)]
    busy_ms = sum(counters.get(BUSY_COUNTER, 0) for counters in all_counters)
    return Totals(
        steps={
            report.rank: (longest.num_steps_measured, longest.compute_total_s)
            for status in trainers
            for report in status.ranks
            if (longest := longest_summary(report.summaries_json)) is not None
        },
        num_batches=sum(counters.get(BATCHES_COUNTER, 0) for counters in all_counters),
        busy_s=busy_ms / 1000,
        slots_per_data_host=statistics.fmean(data_host_slots) if data_host_slots else 0.0,
        trainer_slots=sum(num_slots for host, num_slots in slots.items() if host in trainer_names),
    )


def _wanted_number(before: Totals, now: Totals) -> float | None:
    """Return how many data hosts the ranks would have needed, between two totals, to never wait for a batch.

    Return None if a rank took no step, or endpoints computed no batch, or no data host served in that time.
    """
    num_batches, busy_s = now.num_batches - before.num_batches, now.busy_s - before.busy_s
    if not now.steps or num_batches <= 0 or busy_s <= 0 or now.slots_per_data_host <= 0:
        return None
    # Batches per second that all ranks together would take if they never waited. A rank takes one batch per step.
    wanted_batches_per_s = 0.0
    for rank, (steps, compute_s) in now.steps.items():
        steps_before, compute_before_s = before.steps.get(rank, (0, 0.0))
        # The totals of a restarted rank begin at zero again, so they may be smaller than before.
        if steps <= steps_before or compute_s <= compute_before_s:
            return None
        wanted_batches_per_s += (steps - steps_before) / (compute_s - compute_before_s)
    # Batches per second that one slot computes if it is busy for the largest allowed share of its time.
    slot_batches_per_s = _MAX_BUSY * num_batches / busy_s
    # Slots that together compute batches as fast as the ranks would take them.
    num_slots = needed_for_headspace(wanted_batches_per_s, slot_batches_per_s)
    # Trainer hosts have some of these slots. Data hosts must have the rest.
    return max(0.0, num_slots - now.trainer_slots) / now.slots_per_data_host

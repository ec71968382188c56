"""Bounds of a run's step time if real work took longer than the emulated time, or other programs used the CPUs. Pure.

An emulated step takes its stated time, and an emulated vCPU takes its stated time per sample. The real work of this
machine runs within these times. If it takes longer, it makes steps longer, never shorter. So the measured step time is
an upper bound. The measured time minus the time that the real work took in excess is a lower bound. A run without
emulation has such bounds too, if other programs used its CPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hetero.documents.quantities import seconds_text
from hetero.documents.text import counted, listing
from hetero.metrics.excess import SMALL_EXCESS, lost_cpu_share
from hetero.metrics.steps import StepSummary
from hetero.report.model import Report, RunFacts

__all__ = [
    "EMULATION_FLAGS",
    "excess_share",
    "least_step_time_s",
    "lost_share",
    "upper_bounds_note",
]

EMULATION_FLAGS = {"emulate_sample_s": "--emulate-sample-seconds", "emulate_step_s": "--emulate-step-seconds"}
"""Flag of each option that emulates."""

_LATE_COUNTER = "milliseconds later than emulated"


def least_step_time_s(ranks: Collection[StepSummary], events: Mapping[str, int]) -> float | None:
    """Return a lower bound of the mean step time that a job would have without the real work of this machine.

    The bound is the largest bound of a rank, because the job is as slow as its slowest rank. The bound of a rank is its
    measured time without two times that real work may have added. Real work is what this machine computes during a run,
    such as the script's own code. It makes a step longer only if it takes longer than the emulated time. The two times
    are:

    - The compute of its steps beyond the emulated time. This includes waits for other ranks in a collective. Such waits
      may not be due to real work, so the true step time may be longer than the bound.
    - The time when at least one emulated vCPU was late (`hetero.endpoint.compute.Compute.late_s`), at most the rank's
      data wait. A late vCPU delays the batch that it makes. A rank waits for one batch at a time, so its waits for
      delayed batches do not overlap. Their sum is at most the time when a vCPU was late.

    Sending and receiving batches is not emulated, so none of its time is subtracted.

    Args:
        ranks: Summaries of the same loader on all ranks.
        events: Counters of the run, summed over its hosts.

    Returns:
        Seconds per step, at most the measured step time. None if nothing is emulated, or a rank measured no step.
    """
    late_s = events.get(_LATE_COUNTER, 0) / 1000
    is_emulated = late_s > 0 or any(summary.step_wait_s is not None for summary in ranks)
    if not is_emulated or not ranks or not all(summary.num_steps_measured for summary in ranks):
        return None
    return max(_least_total_s(summary, late_s) / summary.num_steps_measured for summary in ranks)


def lost_share(run: RunFacts) -> float:
    """Return the share of a run's time that other programs may have taken. 0 if the share is too small to matter."""
    # If steps and samples are both emulated, busy CPUs make a time longer only if the real work takes longer than the
    # emulated work. `least_step_time_s` subtracts that excess already, so do not count it again. An option that was not
    # given is the text "None".
    if all(run.options.get(name, "None") != "None" for name in EMULATION_FLAGS):
        return 0.0
    share = lost_cpu_share(run.hosts)
    return share if share > SMALL_EXCESS else 0.0


def excess_share(report: Report) -> float:
    """Return the excess of a run's times, see `hetero.metrics.excess`.

    It is 1 - lower bound / upper bound of the step time. Without a measured step, it is the share of the time that
    other programs may have taken.
    """
    times_s = None if report.headline is None else report.headline.step_time_range_s
    if times_s is None or times_s[1] <= 0:
        return lost_share(report.run)
    return max(0.0, 1 - times_s[0] / times_s[1])


def _least_total_s(summary: StepSummary, late_s: float) -> float:
    """Return a lower bound of the time of a rank's measured steps, see `least_step_time_s`."""
    compute_s = summary.compute_total_s
    if summary.step_wait_s is not None:
        compute_s = min(compute_s, summary.step_wait_s * summary.num_steps_measured)
    return compute_s + max(0.0, summary.data_wait_total_s - late_s)


def upper_bounds_note(reports: Mapping[str, Report]) -> str:
    """Return a sentence about runs that other work of the machine made longer. Empty without such runs.

    The measured times of such a run are only upper bounds.

    Args:
        reports: The runs by name.
    """
    found = []
    for name, report in reports.items():
        times_s = None if report.headline is None else report.headline.step_time_range_s
        # Bounds whose texts are equal would only confuse the reader.
        if times_s is not None and seconds_text(times_s[0]) != seconds_text(times_s[1]):
            found.append(
                f"{name} (a step took {seconds_text(times_s[1])}, without it {seconds_text(times_s[0])} or more)"
            )
        elif times_s is None and (share := excess_share(report)):
            found.append(f"{name} (up to {100 * share:.0f} % of its time)")
    if not found:
        return ""
    return (
        f"Other work of this machine shows in {len(found)} of {counted(len(reports), 'run')}, so their times are "
        f"upper bounds: {listing(found)}."
    )

"""How much of a run's time others may have taken: other programs, other machines, or work that exceeds an emulation.

The *excess* is the largest share of a measured time that may be due to others. A report, a profile, a canary run and a
study treat it alike:

    always             the interval of a time begins at (1 - excess) x time
    > SMALL_EXCESS     the first sentence contains the excess
    > MAX_EXCESS       the answer is refused, because most of it would be about the others
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero.metrics.hosts import HostUsage

__all__ = ["MAX_EXCESS", "RUN_AGAIN", "SMALL_EXCESS", "excess_text", "lost_cpu_share"]

SMALL_EXCESS = 0.05
"""Excess that needs no words, because the errors of a plan's own model are as large: 4 % for the speed of endpoints,
and 2 % for a step."""
MAX_EXCESS = 0.35
"""Largest excess with an answer. It is also the widest interval of a canary forecast, as half of its width over the
value. A step of 0.4 s that took 1.87 s, an excess of 0.79, once gave the advice to use 5 processes instead of 8."""

RUN_AGAIN = "while the machine does nothing else, or with longer times if it emulates"


def excess_text(share: float) -> str:
    """Return the begin of a sentence about an excess."""
    return f"Up to {100 * share:.0f} % of the measured times may be due to other work of the machine"


def lost_cpu_share(usages: Sequence[HostUsage]) -> float:
    """Return the largest share of its time that a job may have lost because others had the CPUs of its hosts.

    "Others" are processes that do not belong to the job, and other machines of the same hypervisor. A process of the
    job loses no time to others when no process waits for a CPU. Processes of the job on all CPUs lose at most the share
    that others used, and no more than its threads waited.

    Args:
        usages: All hosts of the job. Simulated hosts share a machine, so each is one of the others for the rest.
    """
    lost = 0.0
    own = {
        each.host: each.cpu_seconds / max(each.duration_s, 1e-9) / each.num_cpus
        for each in usages
        if each.scope == "tree"
    }
    for usage in usages:
        if usage.cpu_others is not None:
            others = usage.cpu_others - sum(share for host, share in own.items() if host != usage.host)
            of_job = [usage] if usage.scope == "host" else [each for each in usages if each.scope == "tree"]
            own_waits = [1.0 if each.cpu_waited is None else each.cpu_waited for each in of_job]
            # The kernel's pressure figure does not tell whose processes waited, so the waits of the job's own threads
            # limit it. Without this limit, a script that slept 97 % of its time was refused beside two busy loops.
            waited = max(0.0, min(others, usage.cpu_pressure or 0.0, sum(own_waits)))
            lost = max(lost, 1 - (1 - waited) * (1 - (usage.cpu_stolen or 0.0)))
    return lost

"""Estimates which share of a run's time was not due to the job that was measured.

Three causes make a measured time longer: other programs use the CPUs, other machines of the same hypervisor use them,
or real work takes longer than the time that the run emulates. The *excess* is the largest share of a measured time that
may be due to these causes. A report, a profile, a canary run and a study treat an excess alike:

    always             the interval of a time begins at (1 - excess) x time
    > SMALL_EXCESS     the first sentence of the answer states the excess
    > MAX_EXCESS       no answer, because it would mostly describe the other work
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
    """Return the first words of a sentence that states an excess."""
    return f"Up to {100 * share:.0f} % of the measured times may be due to other work of the machine"


def lost_cpu_share(usages: Sequence[HostUsage]) -> float:
    """Return the largest share of its time that a job may have lost because others used the CPUs of its hosts.

    "Others" are processes that do not belong to the job, and other machines of the same hypervisor. The share that a
    host lost to other processes is at most each of these three: the CPU time that these processes used, the time when
    any process waited for a CPU, and the time when threads of the job waited for a CPU.

    If the waits of the job's threads are unknown, the other two limits decide. If the time when any process waited is
    unknown, nothing shows that others had CPUs that the job wanted, so the host counts as having lost nothing to them.

    Args:
        usages: The hosts of the job, as the samplers measured them.
    """
    # Only simulated hosts are measured as trees of processes, because they share one machine.
    simulated = [usage for usage in usages if usage.scope == "tree"]
    # Share of the machine's CPU time that each simulated host used. The 1e-9 avoids a division by 0.
    used_shares = {each.host: each.cpu_seconds / max(each.duration_s, 1e-9) / each.num_cpus for each in simulated}
    largest_lost = 0.0
    for usage in usages:
        if usage.cpu_others is None:
            continue
        # Simulated hosts share a machine. So `cpu_others` of a simulated host also contains what the job used on the
        # other simulated hosts.
        others = usage.cpu_others - sum(share for host, share in used_shares.items() if host != usage.host)
        hosts_of_machine = simulated if usage.scope == "tree" else [usage]
        job_waits = sum(1.0 if each.cpu_waited is None else each.cpu_waited for each in hosts_of_machine)
        # The kernel's pressure figure does not tell whose processes waited, so the waits of the job's own threads
        # limit it. Without the limit, a job that slept 97 % of its time once had no forecast, because two busy loops
        # beside it waited for each other.
        lost_to_others = max(0.0, min(others, usage.cpu_pressure or 0.0, job_waits))
        # The hypervisor takes its share of the time that the other processes left.
        not_lost = (1 - lost_to_others) * (1 - (usage.cpu_stolen or 0.0))
        largest_lost = max(largest_lost, 1 - not_lost)
    return largest_lost

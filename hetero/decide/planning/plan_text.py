"""Shows a plan as text, which is also valid Markdown."""

from __future__ import annotations

from hetero.decide.planning.reasons import form_text, processes_text, seconds_text, usd_text
from hetero.documents.tables import markdown_table
from hetero.report.plan import Plan, PlannedCluster

__all__ = [
    "NOT_ON_SAGEMAKER",
    "break_even_text",
    "cluster_text",
    "plan_text",
    "step_interval_text",
    "usd_interval_text",
]

NOT_ON_SAGEMAKER = "Not on SageMaker: there, all groups of a job are spot instances, or none."


def plan_text(plan: Plan) -> str:
    """Return the answer, the table of alternatives, and what to paste."""
    parts = [plan.answer, _table(plan), break_even_text(plan)]
    if plan.chosen.groups != plan.baseline.groups:
        parts.append(f"Try it on this machine: hetero simulate {plan.chosen.flags} SCRIPT")
        groups = plan.chosen.instance_groups.replace("\n", "\n    ")
        parts.append(f"On SageMaker:\n\n    {groups}" if groups else NOT_ON_SAGEMAKER)
    parts += [f"Note: {note}" for note in plan.notes]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(plan: Plan) -> str:
    """Return the alternatives as a Markdown table, with a footnote about measured step times."""
    header = ("cluster", "step time", "90 % interval", "USD per 1,000 steps", "90 % interval", "limit", "verdict")
    rows = [
        (
            cluster_text(cluster),
            f"{seconds_text(cluster.step_time.value)}{'' if cluster.step_time.basis == 'modelled' else ' *'}",
            step_interval_text(cluster),
            "-" if cluster.usd_per_1k_steps is None else usd_text(cluster.usd_per_1k_steps.value),
            usd_interval_text(cluster) or "-",
            cluster.bottleneck,
            cluster.rejected or "chosen",
        )
        for cluster in plan.alternatives
    ]
    table = markdown_table(header, rows, right=(1, 3))
    measured = {cluster.step_time.basis for cluster in plan.alternatives} - {"modelled"}
    # The star is escaped, because in Markdown a line that begins with a bare star is an item of a list.
    footnote = "".join(f"\n\n\\* {basis}, the other step times are modelled" for basis in sorted(measured))
    return table + footnote


def step_interval_text(cluster: PlannedCluster) -> str:
    """Return the 90 % interval of the step time."""
    return f"{seconds_text(cluster.step_time_low_s)} to {seconds_text(cluster.step_time_high_s)}"


def usd_interval_text(cluster: PlannedCluster) -> str:
    """Return the 90 % interval of the cost, or an empty text if a price is unknown."""
    low, high = cluster.usd_per_1k_steps_low, cluster.usd_per_1k_steps_high
    return "" if low is None or high is None else f"{usd_text(low)} to {usd_text(high)}"


def break_even_text(plan: Plan) -> str:
    """Return the break-even in words, or an empty text if the plan changes no machine or a price is unknown."""
    if plan.break_even_speedup is None or plan.chosen.groups == plan.baseline.groups:
        return ""
    return (
        f"Break-even: the cluster costs {plan.break_even_speedup:.3g} times as much per hour, so steps must become "
        f"{plan.break_even_speedup:.3g} times faster. The plan expects {plan.speedup:.3g} times."
    )


def cluster_text(cluster: PlannedCluster) -> str:
    """Return a cluster in a few words: ``1 x ml.p3.2xlarge + 2 x ml.c5.4xlarge, 5 processes on each trainer host``."""
    groups = sorted(cluster.groups, key=lambda group: group.role != "trainer")
    text = " + ".join(f"{g.count} x {g.instance_type}{' (spot)' if g.is_spot else ''}" for g in groups)
    if cluster.local_endpoints:
        text += f", {processes_text(cluster.local_endpoints)} on each trainer host"
    return text if cluster.form == "as is" else f"{text}, batches {form_text(cluster.form)}"

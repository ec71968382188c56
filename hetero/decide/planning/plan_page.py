"""Shows a plan as one HTML page. It needs no other file, no network and no script."""

from __future__ import annotations

from hetero.decide.pages.page import figures_html, html_page, plots_html
from hetero.decide.planning.plan_plot import plan_plot
from hetero.decide.planning.plan_text import (
    NOT_ON_SAGEMAKER,
    break_even_text,
    cluster_text,
    step_interval_text,
    usd_interval_text,
)
from hetero.decide.planning.reasons import seconds_text, usd_text
from hetero.documents.text import html_text
from hetero.report.plan import Plan, PlannedCluster

__all__ = ["plan_page"]


def plan_page(plan: Plan) -> str:
    """Return the page. It is valid both as HTML and as XML. The plot needs matplotlib."""
    parts = [_headline(plan), _figures(plan), _plot(plan), _table(plan), _to_paste(plan), _notes(plan)]
    return html_page(f"Plan for {plan.command}", parts)


def _headline(plan: Plan) -> str:
    # An answer says what to do, then a colon, then the figures that decide it.
    what, colon, why = plan.answer.partition(": ")
    rest = f"{colon}<span>{html_text(why)}</span>" if colon else ""
    return f'<p class="command">Plan for <code>{html_text(plan.command)}</code></p>\n<h1>{html_text(what)}{rest}</h1>'


def _figures(plan: Plan) -> str:
    """Return the figures that decide, each with a small text: its interval or meaning, and its basis."""
    chosen = plan.chosen
    # Name, value, basis, and what else the small text says.
    cells = [("step time", seconds_text(chosen.step_time.value), chosen.step_time.basis, step_interval_text(chosen))]
    if chosen.usd_per_1k_steps is not None:
        usd = chosen.usd_per_1k_steps
        cells.append(("USD per 1,000 steps", usd_text(usd.value), usd.basis, usd_interval_text(chosen)))
    # The headspace is the time of a step that never waits for its batch. No cluster makes steps shorter than this.
    cells.append(("headspace", seconds_text(plan.headspace.value), plan.headspace.basis, "no cluster is faster"))
    # Leave out the speed-up of a plan that changes nothing.
    if chosen != plan.baseline:
        needed = plan.break_even_speedup
        break_even = "" if needed is None else f"break-even at {needed:.3g} times"
        cells.append(("speed-up", f"{plan.speedup:.3g} times", "modelled", break_even))
        chance = "not known" if plan.chance_to_pay is None else f"{plan.chance_to_pay:.0%}"
        cells.append(("chance that it pays", chance, "modelled", "given the intervals"))
    return figures_html([(name, value, ", ".join(filter(None, (more, basis)))) for name, value, basis, more in cells])


def _plot(plan: Plan) -> str:
    drawn = plots_html({"cost against step time": lambda: plan_plot(plan)})
    return drawn or '<p class="small">There is no plot of cost against time, because no cluster has a known price.</p>'


def _table(plan: Plan) -> str:
    """Return the table of all alternatives, with a note about their figures."""
    head = "<th></th><th>cluster</th>"
    head += "".join(f'<th class="number">{name}</th>' for name in ("step time", "USD per 1,000 steps", "USD/hour"))
    head += "<th>limit</th><th>verdict</th>"
    rows = "\n".join(_row(plan, number, cluster) for number, cluster in enumerate(plan.alternatives, start=1))
    return (
        f'<h2>Alternatives</h2>\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>'
        "\n</table></div>\n"
        '<p class="small">Below each figure is its 90 % interval. A step time is measured on real hardware, simulated '
        "(measured with an emulated part), or modelled (computed from other figures). A cost is a step time times the "
        "price per hour of all hosts. The prices are those that the command was given.</p>"
    )


def _row(plan: Plan, number: int, cluster: PlannedCluster) -> str:
    """Return the table row of one cluster."""
    usd, hourly = cluster.usd_per_1k_steps, cluster.hourly_usd
    # The text of a cluster is its hosts, then a comma, then how the job uses them.
    machines, _, use = cluster_text(cluster).partition(", ")
    # Each type is a span, which the page does not break at the end of a line.
    name = " + ".join(f"<span>{html_text(each)}</span>" for each in machines.split(" + "))
    details = ", ".join(filter(None, (use, "as it is now" if cluster == plan.baseline else "")))
    cells = (
        f"<td>{number}</td>",
        f'<td class="cluster">{name} <span class="small">{html_text(details)}</span></td>',
        _value_cell(seconds_text(cluster.step_time.value), f"{step_interval_text(cluster)}, {cluster.step_time.basis}"),
        _value_cell("-" if usd is None else usd_text(usd.value), usd_interval_text(cluster)),
        _value_cell("-" if hourly is None else f"{hourly:,.3f}", ""),
        f"<td>{html_text(cluster.bottleneck)}</td>",
        f"<td>{html_text(cluster.rejected) or '<strong>chosen</strong>'}</td>",
    )
    start = '<tr class="chosen">' if cluster == plan.chosen else "<tr>"
    return f"{start}{''.join(cells)}</tr>"


def _value_cell(value: str, interval: str) -> str:
    below = f'<span class="small">{html_text(interval)}</span>' if interval else ""
    return f'<td class="number">{html_text(value)}{below}</td>'


def _to_paste(plan: Plan) -> str:
    """Return the commands for the chosen cluster. Empty if the plan changes no instance group."""
    if plan.chosen.groups == plan.baseline.groups:
        return ""
    groups = plan.chosen.instance_groups
    on_sagemaker = f"<p>On SageMaker:</p>\n<pre>{html_text(groups)}</pre>" if groups else f"<p>{NOT_ON_SAGEMAKER}</p>"
    return (
        f"<h2>Use it</h2>\n<p>{html_text(break_even_text(plan))}</p>\n<p>Try the cluster on one machine:</p>\n"
        f"<pre>hetero simulate {html_text(plan.chosen.flags)} SCRIPT</pre>\n{on_sagemaker}"
    )


def _notes(plan: Plan) -> str:
    items = "".join(f"<li>{html_text(note)}</li>\n" for note in plan.notes)
    return f"<h2>Notes</h2>\n<ul>\n{items}</ul>" if items else ""

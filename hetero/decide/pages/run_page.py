"""Shows a run, or the comparison of two runs, as one HTML page."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from hetero.decide.pages.drawing import PALETTE
from hetero.decide.pages.page import figures_html, html_page, more_html, plots_html, table_html
from hetero.decide.pages.run_plots import ShownRun, cost_plot, cpu_plot, parts_plot, steps_plot
from hetero.documents.quantities import NOT_KNOWN, seconds_text
from hetero.documents.tables import MAX_ROWS
from hetero.documents.text import html_text
from hetero.metrics.step_series import StepSeries
from hetero.report.compare import Comparison
from hetero.report.markdown import host_table, numbers_of
from hetero.report.model import REPORT_FILE_NAME, Report
from hetero.report.verdict import pace_text, saving_text, speedup_text, verdict_text

__all__ = ["comparison_page", "run_page"]


def run_page(report: Report) -> str:
    """Return the page of one run. Its plots need matplotlib."""
    runs = _shown(report)
    kind = f"{report.run.placement.capitalize()} run"
    if report.run.exit_code:
        kind += f", which ended with exit code {report.run.exit_text}"
    return html_page(
        f"Run of {report.run.command}",
        [
            _title(report, kind, report.verdict.advice),
            figures_html(list(_run_cells(report))),
            *_body(runs, comparison=None),
        ],
    )


def comparison_page(comparison: Comparison) -> str:
    """Return the page that compares two runs. Its plots need matplotlib."""
    runs = _shown(comparison.baseline, comparison.candidate)
    command = comparison.candidate.run.command
    return html_page(
        f"Was it worth it? {command}",
        [
            _title(comparison.candidate, *_headline(comparison)),
            figures_html(list(_comparison_cells(comparison))),
            *_body(runs, comparison),
        ],
    )


def _shown(*reports: Report) -> list[ShownRun]:
    """Return one or two runs with names that tell them apart: their placements, or their order if these are equal."""
    placements = [report.run.placement for report in reports]
    names = placements if len(set(placements)) == len(placements) else ["first run", "second run"]
    # A page of one run leaves out the second name and colour.
    return [_shown_run(*each) for each in zip(names, reports, (PALETTE[1], PALETTE[0]), strict=False)]


def _shown_run(name: str, report: Report, colour: str) -> ShownRun:
    """Return a run with what the plots show of it: the steps of its slowest rank, and the history of one rank."""
    slowest = None if report.headline is None else report.headline.slowest_step_rank
    # The slowest rank comes first, because False is sorted before True.
    summaries = [each for _, each in sorted(report.headline_ranks.items(), key=lambda item: item[0] != slowest)]
    return ShownRun(
        name=name,
        report=report,
        colour=colour,
        steps=summaries[0] if summaries else None,
        # Only some ranks record a history.
        history=next((each.history for each in summaries if each.history.begin_s), StepSeries()),
    )


def _title(report: Report, answer: str, why: str) -> str:
    simulated = ' <span class="small">simulated</span>' if report.run.simulated else ""
    return (
        f'<p class="command">Run of <code>{html_text(report.run.command)}</code>{simulated}</p>\n'
        f"<h1>{html_text(answer)}<span>: {html_text(why)}</span></h1>"
    )


def _headline(comparison: Comparison) -> tuple[str, str]:
    """Return the verdict of a comparison, and the reason for it."""
    has_pace = comparison.speedup is not None
    if comparison.objections:
        what = "Whether the second run is cheaper" if has_pace else "Which run is faster and which is cheaper"
        return f"{what} cannot be said", " ".join(comparison.objections)
    if comparison.saving is None:
        verdict = f"{speedup_text(comparison)} times the pace" if has_pace else "No verdict"
        return verdict, "whether it is cheaper cannot be said without all prices"
    if comparison.is_worth_it is None:
        # Without a decision, the text of the verdict contains the reason, after a colon.
        verdict, _, why = verdict_text(comparison).partition(": ")
        return verdict, why
    return verdict_text(comparison).capitalize(), f"the second run has {pace_text(comparison)}"


def _run_cells(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and small print of each headline figure of one run."""
    headline, cost = report.headline, report.cost
    if headline is not None and headline.step_time_mean is not None:
        yield "step time", seconds_text(headline.step_time_mean.value), headline.step_time_mean.basis
    if headline is not None and headline.data_wait_mean is not None:
        yield "data wait", seconds_text(headline.data_wait_mean.value), headline.data_wait_mean.basis
    if headline is not None and headline.samples_per_s is not None:
        yield "samples/s", f"{headline.samples_per_s.value:,.0f}", headline.samples_per_s.basis
    if cost.per_1k_steps is not None:
        yield "USD per 1,000 steps", f"{cost.per_1k_steps.value:.4g}", cost.per_1k_steps.basis


def _comparison_cells(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and small print of each headline figure of a comparison."""
    for report, which in ((comparison.baseline, "first run"), (comparison.candidate, "second run")):
        step = report.headline.step_time_mean if report.headline else None
        # Each objection is against a comparison of costs. Leave out the costs, because readers would compare them. Only
        # some objections are against a comparison of times too, so the step times stay.
        usd = None if comparison.objections else report.cost.per_1k_steps
        hourly = report.cost.hourly
        facts = [_hosts(report), "" if hourly is None else f"USD {hourly.value:.4g} per hour"]
        facts.append("" if usd is None else f"USD {usd.value:.4g} per 1,000 steps")
        facts.append("" if report.headline is None else f"{report.headline.num_steps_measured} steps measured")
        value = NOT_KNOWN if step is None else seconds_text(step.value)
        yield f"step time of the {which}, {report.run.placement}", value, "; ".join(filter(None, facts))
    if comparison.speedup is not None:
        needed = comparison.break_even_speedup
        below = "" if needed is None else f"break-even at {needed.value:.2f}x ({needed.basis})"
        yield "pace of the second run", f"{speedup_text(comparison)}x", below
    if comparison.saving is not None:
        yield "saving of the second run", saving_text(comparison), comparison.saving.basis


def _hosts(report: Report) -> str:
    return " + ".join(f"{group.count} x {group.instance_type}" for group in report.run.groups)


def _body(runs: Sequence[ShownRun], comparison: Comparison | None) -> Iterator[str]:
    """Yield the parts of the page below its headline figures: what was simulated, plots, tables, caveats."""
    simulated = dict.fromkeys(line for run in runs for line in run.report.run.simulated)
    if simulated:
        lines = [_of_which_runs(line, runs) for line in simulated]
        yield f'<div class="notice">Simulated, everything else is real:\n{_list(lines)}</div>'
    yield plots_html(
        {
            # Pass functions and not plots. Without matplotlib none of them is called, and if one fails, the page is
            # still written.
            "steps": lambda: steps_plot(runs),
            "the parts of a step": lambda: parts_plot(runs),
            "costs": lambda: None if comparison is None else cost_plot(comparison, runs),
            **{f"the CPUs, {run.name}": functools.partial(cpu_plot, run) for run in runs},
        }
    )
    for run in runs:
        yield from _tables(run)
    if comparison is not None and comparison.caveats:
        yield f"<h2>Caveats</h2>\n{_list(comparison.caveats)}"


def _of_which_runs(line: str, runs: Sequence[ShownRun]) -> str:
    """Return what was simulated. If this was not simulated in all runs, the names of the runs come first."""
    names = [run.name for run in runs if line in run.report.run.simulated]
    return line if len(names) == len(runs) else f"{', '.join(names)}: {line}"


def _tables(run: ShownRun) -> Iterator[str]:
    """Yield the tables of one run: hosts and events."""
    facts = run.report.run
    yield f"<h2>Hosts, {html_text(run.name)}</h2>"
    yield f"<p>{html_text(run.report.verdict.advice)}</p>"
    header, rows = host_table(facts)
    if rows:
        yield table_html(header, rows[:MAX_ROWS], right=numbers_of(header))
    yield more_html(len(rows), "host", REPORT_FILE_NAME)
    # The endpoints count the batches that they compute. Some are never used.
    num_taken = sum(loader.num_steps for rank in facts.ranks for loader in rank.loaders)
    num_computed = facts.events.get("batches computed", 0)
    if num_computed > num_taken:
        yield (
            f'<p class="small">The script took {num_taken:,} of {num_computed:,} batches. Others are made ahead, and '
            "again after a failure.</p>"
        )
    if facts.timeline:
        events = [(f"{event.at_s:.1f} s", event.host, event.what) for event in facts.timeline[:MAX_ROWS]]
        yield f"<h3>Events, {html_text(run.name)}</h3>"
        yield table_html(("time of the run", "host", "event"), events, right=(0,))
        yield more_html(len(facts.timeline), "event", REPORT_FILE_NAME)


def _list(lines: Sequence[str]) -> str:
    return f"<ul>\n{''.join(f'<li>{html_text(line)}</li>' for line in lines)}\n</ul>"

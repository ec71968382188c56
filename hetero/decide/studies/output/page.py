"""Shows a study as one HTML page: plots, a table of cells with intervals, and a table of runs.

The page needs no other file, no network and no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetero.decide.pages.page import html_page, more_html, notice_html, plots_html, table_html
from hetero.decide.studies.output.plots import (
    Results,
    communication_plot,
    correlation_plot,
    pareto_plot,
    quality_over_time_plot,
    quality_plot,
    scaling_plot,
)
from hetero.decide.studies.output.table import CSV_FILE_NAME, Row, by_levels
from hetero.decide.studies.plan import StudyPlan
from hetero.decide.studies.runs import FAILED, FINISHED, Level, RunResult
from hetero.decide.studies.statistics import Interval, interval_of, series_of, time_to_quality
from hetero.decide.studies.study_file import Factor, Study
from hetero.documents.findings import Finding
from hetero.documents.tables import MAX_ROWS
from hetero.documents.text import counted, html_text
from hetero.metrics.excess import MAX_EXCESS, RUN_AGAIN
from hetero.report.overruns import excess_share, upper_bounds_note

__all__ = [
    "PAGE_FILE_NAME",
    "cell_table",
    "correlation_text",
    "notes",
    "study_page",
]

PAGE_FILE_NAME = "study.html"


def study_page(plan: StudyPlan, results: Sequence[RunResult], table: Sequence[Row], findings: Sequence[Finding]) -> str:
    """Return the page of a study. Its plots need matplotlib.

    Args:
        plan: The study with its runs.
        results: Results of the runs that ended.
        table: Rows of these results, see `hetero.decide.studies.output.table.rows`.
        findings: What the checks found.
    """
    study = plan.study
    parts = [_headline(plan, results), *map(notice_html, notes(study, results)), _plots(plan, results)]
    header, rows = cell_table(study, results)
    if rows:
        parts += [
            "<h2>Combinations of levels</h2>",
            table_html(header, rows, right=range(len(study.factors), len(header))),
            (
                '<p class="small">Means over replicates, with 95 % intervals in brackets (Student\'s t). Without an '
                "interval, the combination ran once.</p>"
            ),
        ]
    parts += [_runs(table), _design(plan), _findings(findings), _simulated(results)]
    return html_page(f"Study {study.name}", parts)


def cell_table(study: Study, results: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of combinations: runs, time, cost and quality with their intervals."""
    names = [factor.name for factor in study.factors]
    metrics = list(study.metrics)
    header = [*names, "ranks", "runs", "failed", "time [s]", "USD"]
    for metric in metrics:
        header.append(metric.name)
        if metric.target is not None:
            header.append(f"time to {metric.name} {metric.target:g} [s]")
    rows = []
    for levels, members in by_levels(results, names).items():
        finished = [each for each in members if each.state == FINISHED]
        # The excess is the largest share of a run's time that other work of the machine may have taken. Take the
        # largest excess of the replicates, because one wrong time makes the mean wrong.
        excess = max((excess_share(each.report) for each in finished if each.report is not None), default=0.0)
        row = [*map(str, levels), str(members[0].levels.get("ranks", "")), str(len(members))]
        row += [
            str(sum(each.state == FAILED for each in members)),
            _time_text([each.wall_s for each in finished], excess),
            _time_text([each.usd for each in finished if each.usd is not None], excess),
        ]
        for metric in metrics:
            last_values = [values[-1].value for each in finished if (values := series_of(each.metrics, metric.name))]
            row.append(_interval_text(interval_of(last_values)))
            if metric.target is not None:
                times_s = [
                    seconds for each in finished if (seconds := time_to_quality(each.metrics, metric)) is not None
                ]
                text = _time_text(times_s, excess)
                # Show the number of replicates that reached the target, because the mean lacks the other replicates.
                row.append(text if len(times_s) == len(finished) else f"{text} ({len(times_s)} of {len(finished)})")
        rows.append(row)
    return header, rows


def notes(study: Study, results: Sequence[RunResult]) -> list[str]:
    """Return sentences about what the results lack.

    A note says that times are only upper bounds if other work ran on the machine. If this other work took more than
    `MAX_EXCESS` of a run, a second note says that combinations have no time and no cost. Each metric without values
    gets a note that says how to log it.
    """
    finished = [each for each in results if each.state == FINISHED]
    reports = {each.run_id: each.report for each in finished if each.report is not None}
    found = [note] if (note := upper_bounds_note(reports)) else []
    if any(excess_share(report) > MAX_EXCESS for report in reports.values()):
        found.append(
            f"Where this is more than {100 * MAX_EXCESS:.0f} % of a run, the table of combinations has no time and no "
            f"cost. Run the study again {RUN_AGAIN}."
        )
    for metric in study.metrics:
        if finished and not any(series_of(each.metrics, metric.name) for each in results):
            how = "no line of a log matches its regex" if metric.regex else "no run logged it"
            to_do = (
                'compare the regex with a line of a run\'s log, which begins with "[trainer algo-1 trainer] rank 0: "'
                if metric.regex
                else f'call hetero.log_metric("{metric.name}", value) in the script, or state a regex'
            )
            found.append(f"The metric {metric.name} has no values, because {how}. To do: {to_do}.")
    return found


def _time_text(values: Sequence[float], excess: float) -> str:
    """Return the mean of times or costs with its interval.

    Args:
        values: One per replicate.
        excess: Largest excess of the replicates, see `hetero.metrics.excess`.
    """
    found = interval_of(values, is_positive=True)
    if found is not None and excess > 0:
        # The value of a single replicate is both ends.
        low, high = found.low or found.mean, found.high or found.mean
        # Other work only lengthens a run, so only the lower end moves. With more excess than `MAX_EXCESS`, the time
        # would mostly describe the other work, so show none.
        found = None if excess > MAX_EXCESS else replace(found, low=(1 - excess) * low, high=high)
    return _interval_text(found)


def _interval_text(found: Interval | None) -> str:
    """Return a mean with its interval in brackets, if it has one. A dash without a mean."""
    if found is None:
        return "-"
    interval = "" if found.low is None or found.high is None else f" [{found.low:.4g}, {found.high:.4g}]"
    return f"{found.mean:.4g}{interval}"


def _headline(plan: StudyPlan, results: Sequence[RunResult]) -> str:
    """Return the title, with the numbers of finished and failed runs, their time and their cost."""
    states = [result.state for result in results]
    failed = f", {states.count(FAILED)} failed" if FAILED in states else ""
    total_s = sum(result.wall_s for result in results)
    costs = [result.usd for result in results if result.usd is not None]
    cost = f", USD {sum(costs):,.2f}" if costs and len(costs) == len(results) else ""
    return (
        f'<p class="command">Study of <code>{html_text(plan.study.script)}</code></p>\n'
        f"<h1>{html_text(plan.study.name)}</h1>\n<p>{states.count(FINISHED)} of {counted(len(plan.runs), 'run')} "
        f"finished{failed}. They took {total_s / 3600:.2f} h{cost}.</p>"
    )


def _plots(plan: StudyPlan, results: Sequence[RunResult]) -> str:
    """Return the plots of the study. A plot without data is left out."""
    study = plan.study
    # Leave out a factor that chooses the number of ranks. Its levels are places on the axis of the ranks, so a series
    # of each level would split the curve over the ranks.
    names = [factor.name for factor in study.factors if not _chooses_size(factor, plan)]
    found = Results(results=results, factors=names, metric=study.metrics[0] if study.metrics else None)
    correlations = plan.correlations
    # `plots_html` calls the functions, because it draws nothing without matplotlib, and shows a notice for each plot
    # whose function raises.
    return plots_html(
        {
            "time against ranks": lambda: scaling_plot(found, cost=False),
            "cost against ranks": lambda: scaling_plot(found, cost=True),
            "quality": lambda: quality_plot(found),
            "quality over time": lambda: quality_over_time_plot(found),
            "cost and time": lambda: pareto_plot(found),
            "communication over computation": lambda: communication_plot(found),
            "correlations": lambda: None if correlations is None else correlation_plot(correlations),
        }
    )


def _chooses_size(factor: Factor, plan: StudyPlan) -> bool:
    """Return whether a factor chooses the number of ranks: the ranks vary, and each number belongs to one level.

    The levels of such a factor are on the axis of the ranks, so they do not tell series apart.
    """
    levels_of: dict[Level, set[Level]] = {}
    for cell in plan.cells:
        levels_of.setdefault(cell.quantities["ranks"], set()).add(cell.levels[factor.name])
    return len(levels_of) > 1 and all(len(levels) == 1 for levels in levels_of.values())


def _runs(table: Sequence[Row]) -> str:
    """Return the table of all runs, without the columns that are empty in each run."""
    if not table:
        return "<p>No run has ended yet.</p>"
    columns = [name for name in table[0] if any(row[name] not in (None, "") for row in table)]
    numbers = [
        at for at, name in enumerate(columns) if all(isinstance(row[name], (int, float, type(None))) for row in table)
    ]
    rows = [[_cell(row[name]) for name in columns] for row in table[:MAX_ROWS]]
    more = more_html(len(table), "run", CSV_FILE_NAME)
    return f"<h2>Runs</h2>\n{table_html(columns, rows, right=numbers)}{more}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def correlation_text(plan: StudyPlan) -> str:
    """Return a sentence about the largest correlation of the design, or an empty text."""
    largest = None if plan.correlations is None else plan.correlations.largest
    if largest is None:
        return ""
    value, one, other = largest
    return f"The largest correlation between two factors of the design is {value:.2f}, of {one} and {other}."


def _design(plan: StudyPlan) -> str:
    """Return a sentence about the design, and the list of factors with their levels."""
    study = plan.study
    kinds = {
        "full": "all combinations of levels",
        "fraction": "an orthogonal fraction of all combinations",
        "table": "the combinations that the file lists",
    }
    order = f"in random order with seed {study.seed}" if study.order == "random" else "in the order of the file"
    factors = "".join(
        f"<li><code>{html_text(factor.name)}</code>: {html_text(', '.join(map(str, factor.levels)))}</li>"
        for factor in study.factors
    )
    return (
        f"<h2>Design</h2>\n<p>The study runs {kinds[study.design.kind]}, {counted(len(plan.cells), 'row')} times "
        f"{counted(study.replicates, 'replicate')}, {order}. {html_text(correlation_text(plan))}</p>\n"
        f"<ul>{factors}</ul>"
    )


def _findings(findings: Sequence[Finding]) -> str:
    """Return the list of findings, each with what to do. Empty without findings."""
    items = "".join(
        f"<li><strong>{html_text(each.number)} {html_text(each.severity)}</strong>: {html_text(each.found)}. To do: "
        f"{html_text(each.fix)}</li>\n"
        for each in findings
    )
    return f"<h2>Findings</h2>\n<ul>\n{items}</ul>" if items else ""


def _simulated(results: Sequence[RunResult]) -> str:
    """Return the list of what was simulated in any run. Empty if nothing was."""
    simulated = dict.fromkeys(
        sentence for result in results if result.report is not None for sentence in result.report.run.simulated
    )
    if not simulated:
        return ""
    items = "".join(f"<li>{html_text(sentence)}</li>" for sentence in list(simulated)[:20])
    return f"<h2>Simulated</h2>\n<p>Times and costs are not those of the named machines, because:</p><ul>{items}</ul>"

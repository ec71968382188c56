"""Shows the result of canary training as text, which is also valid Markdown."""

from __future__ import annotations

from hetero.decide.canary.model import CanaryReport, Candidate, ForecastFigure
from hetero.decide.canary.points import mean_excess
from hetero.decide.canary.refusals import percent
from hetero.documents.quantities import bytes_text
from hetero.documents.tables import markdown_table
from hetero.documents.text import code_span, counted
from hetero.metrics.excess import SMALL_EXCESS, excess_text

__all__ = ["canary_text", "figure_rows", "headline_of", "summary_rows", "value_text"]

SUMMARY_HEADER = ("cluster", "time", "90 % interval", "cost", "90 % interval", "memory peak", "out of memory")
FIGURE_HEADER = ("figure", "forecast", "90 % interval", "of it fixed")


def canary_text(report: CanaryReport) -> str:
    """Return the decision, a table of the candidates, and the details of each."""
    parts = [f"# Canary forecast of {code_span(report.command)}", report.how]
    if report.decision is not None:
        parts.append(report.decision.sentence)
    parts.append(markdown_table(SUMMARY_HEADER, summary_rows(report), right=range(1, len(SUMMARY_HEADER))))
    for candidate in report.candidates:
        parts += [f"## {candidate.name}", headline_of(candidate)]
        if candidate.refusals:
            parts.append("\n".join(f"- refused ({each.rule}): {each.reason}." for each in candidate.refusals))
        rows = figure_rows(candidate)
        if rows:
            parts.append(markdown_table(FIGURE_HEADER, rows, right=(1, 3)))
        parts += [candidate.more_canaries, *candidate.notes]
    return "\n\n".join(part for part in parts if part) + "\n"


def headline_of(candidate: Candidate) -> str:
    """Return a few sentences about a candidate: its runs, and the forecast of time, cost and lack of memory."""
    num_runs = counted(len(candidate.points), "canary run")
    fractions = [point.fraction for point in candidate.points]
    ends = percent(min(fractions, default=0.0)), percent(max(fractions, default=0.0))
    # Runs of a single fraction show this fraction once.
    span = f"{' to '.join(dict.fromkeys(ends))} of the data"
    # Share of the runs' time that other work of the machine may have taken.
    excess = mean_excess(candidate.points)
    about_excess = f"{excess_text(excess)}. " if excess > SMALL_EXCESS else ""
    begin = f"{about_excess}{num_runs} on {span} took {candidate.canary_s:.0f} s"
    time = candidate.figure("time")
    if candidate.canary_share is not None:
        begin += f", {candidate.canary_share:.1%} of the whole job's time"
    if time is None or candidate.refused("time"):
        return f"{begin}. There is no forecast of the time, for the reasons below."
    text = f"{begin}. The whole takes {value_text(time)} ({interval_text(time)})"
    cost = candidate.figure("cost")
    if cost is not None and not candidate.refused("cost"):
        text += f" and costs {value_text(cost)} ({interval_text(cost)})"
    risk = candidate.out_of_memory
    # A smaller risk would be shown as 0 %.
    if risk is not None and risk >= 0.01:
        text += f". A host runs out of memory with a probability of {risk:.0%}"
    return f"{text}."


def summary_rows(report: CanaryReport) -> list[tuple[str, ...]]:
    """Return a row for each candidate. A figure is ``refused`` if it was refused, and ``-`` if it is not known."""
    rows: list[tuple[str, ...]] = []
    for candidate in report.candidates:
        (time, time_interval), (cost, cost_interval), (peak, _) = (
            _value_and_interval(candidate, name) for name in ("time", "cost", "memory peak")
        )
        risk = "-" if candidate.out_of_memory is None else f"{candidate.out_of_memory:.1%}"
        rows.append((candidate.name, time, time_interval, cost, cost_interval, peak, risk))
    return rows


def _value_and_interval(candidate: Candidate, name: str) -> tuple[str, str]:
    """Return the texts of a figure and of its interval."""
    if candidate.refused(name):
        return "refused", "-"
    figure = candidate.figure(name)
    return ("-", "-") if figure is None else (value_text(figure), interval_text(figure))


def figure_rows(candidate: Candidate) -> list[tuple[str, ...]]:
    """Return a row for each figure of a candidate."""
    rows: list[tuple[str, ...]] = []
    for figure in candidate.figures:
        is_refused = bool(candidate.refused(figure.name))
        rows.append(
            (
                figure.name,
                "refused" if is_refused else value_text(figure),
                "-" if is_refused else interval_text(figure),
                "-" if figure.fixed is None or is_refused else _number_text(figure.fixed, figure.unit),
            )
        )
    return rows


def value_text(figure: ForecastFigure) -> str:
    """Return the value of a figure with its unit."""
    return _number_text(figure.value, figure.unit)


def interval_text(figure: ForecastFigure) -> str:
    """Return the interval of a figure with its unit."""
    return f"{_number_text(figure.low, figure.unit)} to {_number_text(figure.high, figure.unit)}"


def _number_text(value: float, unit: str) -> str:
    """Return a number with its unit, and with decimals only if it is small."""
    if unit == "bytes":
        return bytes_text(value)
    if unit == "s":
        return f"{value:,.1f} s" if value < 1000 else f"{value:,.0f} s"
    if unit == "USD":
        return f"USD {value:.4f}" if value < 1 else f"USD {value:,.2f}"
    return f"{value:,.0f} {unit}"

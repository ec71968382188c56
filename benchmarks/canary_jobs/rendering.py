"""Renders the outcomes of the jobs as tables, and each figure with its bound. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from harness import target

from canary_jobs.scoring import LIMITS, LimitJudgement, Outcome, judged_limits, summary
from hetero.decide.canary.comparison import CERTAIN
from hetero.decide.canary.refusals import ran_out_of_memory
from hetero.pricing import cost

__all__ = ["render"]

TIME_MEDIAN, TIME_MAX, MEMORY_MEDIAN, COVERAGE, SPREAD, COST = 0.10, 0.30, 0.15, (0.80, 0.97), 0.15, 0.10
LIMITS_WRONG = 0.10
NAN = float("nan")
PUBLISHED = (
    ("6 x ml.m5.4xlarge, predicted", 6, 0.922, 3609, 5.55),
    ("6 x ml.m5.4xlarge, actual", 6, 0.922, 5176, 7.95),
    ("1 x ml.m5.24xlarge, predicted", 1, 5.53, 38454, 59.07),
    ("1 x ml.m5.24xlarge, actual", 1, 5.53, 30770, 47.25),
)
"""The source's table: hosts, USD per host and hour (eu-west-1), seconds, and the USD that it states."""


def render(outcomes: Sequence[Outcome], pairs: Sequence[dict[str, Any]], repeated: Sequence[dict[str, Any]]) -> str:
    """Return the tables, and each figure with its bound."""
    lines = [
        "# Canary forecasts against whole jobs",
        "",
        "| job | whole | forecast | 90 % interval | error | memory error | refused because of | had it not | cost |",
        "|---|---:|---:|---|---:|---:|---|---:|---:|",
        *(job_row(each) for each in outcomes),
        "",
        "*had it not*: the error, had it not refused. *cost*: time of the canaries / whole.",
        "",
        *bounds(outcomes),
        *memory_lines(outcomes),
    ]
    if pairs:
        lines += ["", "| pair | forecast USD | actual USD | said | right |", "|---|---|---|---|---|"]
        lines += [pair_row(each) for each in pairs]
        decided = [each for each in pairs if each["decision"] and not each["failure"]]
        wrong = sum(each["decision"] != each["actual"] for each in decided)
        failed = sum(bool(each["failure"]) for each in pairs)
        lines += ["", target(f"pairs decided wrongly, of {len(decided)} decided", float(wrong), 0, at_most=True)]
        lines.append(target(f"pairs with a whole that failed, of {len(pairs)}", float(failed), 0, at_most=True))
    if repeated:
        lines += ["", *repeated_lines(repeated)]
    lines += ["", "The source's table, from its times and prices:", "", *published()]
    return "\n".join([*lines, ""])


def job_row(outcome: Outcome) -> str:
    """Return one row of the table."""
    time_s = outcome.shown.figure("time")
    scores = {each.figure: each for each in outcome.scores}
    is_refused = bool(outcome.rules)
    failure, wall_s = outcome.actual.failure, outcome.actual.wall_s
    memory = scores.get("memory peak")
    error = f"{scores['time'].error:+.1%}" if "time" in scores else "-"
    cells = [
        outcome.job.name,
        f"failed: {failure[:40]}" if failure else f"{wall_s:.1f} s",
        "-" if time_s is None else f"({time_s.value:.1f} s)" if is_refused else f"{time_s.value:.1f} s",
        "-" if time_s is None or is_refused else f"{time_s.low:.1f} to {time_s.high:.1f} s",
        "-" if is_refused else error,
        f"{memory.error:+.1%}" if memory is not None and not memory.refused else "-",
        ("**wrong rule**: " if outcome.is_missed and is_refused else "") + (", ".join(outcome.rules) or "-"),
        error if is_refused else "-",
        "-" if failure else f"{outcome.shown.canary_s / wall_s:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def bounds(outcomes: Sequence[Outcome]) -> list[str]:
    """Return each figure of the jobs with its bound."""
    found = summary([each for outcome in outcomes for each in outcome.scores])
    must_refuse = [each for each in outcomes if each.job.refused_by]
    others = [each for each in outcomes if not each.job.refused_by]
    by_figure = found["coverage_by_figure"].items()
    failed = [each.job.name for each in outcomes if each.failed_unexpectedly]
    names = f" ({', '.join(failed)})" if failed else ""
    num_refused = sum(bool(each.rules) for each in others)
    lines = [
        target(f"wholes that failed unexpectedly{names}, of {len(outcomes)}", float(len(failed)), 0, at_most=True),
        target(
            f"time: median error of {found['num_times']} forecasts",
            known(found["time_median"]),
            TIME_MEDIAN,
            at_most=True,
        ),
        target("time: largest error that was not refused", known(found["time_max"]), TIME_MAX, at_most=True),
        target("memory peak: median error", known(found["memory_median"]), MEMORY_MEDIAN, at_most=True),
        target(f"share of {found['num_intervals']} intervals that cover", known(found["coverage"]), COVERAGE[0]),
        target("the same, not more than", known(found["coverage"]), COVERAGE[1], at_most=True),
        "- by figure: " + ", ".join(f"{name} {hits} of {num}" for name, (hits, num) in by_figure),
        target(
            f"jobs that must be refused and were not, or by no rule that knows why, of {len(must_refuse)}",
            float(sum(each.is_missed for each in must_refuse)),
            0,
            at_most=True,
        ),
        f"- jobs that a line can forecast and that were refused: {num_refused} of {len(others)}",
    ]
    finished = [each for each in others if not each.actual.failure]
    return lines + cost_lines(finished) if finished else lines


def cost_lines(finished: Sequence[Outcome]) -> list[str]:
    """Return what the canaries of the finished jobs cost."""
    shares = [each.shown.canary_s / each.actual.wall_s for each in finished]
    growing = statistics.median(growing_share(each) for each in finished)
    return [
        target("cost of the canaries / whole, median", statistics.median(shares), COST, at_most=True),
        f"- the same without start-up, which does not grow: {growing:.3f}",
    ]


def memory_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return whether the forecasts know which jobs run out of memory."""
    out = [each for each in outcomes if ran_out_of_memory(each.actual)]
    unforeseen = float(sum((each.shown.out_of_memory or 0.0) < 0.5 for each in out)) if out else NAN
    judged = [each for outcome in outcomes for each in judged_limits(outcome)]
    wrong = sum(each.is_wrong for each in judged) / len(judged) if judged else NAN
    return [
        target(f"jobs that ran out of memory unforeseen, of {len(out)}", unforeseen, 0, at_most=True),
        target(f"share of {len(judged)} memory limits judged wrongly", wrong, LIMITS_WRONG, at_most=True),
        *(["", *limits_table(judged)] if judged else []),
    ]


def limits_table(judged: Sequence[LimitJudgement]) -> list[str]:
    """Return how often each probability was said, by the limit."""
    lines = [
        "Would the job need more memory than the limit? The forecasts that were not refused, and what is true:",
        "",
        "| limit / actual peak | true | said < 10 % | 10 to 50 % | 50 to 90 % | > 90 % | wrong |",
        "|---:|---|---:|---:|---:|---:|---|",
    ]
    for share in LIMITS:
        own = [each for each in judged if each.share == share]
        edges = (0.0, 0.1, 0.5, 0.9, 1.01)
        counts = [sum(low <= each.said < high for each in own) for low, high in pairwise(edges)]
        wrong = [each.job for each in own if each.is_wrong]
        names = f"{len(wrong)} of {len(own)}" + (f": {', '.join(wrong)}" if wrong else "")
        cells = [f"{share:g}", "yes" if share < 1 else "no", *map(str, counts), names]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def repeated_lines(repeated: Sequence[dict[str, Any]]) -> list[str]:
    """Return the spread of the repeated forecasts. It is not measured if one of them is missing or refused."""
    job, number = repeated[0]["job"], len(repeated)
    shown = ", ".join(
        ("none" if each["time_s"] is None else f"{each['time_s']:.1f} s")
        + (f" (refused: {', '.join(each['refused'])})" if each["refused"] else "")
        for each in repeated
    )
    missing = sum(each["time_s"] is None or bool(each["refused"]) for each in repeated)
    times = [each["time_s"] for each in repeated if each["time_s"] is not None]
    spread = NAN if missing else (max(times) - min(times)) / statistics.median(times)
    return [
        f"{job} forecast {number} times: {shown}.",
        "",
        target(f"repeated forecasts that were refused, of {number}", float(missing), 0, at_most=True),
        target("spread of the repeated forecasts, (highest - lowest) / median", spread, SPREAD, at_most=True),
    ]


def known(value: float | None) -> float:
    """Return a value, or NaN for None."""
    return NAN if value is None else value


def growing_share(outcome: Outcome) -> float:
    """Return the growing part of the canaries as a share of that of the whole."""
    return sum(point.growing_s for point in outcome.shown.points) / max(1e-9, outcome.actual.growing_s)


def pair_row(pair: dict[str, Any]) -> str:
    """Return one row of the table of pairs."""
    said = pair["decision"] or f"not decided ({pair['probability']:.0%} < {CERTAIN:.0%})"
    right = "-" if not pair["decision"] else "yes" if pair["decision"] == pair["actual"] else "**no**"
    forecasts = " / ".join("-" if usd is None else f"{usd:.4f}" for usd in pair["forecast_usd"])
    actual = " / ".join("-" if usd is None else f"{usd:.4f}" for usd in pair["actual_usd"])
    if pair["failure"]:
        right = f"failed: {pair['failure'][:40]}"
    return f"| {pair['name']}: {' / '.join(pair['clusters'])} | {forecasts} | {actual} | {said} | {right} |"


def published() -> list[str]:
    """Return the source's costs beside the costs that its times and prices give."""
    lines = ["| cluster | seconds | stated USD | computed USD |", "|---|---:|---:|---:|"]
    for name, count, hourly_usd, seconds, stated_usd in PUBLISHED:
        usd = cost.job_cost_usd(count * hourly_usd, seconds)
        lines.append(f"| {name} | {seconds:,} | {stated_usd:.2f} | {usd:.2f} |")
    return lines

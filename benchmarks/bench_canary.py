"""Canary forecasts against the whole jobs.

Question: how far are the forecasts from the whole jobs, and do they refuse what no line can forecast?

Method: each job of `canary_jobs` runs as canaries (1, 2 and 3 % of its data, three times each) and then as a whole, on
simulated hosts of this machine, with the same launcher and the same readings. Its files are dropped from the page cache
before every run. The forecast is made without the whole. The whole's time, CPU and memory are compared with it. Jobs
that no line can forecast (quadratic cost, early stop, fixed steps, work that a short run never reaches, uneven files)
must be refused. Pairs of clusters run whole too. One job is forecast five times, each from new canaries.

The source (canary training on SageMaker) forecast +25 % and -30 %, memory up to six times too high, and between 23,000
and 40,000 s for the same job. Its published table of costs is computed from its times and prices.

    python benchmarks/bench_canary.py --short
    python benchmarks/bench_canary.py --only gbt-csv bert
    python benchmarks/bench_canary.py --work DIR      # continues where an earlier call ended

Results, with hardware and versions, go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canary_jobs.execution import canaries, data_of, facts_of, whole
from canary_jobs.jobs import JOBS, PAIRS, Job, Pair
from canary_jobs.scoring import ENOUGH, Score, frugal, score, summary
from harness import HERE, RESULTS, environment, save, say, target

from hetero.canary.comparison import CERTAIN
from hetero.canary.model import CanaryReport, CandidateForecast
from hetero.canary.points import CanaryPoint
from hetero.pricing import cost
from hetero.system.records import decode, encode

FRACTIONS = (0.01, 0.02, 0.03)
REPEATS = 3
REPEATED_JOB = "gbt-csv"
NUM_FORECASTS = 5
TIME_MEDIAN, TIME_MAX, MEMORY_MEDIAN, COVERAGE, SPREAD, COST = 0.10, 0.30, 0.15, (0.80, 0.97), 0.15, 0.10
PUBLISHED = (
    ("6 x ml.m5.4xlarge, predicted", 6, 0.922, 3609, 5.55),
    ("6 x ml.m5.4xlarge, actual", 6, 0.922, 5176, 7.95),
    ("1 x ml.m5.24xlarge, predicted", 1, 5.53, 38454, 59.07),
    ("1 x ml.m5.24xlarge, actual", 1, 5.53, 30770, 47.25),
)
"""The source's table: hosts, USD per host and hour (eu-west-1), seconds, and the USD that it states."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one job showed."""

    job: Job
    shown: CandidateForecast
    order: tuple[str, ...]
    """Ids of the runs in the order of their execution."""
    actual: CanaryPoint | None
    """The whole run. None for jobs that are refused, whose whole is not run."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Rules that refused the time."""
        return tuple(dict.fromkeys(refusal.rule for refusal in self.shown.refused("time")))

    @property
    def scores(self) -> list[Score]:
        """The figures, if the whole finished."""
        if self.actual is None or self.actual.failure:
            return []
        return score(self.job.name, self.shown, facts_of(self.actual))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs and print the tables."""
    args = parse_arguments(argv)
    began_s, facts = time.monotonic(), environment()
    outcomes = [run_job(job, args) for job in JOBS if args.only is None or job.name in args.only]
    wanted = [] if args.only is not None and "pairs" not in args.only else list(PAIRS)
    pairs = [run_pair(pair, args) for pair in (wanted[:1] if args.short else wanted)]
    repeated = [] if args.only is not None and "repeated" not in args.only else run_repeated(args)
    text = render(outcomes, pairs, repeated, args)
    print(text)
    content = {
        "options": {"short": args.short, "only": args.only, "fractions": FRACTIONS, "repeats": args.repeats},
        "basis": "measured on one machine, whose hosts are simulated",
        "jobs": [content_of(each) for each in outcomes],
        "pairs": pairs,
        "repeated_s": repeated,
        "seconds": time.monotonic() - began_s,
        **facts,
    }
    is_full = args.only is None and not args.short
    folder = args.results if is_full else args.results / "short"
    save(folder / ("canary" if is_full else "canary-short"), content, text)
    return 0


def run_job(job: Job, args: argparse.Namespace) -> Outcome:
    """Run the canaries of a job, and the whole unless it must be refused and is."""
    say(f"{job.name}: canaries")
    data = data_of(job, args.work / "data", args.scale)
    folder = args.work / f"{job.name}-{args.scale:g}"
    report = canaries(job, folder / "canary", data=data, scale=args.scale, fractions=FRACTIONS, repeats=args.repeats)
    (shown,) = report.candidates
    order = order_of(folder / "canary")
    is_expected = job.refused and bool(shown.refused("time"))
    actual = None if is_expected else kept_whole(job, folder / "whole", data, args)
    outcome = Outcome(job=job, shown=shown, order=order, actual=actual)
    for each in outcome.scores:
        say(f"  {each.figure}: {each.error:+.1%} {'in' if each.is_covered else 'OUT'} {' '.join(each.refused)}")
    say(f"  refused: {', '.join(outcome.rules) or 'no'}")
    return outcome


def kept_whole(
    job: Job, folder: Path, data: Path | None, args: argparse.Namespace, groups: tuple[str, ...] = ()
) -> CanaryPoint:
    """Return what a whole run used. It is run once for each folder."""
    path = folder.with_name(f"{folder.name}.json")
    if path.is_file():
        return decode(CanaryPoint, json.loads(path.read_text(encoding="utf-8")))
    say(f"{job.name}: whole")
    point = whole(job, folder, data=data, scale=args.scale, groups=groups)
    say(f"  {point.wall_s:.1f} s {point.failure}")
    path.write_text(json.dumps(encode(point)), encoding="utf-8")
    return point


def order_of(folder: Path) -> tuple[str, ...]:
    """Return the ids of the runs in the order of their execution."""
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    return tuple(dict.fromkeys(run_id for line in lines if (run_id := found_id(line))))


def found_id(line: dict[str, Any]) -> str:
    """Return the id in a line of the ledger, which may be nested."""
    for value in (line, *(each for each in line.values() if isinstance(each, dict))):
        if isinstance(value.get("run_id"), str):
            return str(value["run_id"])
    return ""


def run_pair(pair: Pair, args: argparse.Namespace) -> dict[str, Any]:
    """Forecast which of two clusters is cheaper, then run both."""
    job = next(each for each in JOBS if each.name == pair.job)
    say(f"pair: {pair.name}")
    data = data_of(job, args.work / "data", args.scale)
    folder = args.work / f"pair-{pair.job}-{args.scale:g}"
    clusters = (pair.first, pair.second)
    report: CanaryReport = canaries(
        job,
        folder / "canary",
        data=data,
        scale=args.scale,
        fractions=FRACTIONS,
        repeats=args.repeats,
        clusters=clusters,
        prices=pair.prices,
    )
    usd = []
    for number, (groups, shown) in enumerate(zip(clusters, report.candidates, strict=True)):
        point = kept_whole(job, folder / f"whole-{number}", data, args, groups)
        assert shown.hourly_usd is not None
        usd.append(cost.job_cost_usd(shown.hourly_usd, point.wall_s))
    names = [shown.name for shown in report.candidates]
    decision = report.decision
    assert decision is not None
    forecasts = [figure.value if (figure := shown.figure("cost")) else None for shown in report.candidates]
    cheapest = names[usd.index(min(usd))]
    say(f"  {decision.sentence} actual: {cheapest}")
    return {
        "name": pair.name,
        "job": pair.job,
        "clusters": names,
        "forecast_usd": forecasts,
        "actual_usd": usd,
        "decision": decision.cheapest,
        "probability": decision.probability,
        "actual": cheapest,
        "sentence": decision.sentence,
    }


def run_repeated(args: argparse.Namespace) -> list[float]:
    """Forecast one job several times, each from new canaries on other files. Return the times in seconds."""
    job = next(each for each in JOBS if each.name == REPEATED_JOB)
    data = data_of(job, args.work / "data", args.scale)
    found = []
    for seed in range(2 if args.short else NUM_FORECASTS):
        say(f"repeated forecast {seed + 1} of {job.name}")
        folder = args.work / f"repeated-{args.scale:g}-{seed}"
        report = canaries(
            job, folder, data=data, scale=args.scale, fractions=FRACTIONS, repeats=args.repeats, seed=seed + 1
        )
        figure = report.candidates[0].figure("time")
        if figure is not None:
            found.append(figure.value)
    return found


def content_of(outcome: Outcome) -> dict[str, Any]:
    """Return what the file says of one job."""
    cheap, number = frugal(outcome.shown, outcome.order)
    return {
        "job": {field: getattr(outcome.job, field) for field in ("name", "about", "script", "args", "refused")},
        "forecast": encode(outcome.shown),
        "actual": None if outcome.actual is None else encode(outcome.actual),
        "errors": {each.figure: each.error for each in outcome.scores},
        "frugal": {"runs": number, "canary_s": cheap.canary_s, "figures": encode(cheap.figures)},
    }


def render(
    outcomes: Sequence[Outcome], pairs: Sequence[dict[str, Any]], repeated: Sequence[float], args: argparse.Namespace
) -> str:
    """Return the tables, and each figure with its bound."""
    lines = [
        "# Canary forecasts against whole jobs",
        "",
        "| job | whole | forecast | 90 % interval | error | memory error | refused because of | canaries / whole |",
        "|---|---:|---:|---|---:|---:|---|---:|",
        *(job_row(each) for each in outcomes),
    ]
    scores = [each for outcome in outcomes for each in outcome.scores]
    lines += ["", *bounds(outcomes, scores)]
    if pairs:
        lines += ["", "| pair | forecast USD | actual USD | said | right |", "|---|---|---|---|---|"]
        lines += [pair_row(each) for each in pairs]
        decided = [each for each in pairs if each["decision"]]
        wrong = sum(each["decision"] != each["actual"] for each in decided)
        lines += ["", target(f"pairs decided wrongly, of {len(decided)} decided", float(wrong), 0, at_most=True)]
    if repeated:
        spread = (max(repeated) - min(repeated)) / statistics.median(repeated)
        shown = ", ".join(f"{each:.1f}" for each in repeated)
        lines += ["", f"{REPEATED_JOB} forecast {len(repeated)} times: {shown} s.", ""]
        lines.append(
            target("spread of the repeated forecasts, (highest - lowest) / median", spread, SPREAD, at_most=True)
        )
    lines += ["", "The source's table, from its times and prices:", "", *published()]
    return "\n".join([*lines, ""])


def job_row(outcome: Outcome) -> str:
    """Return one row of the table."""
    time_s = outcome.shown.figure("time")
    scores = {each.figure: each for each in outcome.scores}
    is_refused = bool(outcome.rules)
    actual = "-" if outcome.actual is None else outcome.actual.failure or f"{outcome.actual.wall_s:.1f} s"
    if outcome.actual is not None and outcome.actual.failure:
        actual = f"failed: {outcome.actual.failure[:40]}"
    memory = scores.get("memory peak")
    share = None if outcome.actual is None or outcome.actual.failure else outcome.shown.canary_s / outcome.actual.wall_s
    cells = [
        outcome.job.name,
        actual,
        "-" if time_s is None else f"{'(' if is_refused else ''}{time_s.value:.1f} s{')' if is_refused else ''}",
        "-" if time_s is None or is_refused else f"{time_s.low:.1f} to {time_s.high:.1f} s",
        f"{scores['time'].error:+.1%}" if "time" in scores and not is_refused else "-",
        f"{memory.error:+.1%}" if memory is not None and not memory.refused else "-",
        ", ".join(outcome.rules) or "-",
        "-" if share is None else f"{share:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def bounds(outcomes: Sequence[Outcome], scores: Sequence[Score]) -> list[str]:
    """Return each figure with its bound."""
    found = summary(scores)
    nan = float("nan")

    def value(name: str) -> float:
        return nan if found[name] is None else float(found[name])

    must_refuse = [each for each in outcomes if each.job.refused]
    others = [each for each in outcomes if not each.job.refused]
    failing = [each for each in outcomes if each.actual is not None and each.actual.failure and each.job.limit_mib]
    unforeseen = sum((each.shown.out_of_memory or 0.0) < 0.5 for each in failing)
    false_alarms = sum(
        (each.shown.out_of_memory or 0.0) >= 0.5 for each in outcomes if each.actual and not each.actual.failure
    )
    finished = [each for each in others if each.actual is not None and not each.actual.failure]
    shares = [each.shown.canary_s / each.actual.wall_s for each in finished if each.actual is not None]
    growing = [growing_share(each) for each in finished]
    cheap = [frugal(each.shown, each.order) for each in finished]
    cheap_share = [
        each.canary_s / outcome.actual.wall_s
        for (each, _), outcome in zip(cheap, finished, strict=True)
        if outcome.actual
    ]
    cheap_scores = summary(
        [
            one
            for (each, _), outcome in zip(cheap, finished, strict=True)
            if outcome.actual is not None
            for one in score(outcome.job.name, each, facts_of(outcome.actual))
        ]
    )
    num_refused = sum(bool(each.rules) for each in others)
    lines = [
        target(
            f"time: median error of {found['num_times']} forecasts", value("time_median"), TIME_MEDIAN, at_most=True
        ),
        target("time: largest error that was not refused", value("time_max"), TIME_MAX, at_most=True),
        target("memory peak: median error", value("memory_median"), MEMORY_MEDIAN, at_most=True),
        target(f"jobs out of memory that were not foreseen, of {len(failing)}", float(unforeseen), 0, at_most=True),
        target("jobs that finished although they were said to run out of memory", float(false_alarms), 0, at_most=True),
        target(f"share of {found['num_intervals']} intervals that cover", value("coverage"), COVERAGE[0]),
        target("the same, not more than", value("coverage"), COVERAGE[1], at_most=True),
        "- by figure: "
        + ", ".join(f"{name} {hits} of {num}" for name, (hits, num) in found["coverage_by_figure"].items()),
        target(
            f"jobs that must be refused and were not, of {len(must_refuse)}",
            float(sum(not each.rules for each in must_refuse)),
            0,
            at_most=True,
        ),
        f"- jobs that a line can forecast and that were refused: {num_refused} of {len(others)}",
    ]
    if shares:
        lines += [
            target("cost of the canaries / whole, median", statistics.median(shares), COST, at_most=True),
            f"- the same without start-up, which does not grow: {statistics.median(growing):.3f}",
            target(
                f"the same with --enough {100 * ENOUGH:g}%, median",
                statistics.median(cheap_share),
                COST,
                at_most=True,
            ),
            (
                f"- with --enough {100 * ENOUGH:g}%: {statistics.median(number for _, number in cheap):g} runs "
                f"(median), median error of the time {cheap_scores['time_median'] or nan:.3f}, largest "
                f"{cheap_scores['time_max'] or nan:.3f}, coverage {cheap_scores['coverage'] or nan:.3f}"
            ),
        ]
    return lines


def growing_share(outcome: Outcome) -> float:
    """Return the growing part of the canaries as a share of that of the whole."""
    assert outcome.actual is not None
    return sum(point.growing_s for point in outcome.shown.points) / max(1e-9, outcome.actual.growing_s)


def pair_row(pair: dict[str, Any]) -> str:
    """Return one row of the table of pairs."""
    said = pair["decision"] or f"not decided ({pair['probability']:.0%} < {CERTAIN:.0%})"
    right = "-" if not pair["decision"] else "yes" if pair["decision"] == pair["actual"] else "**no**"
    forecasts = " / ".join("-" if usd is None else f"{usd:.4f}" for usd in pair["forecast_usd"])
    actual = " / ".join(f"{usd:.4f}" for usd in pair["actual_usd"])
    return f"| {pair['name']}: {' / '.join(pair['clusters'])} | {forecasts} | {actual} | {said} | {right} |"


def published() -> list[str]:
    """Return the source's costs beside the costs that its times and prices give."""
    lines = ["| cluster | seconds | stated USD | computed USD |", "|---|---:|---:|---:|"]
    for name, count, hourly_usd, seconds, stated_usd in PUBLISHED:
        usd = cost.job_cost_usd(count * hourly_usd, seconds)
        lines.append(f"| {name} | {seconds:,} | {stated_usd:.2f} | {usd:.2f} |")
    return lines


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0], allow_abbrev=False)
    names = [job.name for job in JOBS]
    parser.add_argument("--short", action="store_true", help="a tenth of the data, two repeats, fewer pairs")
    parser.add_argument("--only", nargs="+", choices=[*names, "pairs", "repeated"], help="jobs to run")
    parser.add_argument("--scale", type=float, help="amount of data (1; 0.1 with --short)")
    parser.add_argument("--repeats", type=int, help=f"runs of each fraction ({REPEATS}; 2 with --short)")
    parser.add_argument("--work", type=Path, default=HERE / "results" / "short" / "canary-work", help="folder for runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes (%(default)s)")
    args = parser.parse_args(argv)
    args.scale = args.scale or (0.1 if args.short else 1.0)
    args.repeats = args.repeats or (2 if args.short else REPEATS)
    args.work = args.work.resolve()
    return args


if __name__ == "__main__":
    sys.exit(main())

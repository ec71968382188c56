"""Canary forecasts against the whole jobs.

Question: how far are the forecasts from the whole jobs, and do they refuse what no line can forecast?

Method: each job of `canary_jobs` runs as canaries (1, 2 and 3 % of its data, three times each) and then as a whole, on
simulated hosts of this machine, with the same launcher and the same readings. Its files are dropped from the page cache
before every run. The forecast is made without the whole. The whole's time, CPU and memory are compared with it. Jobs
that no line can forecast (quadratic cost, fixed steps, short passes, uneven files) must be refused by a rule that knows
why, see `canary_jobs.jobs`. Pairs of clusters run whole too. One job is forecast five times, each from new canaries.
The memory forecasts are also judged against limits around the actual peaks.

The source (canary training on SageMaker) forecast +25 % and -30 %, memory up to six times too high, and between 23,000
and 40,000 s for the same job. Its published table of costs is computed from its times and prices.

    python benchmarks/bench_canary.py --short
    python benchmarks/bench_canary.py --only gbt-csv bert
    python benchmarks/bench_canary.py --work DIR      # uses the runs of an earlier call with the same code and data

Results, with hardware and versions, go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canary_jobs.execution import canaries, data_of, folder_of, kept_whole, stamp_of
from canary_jobs.jobs import JOBS, PAIRS, Job, Pair
from canary_jobs.rendering import render
from canary_jobs.scoring import Outcome
from harness import HERE, RESULTS, environment, save, say

from hetero.decide.canary.model import CanaryReport
from hetero.documents.records import encode
from hetero.pricing import cost

FRACTIONS = (0.01, 0.02, 0.03)
REPEATS = 3
REPEATED_JOB = "gbt-csv"
NUM_FORECASTS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs and print the tables."""
    args = parse_arguments(argv)
    if args.work is not None:
        measure(args, args.work.resolve())
        return 0
    parent = HERE / "results" / "short"
    parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="canary-work-", dir=parent))
    say(f"runs are in {work} until the end; to go on after an interruption: --work {work}")
    measure(args, work)
    shutil.rmtree(work)
    return 0


def measure(args: argparse.Namespace, work: Path) -> None:
    """Run the jobs, print the tables and save the result."""
    began_s, facts = time.monotonic(), environment()
    outcomes = [run_job(job, args, work, facts) for job in JOBS if args.only is None or job.name in args.only]
    wanted = [] if args.only is not None and "pairs" not in args.only else list(PAIRS)
    pairs = [run_pair(pair, args, work, facts) for pair in (wanted[:1] if args.short else wanted)]
    repeated = [] if args.only is not None and "repeated" not in args.only else run_repeated(args, work, facts)
    text = render(outcomes, pairs, repeated)
    print(text)
    content = {
        "options": {"short": args.short, "only": args.only, "fractions": FRACTIONS, "repeats": args.repeats},
        "basis": "measured on one machine, whose hosts are simulated",
        "jobs": [content_of(each) for each in outcomes],
        "pairs": pairs,
        "repeated": repeated,
        "seconds": time.monotonic() - began_s,
        **facts,
    }
    is_full = args.only is None and not args.short
    folder = args.results if is_full else args.results / "short"
    save(folder / ("canary" if is_full else "canary-short"), content, text)


def run_job(job: Job, args: argparse.Namespace, work: Path, facts: Mapping[str, Any]) -> Outcome:
    """Run the canaries of a job, and the whole."""
    say(f"{job.name}: canaries")
    data = data_of(job, work / "data", args.scale)
    folder = folder_of(job.name, job, work, args.scale)
    stamp = stamp_of(folder, facts)
    report = canaries(job, folder / "canary", data=data, scale=args.scale, fractions=FRACTIONS, repeats=args.repeats)
    outcome = Outcome(
        job=job,
        shown=report.candidates[0],
        actual=kept_whole(job, folder / "whole", data=data, scale=args.scale),
        stamp=stamp,
    )
    for each in outcome.scores:
        say(f"  {each.figure}: {each.error:+.1%} {'in' if each.is_covered else 'OUT'} {' '.join(each.refused)}")
    say(f"  refused: {', '.join(outcome.rules) or 'no'}")
    return outcome


def run_pair(pair: Pair, args: argparse.Namespace, work: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Forecast which of two clusters is cheaper, then run both."""
    job = next(each for each in JOBS if each.name == pair.job)
    say(f"pair: {pair.name}")
    data = data_of(job, work / "data", args.scale)
    clusters = (pair.first, pair.second)
    folder = folder_of(f"pair-{pair.job}", job, work, args.scale, clusters)
    stamp = stamp_of(folder, facts)
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
    wholes = [
        kept_whole(job, folder / f"whole-{number}", data=data, scale=args.scale, groups=groups)
        for number, groups in enumerate(clusters)
    ]
    failure = next((point.failure for point in wholes if point.failure), "")
    usd = [
        None if shown.hourly_usd is None else cost.job_cost_usd(shown.hourly_usd, point.wall_s)
        for shown, point in zip(report.candidates, wholes, strict=True)
    ]
    names = [shown.name for shown in report.candidates]
    decision = report.decision
    assert decision is not None  # there are two clusters
    # A whole that failed costs little, so it decides nothing.
    known = [] if failure or None in usd else sorted(zip(usd, names, strict=True))
    say(f"  {decision.sentence} actual: {known[0][1] if known else failure}")
    return {
        "name": pair.name,
        "job": pair.job,
        "stamp": stamp,
        "clusters": names,
        "forecast_usd": [figure.value if (figure := each.figure("cost")) else None for each in report.candidates],
        "actual_usd": usd,
        "failure": failure if failure or known else "a cost is not known",
        "decision": decision.cheapest,
        "probability": decision.probability,
        "actual": known[0][1] if known else "",
        "sentence": decision.sentence,
    }


def run_repeated(args: argparse.Namespace, work: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Forecast one job several times, each from new canaries on other files."""
    job = next(each for each in JOBS if each.name == REPEATED_JOB)
    data = data_of(job, work / "data", args.scale)
    found = []
    for seed in range(2 if args.short else NUM_FORECASTS):
        say(f"repeated forecast {seed + 1} of {job.name}")
        folder = folder_of(f"repeated-{seed}", job, work, args.scale)
        stamp = stamp_of(folder, facts)
        report = canaries(
            job,
            folder / "canary",
            data=data,
            scale=args.scale,
            fractions=FRACTIONS,
            repeats=args.repeats,
            seed=seed + 1,
        )
        (shown,) = report.candidates
        figure = shown.figure("time")
        found.append(
            {
                "job": job.name,
                "stamp": stamp,
                "time_s": None if figure is None else figure.value,
                "refused": list(dict.fromkeys(each.rule for each in shown.refused("time"))),
            }
        )
    return found


def content_of(outcome: Outcome) -> dict[str, Any]:
    """Return what the file says of one job."""
    return {
        "job": {field: getattr(outcome.job, field) for field in ("name", "about", "script", "args", "refused_by")},
        "forecast": encode(outcome.shown),
        "stamp": dict(outcome.stamp),
        "actual": encode(outcome.actual),
        "errors": {each.figure: each.error for each in outcome.scores},
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0], allow_abbrev=False)
    names = [job.name for job in JOBS]
    parser.add_argument("--short", action="store_true", help="a tenth of the data, two repeats, fewer pairs")
    parser.add_argument("--only", nargs="+", choices=[*names, "pairs", "repeated"], help="jobs to run")
    parser.add_argument("--scale", type=float, help="amount of data (1; 0.1 with --short)")
    parser.add_argument("--repeats", type=int, help=f"runs of each fraction ({REPEATS}; 2 with --short)")
    parser.add_argument(
        "--work",
        type=Path,
        help="folder that keeps runs, and uses those of an earlier call (a new one, removed at the end)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes (%(default)s)")
    args = parser.parse_args(argv)
    args.scale = args.scale or (0.1 if args.short else 1.0)
    args.repeats = args.repeats or (2 if args.short else REPEATS)
    return args


if __name__ == "__main__":
    sys.exit(main())

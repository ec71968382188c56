"""Compare the runs of studies as MLBench does: time to accuracy, accuracy after time, speed-up, communication, cost.

The script of a study logs its accuracy, or the study finds it in the log by an expression. The study's file states the
target. Everything else is optional. README.md in this folder lists the metrics that are used.

    python benchmarks/mlbench/compare.py benchmarks/mlbench/1a-short.yaml benchmarks/mlbench/2a-short.yaml
    python benchmarks/mlbench/compare.py benchmarks/mlbench/*-short.yaml --save benchmarks/results/mlbench

A study with replicates has one row for each combination of levels, with means and 95 % intervals (Student's t).

Runs of the same replicate with equal levels, except the workers, are compared. The speed-up of a run is relative to the
run among them that has the fewest workers of the study. Without it, or if it did not reach the target, there is no
speed-up. A run that failed, was skipped or diverged has no time to accuracy and no accuracy after time. Costs are
modelled: a time of this machine at the document's price of a preemptible n1-standard-4 for each worker.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.figures import (
    accuracy_after,
    cost_usd,
    evaluations,
    has_training_clock,
    hourly_usd,
    logged_time_to,
    speed_up,
    time_to,
)
from tasks.prescription import LINEAR

from hetero.decide.studies.conduct import read_results
from hetero.decide.studies.ledger import LEDGER_FILE_NAME
from hetero.decide.studies.runs import FINISHED, Level, RunResult
from hetero.decide.studies.statistics import interval_of
from hetero.decide.studies.study import default_folder, prepare_study
from hetero.decide.studies.study_file import read_study
from hetero.errors import ConfigError
from hetero.metrics.logged import LoggedMetric

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the harness
from harness import environment, save

_OF_WORKERS = {"ranks", "hosts", "cluster", "workers"}
"""Factors that say how many workers a run has."""
_NETWORK = "network_mbit"
_DATA = "data"
"""Factor with one level that names the data, in a study of a script that does not log ``stand_in``."""
_LOSS = "test_loss"
_AFTER_S = {"mlbench-1a-short": 10.0, "mlbench-2a-short": 0.5, "mlbench-open-short": 8.0}
"""Seconds of the accuracy after time, by study. For other studies they are the prescribed two hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What one run shows."""

    study: str
    run_id: str
    levels: Mapping[str, Level]
    replicate: int
    num_workers: int
    state: str
    data: str
    clock: str
    """``training``, or ``run`` if the script logs no seconds of training."""
    target: float
    time_to_accuracy_s: float | None
    steps_to_accuracy: int | None
    last_accuracy: float | None
    accuracy_after_s: float
    accuracy_after: float | None
    speed_up: float | None
    load: float | None
    """Load average of the last minute, as rank 0's machine had it before the training."""
    communication_over_computation: Mapping[int, float]
    """By worker."""
    cost_usd: float | None
    """To the target accuracy, modelled."""
    losses: Sequence[tuple[float, float]]
    """Pairs of a time in seconds and the loss on the test set."""
    target_loss: float | None
    """The study's target of ``test_loss``, if it has one."""
    time_to_loss_s: float | None
    """Seconds to the target loss, or None."""


def compare_study(
    path: Path, folder: Path, *, metric: str, after_s: float | None, replicates: int | None = None
) -> list[Compared]:
    """Return what each run of one study shows, ordered by the other levels and then by the number of workers.

    Args:
        path: The study's file.
        folder: Output folder of the study.
        metric: Name of the accuracy.
        after_s: Seconds for the accuracy after time. None for the prescribed ones, or those of `_AFTER_S`.
        replicates: Runs per combination of levels, if the study was executed with ``--replicates``.

    Raises:
        ConfigError: If a file is malformed, the study has no target or no runs.
    """
    plan = prepare_study(path, replicates=replicates).plan
    targets = {each.name: each.target for each in plan.study.metrics}
    target, target_loss = targets.get(metric), targets.get(_LOSS)
    if target is None:
        raise ConfigError(
            f"{path}: metric {metric!r} has no target; expected metrics: [{{name: {metric}, target: 0.8}}]"
        )
    if not (folder / LEDGER_FILE_NAME).is_file():
        raise ConfigError(f"{folder} has no {LEDGER_FILE_NAME}; run hetero study {path} first")
    results = read_results(plan.runs, folder)
    factors = [factor.name for factor in plan.study.factors]
    courses = {result.run_id: evaluations(result.metrics, metric) for result in results}
    if after_s is None:
        after_s = _AFTER_S.get(plan.study.name, LINEAR.duration_s)
    states = {result.run_id: _state(result) for result in results}
    times = {
        result.run_id: logged_time_to(result.metrics, metric, target) or time_to(courses[result.run_id], target)
        for result in results
        if states[result.run_id] == FINISHED
    }
    # Keyed by the other levels. One worker does not use the network, so its time is the baseline on any network.
    fewest = min(int(run.levels["ranks"]) for run in plan.runs)
    ignored = {_NETWORK} if fewest == 1 else set()
    baselines = {
        _others(result, factors, ignored): reached.at_s
        for result in results
        if _num_workers(result) == fewest and (reached := times.get(result.run_id)) is not None
    }
    compared = []
    for result in sorted(results, key=lambda each: (list(map(str, _others(each, factors))), _num_workers(each))):
        course, reached, state = courses[result.run_id], times.get(result.run_id), states[result.run_id]
        losses = evaluations(result.metrics, _LOSS)
        reached_loss = None if target_loss is None else time_to(losses, target_loss, is_loss=True)
        baseline_s = baselines.get(_others(result, factors, ignored))
        price_usd = hourly_usd(num_hosts=_num_workers(result))
        compared.append(
            Compared(
                study=plan.study.name,
                run_id=result.run_id,
                levels={name: result.levels[name] for name in factors},
                replicate=result.replicate,
                num_workers=_num_workers(result),
                state=state,
                data=_data(result),
                clock="training" if has_training_clock(result.metrics) else "run",
                target=target,
                time_to_accuracy_s=reached.at_s if reached else None,
                steps_to_accuracy=reached.step if reached else None,
                last_accuracy=course[-1].value if course else None,
                accuracy_after_s=after_s,
                accuracy_after=accuracy_after(course, after_s) if state == FINISHED else None,
                speed_up=speed_up(baseline_s, reached.at_s) if reached and baseline_s else None,
                load=_first(result.metrics, "load_average"),
                communication_over_computation=_ratios(result.metrics),
                cost_usd=cost_usd(reached.at_s, price_usd) if reached else None,
                losses=[(each.at_s, each.value) for each in losses],
                target_loss=target_loss,
                time_to_loss_s=reached_loss.at_s if reached_loss else None,
            )
        )
    return compared


def markdown(compared: Sequence[Compared]) -> str:
    """Return the table of one study, and the loss over time of its runs."""
    first = compared[0]
    varied = [
        name
        for name in first.levels
        if name not in _OF_WORKERS | {_DATA} and len({c.levels[name] for c in compared}) > 1
    ]
    rows: dict[tuple[int, ...], list[Compared]] = {}
    for each in compared:
        rows.setdefault((each.num_workers, *(each.levels[name] for name in varied)), []).append(each)
    has_replicates = any(len(row) > 1 for row in rows.values())
    head = [
        "workers",
        *varied,
        *(["replicates"] if has_replicates else []),
        "data",
        f"time to {first.target:g}",
        "steps",
        "speed-up",
    ]
    head += [f"accuracy after {first.accuracy_after_s:,g} s", "last accuracy", "communication / computation"]
    head += ["USD", "load"]
    num_texts = head.index("data")
    lines = [
        f"## {first.study}",
        "",
        "| " + " | ".join(head) + " |",
        "|---:|" + "---|" * num_texts + "---:|" * (len(head) - num_texts - 1),
    ]
    for row in rows.values():
        each = row[0]
        ratios = [ratio for one in row for ratio in one.communication_over_computation.values()]
        cells = [str(each.num_workers), *(str(each.levels[name]) for name in varied)]
        cells += [str(len(row))] if has_replicates else []
        cells += [", ".join([each.data, *dict.fromkeys(one.state for one in row if one.state != FINISHED)])]
        cells += [_mean([one.time_to_accuracy_s for one in row], ".1f", " s")]
        cells += [_mean([one.steps_to_accuracy for one in row], "d" if len(row) == 1 else ".0f")]
        cells += [_mean([one.speed_up for one in row], ".2f"), _mean([one.accuracy_after for one in row], ".3f")]
        cells += [_mean([one.last_accuracy for one in row], ".3f")]
        cells += [f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"]
        cells += [_mean([one.cost_usd for one in row], ".6f")]
        cells += [_range([one.load for one in row if one.load is not None])]
        lines.append("| " + " | ".join(cells) + " |")
    for row in rows.values():
        each = row[0]
        if each.losses:
            shown = _thinned(each.losses)
            label = ", ".join([f"{each.num_workers} workers", *(f"{name} {each.levels[name]}" for name in varied)])
            label += f", replicate {each.replicate}" if has_replicates else ""
            text = f"Loss over time, {label}: " + ", ".join(f"{at:.1f} s {loss:.3f}" for at, loss in shown) + "."
            if each.target_loss is not None:
                when = "not reached" if each.time_to_loss_s is None else f"reached after {each.time_to_loss_s:.1f} s"
                text += f" The target loss {each.target_loss:g} was {when}."
            lines += ["", text]
    if any(each.clock == "run" for each in compared):
        lines += ["", "Times are those since the start of the run, because the script logs no seconds of training."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, save them if asked, and return the exit status."""
    args = parse_arguments(argv)
    found = []
    try:
        for path in args.studies:
            folder = args.root / default_folder(read_study(path)).name
            found.append(
                compare_study(path, folder, metric=args.metric, after_s=args.after_s, replicates=args.replicates)
            )
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = "\n".join(markdown(compared) for compared in found if compared)
    print(text)
    if args.save is not None:
        facts = environment()
        hardware = facts["hardware"]
        versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
        footer = f"{facts['date']}, commit {facts['commit']}, {hardware['cpus']} CPUs ({hardware['cpu']}); {versions}. "
        footer += "Basis: times, accuracies, losses and ratios are measured here. Costs are modelled. The load is the "
        footer += "number of processes that ran or waited for a CPU, in the minute before the training."
        runs = [asdict(each) for compared in found for each in compared]
        save(args.save, {**facts, "runs": runs}, f"# MLBench's tasks\n\n{text}\n{footer}\n")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare the runs of studies as MLBench does.", allow_abbrev=False)
    parser.add_argument("studies", type=Path, nargs="+", metavar="STUDY.yaml")
    parser.add_argument(
        "--root", type=Path, default=Path("runs/studies"), help="folder of the studies' output (%(default)s)"
    )
    parser.add_argument("--metric", default="accuracy", help="name of the accuracy (%(default)s)")
    parser.add_argument(
        "--after-s", type=float, help="of the accuracy after time (7,200; 0.5 to 10 in the short forms)"
    )
    parser.add_argument("--replicates", type=int, help="if the studies were executed with it (default: as their files)")
    parser.add_argument("--save", type=Path, help="path without an ending, for .json and .md")
    return parser.parse_args(argv)


def _state(result: RunResult) -> str:
    """Return how a run ended. A run that finished may have been skipped, or have diverged."""
    return next((name for name in ("skipped", "diverged") if _first(result.metrics, name)), result.state)


def _num_workers(result: RunResult) -> int:
    return int(result.levels["ranks"])


def _others(result: RunResult, factors: Sequence[str], ignored: Set[str] = frozenset()) -> tuple[Level, ...]:
    """Return the levels of the factors that do not state the workers and are not ignored, and the replicate."""
    levels = tuple(result.levels[name] for name in factors if name not in _OF_WORKERS | ignored)
    return (*levels, result.replicate)


def _data(result: RunResult) -> str:
    """Return what a run's data is: by its metrics, or else by the study's factor ``data``."""
    is_stand_in, count = (_first(result.metrics, name) for name in ("stand_in", "training_samples"))
    if is_stand_in is not None:
        return "stand-in" if is_stand_in else "published"
    if count is not None:
        return f"unknown, {count:.0f} samples"
    return str(result.levels.get(_DATA, "not stated"))


def _first(values: Sequence[LoggedMetric], name: str) -> float | None:
    """Return the first value of a metric, or None."""
    return next((value.value for value in values if value.name == name), None)


def _ratios(values: Sequence[LoggedMetric]) -> dict[int, float]:
    return {value.rank: value.value for value in values if value.name == "communication_ratio"}


def _mean(values: Sequence[float | None], form: str, unit: str = "") -> str:
    """Return the mean of replicates with its 95 % interval, and how many have a value if not all do."""
    known = [value for value in values if value is not None]
    found = interval_of(known)
    if found is None:
        return "-"
    text = f"{known[0] if len(known) == 1 else found.mean:{form}}{unit}"
    if found.high is not None:
        text = f"{found.mean:{form}} ± {found.high - found.mean:{form}}{unit}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = (f"{value:.1f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _thinned(pairs: Sequence[tuple[float, float]], count: int = 8) -> list[tuple[float, float]]:
    """Return at most ``count`` pairs, with the first and the last."""
    if len(pairs) <= count:
        return list(pairs)
    return [pairs[round(index * (len(pairs) - 1) / (count - 1))] for index in range(count)]


if __name__ == "__main__":
    sys.exit(main())

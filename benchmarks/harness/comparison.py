"""Trials, round by round, interleaved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.processes import Child, ProcessFailedError, say
from harness.trials import Row, Run, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How each trial is run."""

    runs: int
    """Rounds, >= 1. A result needs five or more."""
    seconds: float
    """Of each run, after its warm-up."""
    warmup_batches: int = 8
    """Batches before each run. The warm-up lasts at least `Competitor.min_warmup_s`. It must take more batches than the
    buffers between supply and trainer hold. 0: no warm-up."""
    min_batches: int = 4
    """Of each run, however long they take."""
    fresh: bool = True
    """Whether every round starts new processes. Otherwise a trial keeps its process for all rounds of its group."""


def estimate_s(trials: Sequence[Trial], protocol: Protocol) -> float:
    """Return roughly how long `compare` will take."""
    return sum(
        (protocol.runs if is_fresh(trial, protocol) else 1) * trial.start_s
        + protocol.runs * (trial.warmup_s + protocol.seconds)
        for trial in trials
    )


def is_fresh(trial: Trial, protocol: Protocol) -> bool:
    """Return whether each round gives this trial new processes."""
    return protocol.fresh if trial.fresh is None else trial.fresh


def compare(
    script: str,
    trials: Sequence[Trial],
    protocol: Protocol,
    on_group: Callable[[Sequence[Row]], None] | None = None,
) -> list[Row]:
    """Run all trials of each group, interleaved, and return a row for each.

    Args:
        script: The benchmark's file.
        trials: In the order of the table. They run group by group.
        protocol: How to run them.
        on_group: Called with all rows so far when a group is complete.
    """
    rows: list[Row] = []
    for group in dict.fromkeys(trial.group for trial in trials):
        rows += _compare_group(script, [trial for trial in trials if trial.group == group], protocol)
        if on_group is not None:
            on_group(rows)
    return rows


def rotated(count: int, round_index: int) -> list[int]:
    """Return the order of one round: every member once, each round beginning with another one."""
    return [(offset + round_index) % count for offset in range(count)]


def _compare_group(script: str, members: Sequence[Trial], protocol: Protocol) -> list[Row]:
    found: list[list[Run]] = [[] for _ in members]
    errors = ["" for _ in members]
    kept: dict[int, Child] = {}
    try:
        for round_index in range(protocol.runs):
            for index in rotated(len(members), round_index):
                if not errors[index]:
                    errors[index] = _run_once(script, members[index], protocol, found[index], kept, index)
                    _say_run(members[index], f"{round_index + 1}/{protocol.runs}", found[index], errors[index])
    finally:
        for child in kept.values():
            child.stop()
    return [
        Row(trial=trial, runs=tuple(found_runs), error=error)
        for trial, found_runs, error in zip(members, found, errors, strict=True)
    ]


def _run_once(
    script: str, trial: Trial, protocol: Protocol, found: list[Run], kept: dict[int, Child], index: int
) -> str:
    """Run a trial once. Return the error."""
    child = kept.get(index)
    try:
        if child is None:
            child = kept[index] = Child(script, "trainer", trial.competitor, trial.config, trial.environment)
            child.ask()
        command = {
            "seconds": protocol.seconds,
            "warmup_batches": protocol.warmup_batches,
            "min_batches": protocol.min_batches,
        }
        found.append(Run(**child.ask(json.dumps(command))))
    except ProcessFailedError as error:
        kept.pop(index).stop(1.0)
        return str(error)
    if is_fresh(trial, protocol):
        kept.pop(index).stop()
    return ""


def _say_run(trial: Trial, count: str, found: Sequence[Run], error: str) -> None:
    name = " ".join(filter(None, [trial.group, trial.name]))
    if error:
        say(f"{count} {name}: FAILED {error}")
    else:
        run = found[-1]
        say(
            f"{count} {name}: {run.batches_per_s:.1f} batches/s, {run.gb_per_s:.2f} GB/s, CPU-s/GB "
            f"trainer {run.trainer_cpu_s_per_gb:.2f}, supply {run.supply_cpu_s_per_gb:.2f}"
        )

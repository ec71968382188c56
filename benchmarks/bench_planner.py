"""Does the planner choose the cheapest cluster, and does it know when to add nothing?

Question: how much more does a step cost on the cluster that `hetero.decide.planning` chooses than on the best cluster?
Does it say "don't" where that is right, and for the right reason? How do the rules of others do on the same jobs?

Method: 200 random jobs and 72 constructed ones, each with a menu of machines and prices (`planning/scenarios.py`). The
truth is a discrete-event simulation of each job on each cluster, which shares nothing with the planner
(`planning/simulation.py`). The planner sees a profile with noise, the facts of the machines and their prices. The best
cluster is found by exhaustive search in the truth, over 0 to 64 hosts of one or two types and endpoints on the trainer
hosts. Regret is the cost of 1,000 steps in the truth, relative to the best cluster's, - 1. The rules of others may run
the simulated job before they decide.
Basis: simulated.

    python benchmarks/bench_planner.py --short
    python benchmarks/bench_planner.py --only 003-photos-float data-hosts-2
"""

from __future__ import annotations

import argparse
import collections
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
from planning import planner
from planning.choices import Choice
from planning.profiles import profile_of
from planning.rules import RULES
from planning.scenarios import Reason, Scenario, all_scenarios
from planning.search import Truth, search

PLANNER = "hetero plan"
NEAR = 0.02
"""Largest regret of a choice that counts as the best one."""
SHORT_EVERY = 8
"""The short form takes every eighth scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One choice for one scenario."""

    choice: str
    step_s: float
    """In the truth."""
    usd_per_1k_steps: float
    regret: float
    is_right: bool
    """Whether the choice is of the kind that the constructed case asks for. True for random scenarios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All choices for one scenario."""

    name: str
    expected: str
    """Reason of a constructed case, empty for a random scenario."""
    num_profiled: int
    num_families: int
    best: str
    step_s: float
    headspace_s: float
    usd_per_1k_steps: float
    is_as_constructed: bool
    """Whether the best choice in the truth is of the expected kind."""
    is_complete: bool
    num_simulations: int
    reason: str
    """The planner's, as one of ours."""
    answer: str
    """The planner's."""
    predicted_step_s: tuple[float, float, float]
    """The planner's step time of its choice, with its 90 % interval."""
    planner_s: float
    """Seconds that the planner took."""
    made: dict[str, Made]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all choosers on all scenarios and write their tables."""
    args = parse_arguments(argv)
    scenarios = selected(all_scenarios(), args)
    if not scenarios:
        raise SystemExit("planner: --only matches no scenario; expected names of scenarios, or their beginnings")
    harness.say(f"planner: {len(scenarios)} scenarios, about {len(scenarios) * 4 / 60 / args.processes:.0f} minutes")
    facts, begin_s = harness.environment(), time.monotonic()
    outcomes = list(run_all(scenarios, args.processes))
    duration_s = round(time.monotonic() - begin_s, 1)
    text = report(outcomes)
    print(text, flush=True)
    scope = "partial" if args.only else "short" if args.short else "full"
    folder = args.results or (harness.RESULTS if scope == "full" else harness.RESULTS / "short")
    content = {
        "benchmark": "planner",
        "scope": scope,
        "basis": "simulated",
        "duration_s": duration_s,
        **facts,
        "rows": [asdict(outcome) for outcome in outcomes],
    }
    footer = (
        f"{scope.capitalize()} form. {facts['date']}, commit {facts['commit']}, {facts['hardware']['cpus']} CPUs. "
        f"{len(outcomes)} scenarios in {duration_s / 60:.0f} minutes. All times are simulated."
    )
    path = folder / ("planner-partial" if scope == "partial" else "planner")
    harness.save(path, content, f"{text}\n\n{footer}\n")
    harness.say(f"result: {path}.json")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0], allow_abbrev=False)
    parser.add_argument("--short", action="store_true", help=f"every {SHORT_EVERY}th scenario")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="scenarios to run, by name or its begin")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--results", type=Path, help="folder of the result")
    return parser.parse_args(argv)


def selected(scenarios: Sequence[Scenario], args: argparse.Namespace) -> list[Scenario]:
    """Return the scenarios that the command line asks for."""
    if args.only:
        return [each for each in scenarios if each.name.startswith(tuple(args.only))]
    return list(scenarios[::SHORT_EVERY] if args.short else scenarios)


def run_all(scenarios: Sequence[Scenario], num_processes: int) -> Iterable[Outcome]:
    """Yield the outcomes in the order of the scenarios."""
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        for number, outcome in enumerate(pool.imap(run, scenarios, chunksize=1), start=1):
            if number % 10 == 0:
                harness.say(f"planner: {number} of {len(scenarios)} scenarios")
            yield outcome


def run(scenario: Scenario) -> Outcome:
    """Search the best choice of a scenario, and let the planner and the rules choose."""
    truth = Truth(scenario)
    found = search(scenario, truth)
    decision = planner.choose(profile_of(scenario, seed=1), scenario)
    choices = {PLANNER: decision.choice, **{title: rule(truth) for title, rule in RULES.items()}}
    # A choice of a rule may be better than the search's by less than the tolerance of the search.
    best = min([found.choice, *choices.values()], key=truth.usd_per_1k_steps)
    best_usd = truth.usd_per_1k_steps(best)
    made = {
        title: Made(
            choice=str(choice),
            step_s=truth.result(choice).step_s,
            usd_per_1k_steps=truth.usd_per_1k_steps(choice),
            regret=truth.usd_per_1k_steps(choice) / best_usd - 1.0,
            is_right=scenario.reason is None or scenario.reason.agrees(choice),
        )
        for title, choice in choices.items()
    }
    return Outcome(
        name=scenario.name,
        expected=scenario.reason.value if scenario.reason else "",
        num_profiled=len({name.rpartition(".")[0] for name in scenario.profiled_types}),
        num_families=len({machine.family for machine in scenario.menu}),
        best=str(best),
        step_s=truth.result(best).step_s,
        headspace_s=truth.result(best).headspace_s,
        usd_per_1k_steps=best_usd,
        is_as_constructed=_is_as_constructed(scenario, truth, best),
        is_complete=found.is_complete,
        num_simulations=truth.num_simulations,
        reason=decision.reason.value if decision.reason else "",
        answer=decision.answer,
        predicted_step_s=decision.step_s,
        planner_s=decision.wall_s,
        made=made,
    )


def _is_as_constructed(scenario: Scenario, truth: Truth, best: Choice) -> bool:
    """Return whether the truth has the expected answer."""
    if scenario.reason is not Reason.UINT8:
        return scenario.reason is None or scenario.reason.agrees(best)
    uint8 = search(scenario.with_uint8())
    return uint8.usd_per_1k_steps < 0.9 * truth.usd_per_1k_steps(best)


# The tables


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the tables and the figures as Markdown."""
    random = [outcome for outcome in outcomes if not outcome.expected]
    constructed = [outcome for outcome in outcomes if outcome.expected]
    lines = ["# The planner against exhaustive search and the rules of others"]
    if random:
        lines += ["", f"## {len(random)} random jobs", "", regret_table(random), "", *regret_figures(random)]
        lines += ["", "Regret by profiled types:", "", profiled_table(random)]
    if constructed:
        lines += ["", f"## {len(constructed)} constructed jobs", "", right_table(constructed)]
        lines += ["", *right_figures(constructed)]
    return "\n".join(lines)


def regret_table(outcomes: Sequence[Outcome]) -> str:
    """Return one row for each chooser: how far its choices are from the best ones."""
    lines = [
        f"| | within {NEAR:.0%} | median regret | mean | 95th percentile | highest | with data hosts |",
        "|---|---|---|---|---|---|---|",
    ]
    for title in outcomes[0].made:
        regrets = sorted(outcome.made[title].regret for outcome in outcomes)
        lines.append(
            f"| {title} | {share_within(regrets, NEAR):.0%} | {statistics.median(regrets):.1%} | "
            f"{statistics.fmean(regrets):.1%} | {percentile(regrets, 0.95):.1%} | {regrets[-1]:.1%} | "
            f"{sum(' x ' in outcome.made[title].choice for outcome in outcomes)} |"
        )
    best = sum(" x " in outcome.best for outcome in outcomes)
    lines.append(f"| best cluster | 100% | 0.0% | 0.0% | 0.0% | 0.0% | {best} |")
    return "\n".join(lines)


def regret_figures(outcomes: Sequence[Outcome]) -> list[str]:
    """Say whether the planner's bounds are met, and whether the search was complete."""
    incomplete = sum(not outcome.is_complete for outcome in outcomes)
    lines = [f"- searches that ended at their limit of simulations: {incomplete} of {len(outcomes)}"]
    regrets = sorted(outcome.made[PLANNER].regret for outcome in outcomes)
    pairs = [(outcome.predicted_step_s, outcome.made[PLANNER].step_s) for outcome in outcomes]
    errors = sorted(abs(predicted[0] / step_s - 1.0) for predicted, step_s in pairs)
    covered = statistics.fmean(low <= step_s <= high for (_, low, high), step_s in pairs)
    return [
        *lines,
        harness.target(f"share of {PLANNER} within {NEAR:.0%}", share_within(regrets, NEAR), 0.95),
        harness.target(f"highest regret of {PLANNER}", regrets[-1], 0.10, at_most=True),
        harness.target(f"seconds of {PLANNER}", max(outcome.planner_s for outcome in outcomes), 2.0, at_most=True),
        (
            f"- predicted step time of its choice: error {statistics.median(errors):.1%} in the median, "
            f"{percentile(errors, 0.95):.1%} in the 95th percentile; the 90 % interval has the truth in {covered:.0%}"
        ),
    ]


def profiled_table(outcomes: Sequence[Outcome]) -> str:
    """Return the share near the best for jobs whose profile knows all, some or no CPU types of the menu."""
    groups: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        if not outcome.num_profiled:
            groups["the trainer's type only"].append(outcome)
        elif outcome.num_profiled < outcome.num_families:
            groups["also one family of CPU types"].append(outcome)
        else:
            groups["also all families of CPU types"].append(outcome)
    titles = list(outcomes[0].made)
    lines = ["| profiled | jobs | " + " | ".join(titles) + " |", "|---" * (len(titles) + 2) + "|"]
    for group, members in groups.items():
        near = [f"{share_within([each.made[title].regret for each in members], NEAR):.0%}" for title in titles]
        lines.append(f"| {group} | {len(members)} | " + " | ".join(near) + " |")
    return "\n".join(lines)


def right_table(outcomes: Sequence[Outcome]) -> str:
    """Return one row for each reason: how many choices are of the right kind."""
    titles = list(outcomes[0].made)
    lines = ["| right answer | jobs | as constructed | " + " | ".join(titles) + " |", "|---" * (len(titles) + 3) + "|"]
    for reason in Reason:
        members = [outcome for outcome in outcomes if outcome.expected == reason.value]
        if members:
            right = [str(sum(is_right(outcome, title) for outcome in members)) for title in titles]
            agreeing = sum(outcome.is_as_constructed for outcome in members)
            lines.append(f"| {reason.value} | {len(members)} | {agreeing} | " + " | ".join(right) + " |")
    return "\n".join(lines)


def is_right(outcome: Outcome, title: str) -> bool:
    """Return whether a chooser is right: the kind of its choice, and the planner's reason.

    No rule of others looks at the bytes, so none of them is right where uint8 comes first.
    """
    made = outcome.made[title]
    if title == PLANNER:
        return made.is_right and outcome.reason == outcome.expected
    return made.is_right and outcome.expected != Reason.UINT8.value


def right_figures(outcomes: Sequence[Outcome]) -> list[str]:
    """Say whether the planner is right in all constructed cases."""
    lines = [
        f"- {outcome.name}: the best choice in the truth is not as constructed: {outcome.best}"
        for outcome in outcomes
        if not outcome.is_as_constructed
    ]
    lines += [
        f"- {outcome.name}: {PLANNER} chooses {outcome.made[PLANNER].choice}, reason {outcome.reason or 'another'}"
        for outcome in outcomes
        if not is_right(outcome, PLANNER)
    ]
    share = statistics.fmean(is_right(outcome, PLANNER) for outcome in outcomes)
    return [*lines, harness.target(f"share of {PLANNER} with the right answer and reason", share, 1.0)]


def share_within(regrets: Sequence[float], bound: float) -> float:
    """Return the share of regrets up to a bound."""
    return sum(regret <= bound for regret in regrets) / len(regrets)


def percentile(ordered: Sequence[Any], share: float) -> Any:
    """Return the value that this share of ascending values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


if __name__ == "__main__":
    sys.exit(main())

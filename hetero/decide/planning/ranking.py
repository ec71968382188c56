"""Ranks the candidates of a plan by the cost or time that the goal minimises, without timelines."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from hetero.decide.planning.candidates import Candidate
from hetero.decide.planning.enumeration import spending_of
from hetero.decide.planning.steps.model import StepModel
from hetero.decide.planning.steps.uncertain import RUN_SPREAD
from hetero.errors import ConfigError
from hetero.pricing.cost import cost_per_1k_steps_usd
from hetero.report.plan import STEPS_OF_SPENDING

__all__ = ["TIE", "WORTH_SPENDING", "Constraints", "Entry", "Ranking", "identity", "simplest"]

WORTH_SPENDING = RUN_SPREAD
"""Least saving that the next step of spending must bring, as a share of the cost. The costs of two runs of one cluster
differ by this share, so a smaller saving would not show."""
TIE = 0.003
"""Relative difference in cost below which the simpler cluster wins. Without it, a plan for the shortest step adds hosts
for the rounding errors of a timeline."""
_NUM_TYPES = 4
"""Number of types of data hosts in the table. Mixtures of two types start from these types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the user wants from a plan."""

    goal: str = "cost"
    """``cost``: fewest USD per step. ``time``: shortest step."""
    max_usd_per_1k_steps: float | None = None
    max_step_s: float | None = None
    """Longest step time in seconds, from the hours that the job may take."""

    def price_of(self, hourly_usd: float | None) -> float:
        """Return the price per hour, or 1 if time is the goal. The plan minimises this number times the step time.

        A price that is not known counts as infinite, so clusters with a known price come first.
        """
        if self.goal == "time":
            return 1.0
        return math.inf if hourly_usd is None else hourly_usd

    def allow(self, step_s: float, hourly_usd: float | None) -> bool:
        """Return whether a cluster with this step time and price is within the limits."""
        if self.max_step_s is not None and step_s > self.max_step_s:
            return False
        if self.max_usd_per_1k_steps is None:
            return True
        return hourly_usd is not None and cost_per_1k_steps_usd(hourly_usd, step_s) <= self.max_usd_per_1k_steps


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate, and the figures that decide whether it is chosen."""

    candidate: Candidate
    spending: str
    """One of `STEPS_OF_SPENDING`."""
    step_s: float
    hourly_usd: float | None
    cost: float
    """What the goal minimises: USD per step in arbitrary units, or seconds. Infinite without a price."""

    @property
    def simplicity(self) -> tuple[int, int, int, int]:
        """Sort key that prefers an earlier step of spending, then fewer data hosts, then fewer processes."""
        candidate = self.candidate
        numbers = candidate.num_data_hosts, candidate.local_endpoints, candidate.endpoints_per_host or 0
        return STEPS_OF_SPENDING.index(self.spending), *numbers


class Ranking:
    """The candidates with their expected step times and costs.

    Args:
        model: Predicts the step times.
        constraints: Goal and limits.
    """

    def __init__(self, model: StepModel, constraints: Constraints) -> None:
        self.constraints = constraints
        self._model = model
        self._entries: dict[tuple[object, ...], Entry] = {}
        self._base: Candidate | None = None

    def add(self, candidates: Iterable[Candidate]) -> list[Entry]:
        """Predict and rank the candidates that are new, and return their entries.

        The first candidate of the first call is the baseline.
        """
        # A job states one number of endpoints for all its data hosts.
        candidates = map(self._model.with_common_endpoints, candidates)
        # Use the identities of the machines as keys, because the hash of a candidate takes longer than its prediction.
        new = {key: candidate for candidate in candidates if (key := identity(candidate)) not in self._entries}
        for (key, candidate), step_s in zip(new.items(), self._model.expected_s(list(new.values())), strict=True):
            self._base = self._base or candidate
            hourly_usd = candidate.hourly_usd
            cost = self.constraints.price_of(hourly_usd) * step_s
            self._entries[key] = Entry(candidate, spending_of(candidate, self._base), step_s, hourly_usd, cost)
        return [self._entries[key] for key in new]

    def allowed(self) -> list[Entry]:
        """Return the candidates within the limits.

        Raises:
            ConfigError: If all break a limit.
        """
        found = [entry for entry in self._entries.values() if self.constraints.allow(entry.step_s, entry.hourly_usd)]
        if not found:
            raise ConfigError(self.too_strict(self._entries.values()))
        return found

    def too_strict(self, entries: Collection[Entry]) -> str:
        """Return the error that says how far the candidates are from the limits."""
        limits, parts = self.constraints, []
        if limits.max_step_s is not None:
            fastest_s = min(entry.step_s for entry in entries)
            parts.append(
                f"the shortest step of all clusters is {fastest_s:.4g} s, the limit is {limits.max_step_s:.4g} s"
            )
        costs = [
            cost_per_1k_steps_usd(entry.hourly_usd, entry.step_s) for entry in entries if entry.hourly_usd is not None
        ]
        if limits.max_usd_per_1k_steps is not None and costs:
            parts.append(
                f"the lowest cost is {min(costs):.4g} USD per 1,000 steps, the limit is "
                f"{limits.max_usd_per_1k_steps:.4g}"
            )
        elif limits.max_usd_per_1k_steps is not None:
            return (
                "no cluster satisfies the limit of the cost, because the price of the trainer hosts is not known\n"
                "  to do: give it with --price TYPE=USD, or leave out --max-usd-per-1k-steps"
            )
        # Some clusters may satisfy one limit, and other clusters the other limit. The figures in the message are then
        # both within their limits, so explain this.
        although = ", although some satisfy each of them" if self._is_each_satisfied(entries) else ""
        return (
            f"no cluster satisfies the limits{although}: {'; '.join(parts)}\n  to do: relax a limit, or extend --menu"
        )

    def _is_each_satisfied(self, entries: Collection[Entry]) -> bool:
        """Return whether there are two limits, and for each of them a candidate that satisfies it."""
        limits = self.constraints
        if limits.max_step_s is None or limits.max_usd_per_1k_steps is None:
            return False
        time_limit, cost_limit = replace(limits, max_usd_per_1k_steps=None), replace(limits, max_step_s=None)
        return all(
            any(limit.allow(entry.step_s, entry.hourly_usd) for entry in entries) for limit in (time_limit, cost_limit)
        )

    def best_local(self) -> Candidate:
        """Return the fastest cluster without data hosts whose trainer hosts are of the baseline's type.

        Of equally fast clusters, it is the one with the fewest processes.
        """
        assert self._base is not None
        trainer = self._base.trainer
        local = [e for e in self._entries.values() if not e.candidate.data and e.candidate.trainer is trainer]
        return min(local, key=lambda entry: (entry.step_s, entry.candidate.local_endpoints)).candidate

    def leaders(self) -> list[Candidate]:
        """Return the best clusters with one type of data hosts, at most one per type."""
        best: dict[int, Entry] = {}
        for entry in self._entries.values():
            if len(entry.candidate.data) == 1:
                # Use the identity of the machine, because its hash takes longer.
                machine = id(entry.candidate.data[0].machine)
                if machine not in best or entry.cost < best[machine].cost:
                    best[machine] = entry
        return [entry.candidate for entry in sorted(best.values(), key=lambda entry: entry.cost)[:_NUM_TYPES]]

    def shown(self, chosen: Candidate) -> list[Candidate]:
        """Return the candidates for the table, each once.

        - the best candidate of each of `STEPS_OF_SPENDING`
        - within each of these steps, the best candidate with each form of batches
        - if the chosen one has one type of data hosts: the best candidates with as many of them, one more, or one less
        - the best candidate with each type of data hosts, for the cheapest types
        - the fastest candidate
        """
        # The best entry by kind. A kind is a step of spending, a step with a form of batches, or a number of hosts.
        best_of: dict[object, Entry] = {}
        for entry in self._entries.values():
            candidate = entry.candidate
            kinds: list[object] = [entry.spending, (entry.spending, candidate.form)]
            if len(candidate.data) == len(chosen.data) == 1:
                (group,), (chosen_group,) = candidate.data, chosen.data
                if group.machine is chosen_group.machine and abs(group.count - chosen_group.count) <= 1:
                    kinds.append(group.count)
            for kind in kinds:
                if kind not in best_of or entry.cost < best_of[kind].cost:
                    best_of[kind] = entry
        fastest = min(self._entries.values(), key=lambda entry: (entry.step_s, entry.cost)).candidate
        candidates = [*(entry.candidate for entry in best_of.values()), *self.leaders(), fastest]
        return list({identity(candidate): candidate for candidate in candidates}.values())


def simplest(entries: Sequence[Entry]) -> Entry:
    """Return the best of at least one candidate, in the order of spending.

    A later step of spending must save `WORTH_SPENDING`. Of candidates that cost about the same, the simpler one wins.
    """
    chosen = None
    for spending in STEPS_OF_SPENDING:
        group = [entry for entry in entries if entry.spending == spending]
        if not group:
            continue
        best = min(entry.cost for entry in group)
        about_as_cheap = (entry for entry in group if entry.cost <= best * (1 + TIE))
        simplest_entry = min(about_as_cheap, key=lambda entry: entry.simplicity)
        if chosen is None or simplest_entry.cost < chosen.cost * (1 - WORTH_SPENDING):
            chosen = simplest_entry
    assert chosen is not None
    return chosen


def identity(candidate: Candidate) -> tuple[object, ...]:
    """Return a key that is equal for equal candidates with the same machine objects."""
    groups = tuple((id(group.machine), group.count) for group in candidate.data)
    trainers = (id(candidate.trainer), candidate.num_trainer_hosts, candidate.local_endpoints)
    return (*trainers, groups, candidate.endpoints_per_host, candidate.form)

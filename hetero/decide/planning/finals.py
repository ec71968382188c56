"""Chooses among the best candidates by their timelines.

A ranking predicts thousands of step times at once, but not how much longer steps take because the parts of a cluster
wait for each other. So the candidates with the lowest costs are compared again, by their timelines. Then the neighbours
of the best candidate are compared in the same way. The few candidates that are left get timelines of more steps,
because short ones are less exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hetero.decide.planning.candidates import Candidate
from hetero.decide.planning.enumeration import neighbours, with_other_endpoints
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.ranking import TIE, Entry, Ranking, identity, simplest
from hetero.decide.planning.steps.model import StepModel
from hetero.errors import ConfigError
from hetero.report.plan import STEPS_OF_SPENDING

__all__ = ["Finals"]

_SHORTLIST = 500
"""Number of candidates whose mean cost is computed. A menu of 60 types has 20,000 candidates."""
_PATIENCE = 12
"""The search along the ranking ends after this number of timelines without a better candidate."""
_MAX_BATCHES = 50_000
"""Batches of all short timelines together, about 0.4 s. The search along the ranking may use half of these batches.
bench_planner limits the seconds of a plan."""
_MAX_LONG_BATCHES = 70_000
"""Batches of the long timelines together."""
_FINAL_MARGIN = 0.045
"""Largest extra cost of a finalist, as a share of the cost of the best one."""


class Finals:
    """Compares candidates by their mean costs over all draws.

    One data host too few costs more than one too many. So the mean cost, unlike the cost of the mean figures, prefers a
    cluster with a reserve.

    Args:
        ranking: The candidates. `Finals` adds the neighbours of the best one.
        model: Predicts step times with some draws.
        menu: Machines that may become data hosts.
    """

    def __init__(self, ranking: Ranking, model: StepModel, menu: Sequence[Machine]) -> None:
        self._ranking = ranking
        self._model = model
        self._menu = menu
        self._simulated: dict[tuple[object, ...], Entry] = {}
        """The candidates that have a timeline, by their identity, with the costs of the timelines."""

    def choose(self) -> Candidate:
        """Return the best candidate.

        Step 1 orders the shortlist by mean cost. Step 2 makes timelines of the best candidates in this order, and of
        the neighbours of the best one. Step 3 makes long timelines of the finalists, and chooses one of them.

        Raises:
            ConfigError: If no candidate satisfies the constraints.
        """
        # 1. The shortlist contains the best candidate of each kind of spending, such as data hosts or a bigger machine.
        allowed = sorted(self._ranking.allowed(), key=lambda entry: entry.cost)
        ordered = self._by_mean_cost(list(dict.fromkeys([*_best_of_each(allowed), *allowed[:_SHORTLIST]])))
        # 2. Begin with the best candidate of each kind. Without a timeline, it could not be chosen, even if the ranking
        # is wrong about it.
        for entry in _best_of_each(ordered):
            self._simulate(entry)
        self._try_neighbours(self._follow(ordered))
        simulated = sorted(self._simulated.values(), key=lambda entry: entry.cost)
        # 3. Make long timelines of finalists. Without these, choices were worse in parts of bench_planner. Make them in
        # this order, until they have `_MAX_LONG_BATCHES` batches together. The best candidate of each kind comes first,
        # because `simplest` compares the kinds, so each kind needs a long timeline.
        finalists = list(dict.fromkeys([*_best_of_each(simulated), *simulated]))
        max_cost = simulated[0].cost * (1 + _FINAL_MARGIN)
        max_batches = self._model.timelines.num_batches + _MAX_LONG_BATCHES
        compared = [
            self._simulate(entry, is_long=True)
            for entry in finalists
            if entry.cost <= max_cost and self._model.timelines.num_batches < max_batches
        ]
        # A candidate that breaks a limit by its timeline has an infinite cost.
        allowed_after_all = [entry for entry in compared if entry.cost < math.inf]
        if not allowed_after_all:
            raise ConfigError(self._ranking.too_strict(finalists))
        return simplest(allowed_after_all).candidate

    def _by_mean_cost(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries with their mean costs over all draws, in ascending order. No timelines are made."""
        predictions = self._model.predict([entry.candidate for entry in entries], is_simulated=False)
        found = [
            # `entry.cost` is a price times `entry.step_s`, the step time with the mean figures. Replace this step time
            # by the mean of the draws.
            replace(entry, cost=entry.cost * float(prediction.draws_s.mean()) / entry.step_s)
            for entry, prediction in zip(entries, predictions, strict=True)
        ]
        return sorted(found, key=lambda entry: entry.cost)

    def _simulate(self, entry: Entry, *, is_long: bool = False) -> Entry:
        """Return the entry with step time and mean cost by its timeline. An entry that breaks a limit costs infinity.

        A result is kept. A long timeline replaces the result of a short one.
        """
        candidate, key = entry.candidate, identity(entry.candidate)
        if key not in self._simulated or is_long:
            # Make the long timeline now. The prediction below uses the longest timeline that was made so far.
            if is_long:
                self._model.timelines.step_s(candidate, is_long=True)
            (prediction,) = self._model.predict([candidate])
            limits = self._ranking.constraints
            cost = limits.price_of(entry.hourly_usd) * float(prediction.draws_s.mean())
            is_allowed = limits.allow(prediction.step_s, entry.hourly_usd)
            self._simulated[key] = replace(entry, step_s=prediction.step_s, cost=cost if is_allowed else math.inf)
        return self._simulated[key]

    def _is_over(self, max_batches: float) -> bool:
        """Return whether all timelines so far have at least this number of batches together."""
        return self._model.timelines.num_batches >= max_batches

    def _follow(self, ordered: Sequence[Entry]) -> Entry:
        """Simulate candidates in order until `_PATIENCE` of them bring no improvement, and return the best one."""
        best = min(self._simulated.values(), key=lambda entry: entry.cost)
        num_without_improvement = 0
        for entry in ordered:
            # Use only half of the batches here. The other half is for the neighbours, which the ranking does not
            # contain.
            if self._is_over(_MAX_BATCHES / 2) or num_without_improvement >= _PATIENCE:
                break
            simulated = self._simulate(entry)
            num_without_improvement += 1
            if simulated.cost < best.cost * (1 - TIE):
                best, num_without_improvement = simulated, 0
        return best

    def _try_neighbours(self, best: Entry) -> None:
        """Simulate the neighbours of the best candidate, and move to a neighbour that is better.

        Neighbours differ in a single number. The difference in processes is halved each time no neighbour is better.
        The search ends with a difference of one process, or when the timelines have `_MAX_BATCHES` batches together.
        """
        num_processes = max(1, best.candidate.trainer.vcpus // 8)
        while not self._is_over(_MAX_BATCHES):
            candidates = list(neighbours(best.candidate, num_processes, self._menu))
            if endpoints_per_host := self._model.variable_endpoints_on(best.candidate):
                candidates += with_other_endpoints(best.candidate, endpoints_per_host)
            entries = self._ranking.add(each for each in candidates if identity(each) not in self._simulated)
            before = best
            for entry in self._by_mean_cost(entries):
                # Move to the first neighbour that is better, because its neighbours are usually better than the other
                # neighbours of the old best cluster.
                if self._is_over(_MAX_BATCHES) or best is not before:
                    break
                simulated = self._simulate(entry)
                if simulated.cost < best.cost * (1 - TIE):
                    best = simulated
            if best is before:
                if num_processes == 1:
                    break
                num_processes //= 2


def _best_of_each(ordered: Sequence[Entry]) -> list[Entry]:
    """Return the first entry of each step of spending."""
    first = {entry.spending: entry for entry in reversed(ordered)}
    return [first[spending] for spending in STEPS_OF_SPENDING if spending in first]

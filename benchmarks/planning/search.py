"""The cheapest choice of a scenario in the simulated truth, found by exhaustive search.

The candidates are those of a planner: endpoints on the trainer hosts, and no data hosts, 1 to 64 hosts of one type, or
1 to 64 hosts of each of two types. A lower bound of the step time gives each candidate a lower bound of its cost. The
candidates are simulated in the order of that bound. The search ends when no other candidate can be cheaper than the
best by more than `TOLERANCE`. A test compares the bound with simulations. More hosts than the accelerator needs have a
higher price and the same bound, and are never simulated. Where many clusters cost nearly the same, the bound ends the
search late. It then ends after `PATIENCE` simulations without a better choice.

The numbers of trainer endpoints are a grid, and so are those of a data host whose endpoints wait for storage. The
neighbours of the best choice are simulated at the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planning.bounds import Bounds
from planning.choices import NOTHING, Choice
from planning.scenarios import Scenario
from planning.simulation import simulate
from planning.workload import Result

__all__ = ["MAX_HOSTS", "Found", "Truth", "search"]

MAX_HOSTS = 64
"""Largest number of data hosts of one type."""
SCREENING_BATCHES = 1000
NUM_BATCHES = 4000
"""Batches of all ranks that a simulation has at least. With stragglers it has twice as many."""
PATIENCE = 80
TOLERANCE = 0.003
"""Candidates that can save no more than this share are not simulated."""
_BOUND_MARGIN = 0.97
"""What the bound is multiplied by, because a simulated time has noise."""
_MIN_STEPS = 150
_LONG_STEPS = 2000
"""Steps of a whole simulation, not of the screening. A window that grew needs this long to shrink again."""
_FINALISTS = 8


class Truth:
    """The simulated step times and costs of one scenario, each simulated once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._results: dict[tuple[Choice, int], Result] = {}

    @property
    def num_simulations(self) -> int:
        """Simulations so far."""
        return len(self._results)

    def result(self, choice: Choice, num_batches: int = NUM_BATCHES) -> Result:
        """Return what a simulation of a choice shows."""
        key = choice, num_batches
        if key not in self._results:
            scenario, num_ranks = self.scenario, self.scenario.workload.num_ranks
            wanted = num_batches * (2 if scenario.has_stragglers else 1)
            least = _MIN_STEPS if num_batches < NUM_BATCHES else _LONG_STEPS
            num_steps = max(least, -(-wanted // num_ranks))
            self._results[key] = simulate(
                scenario.workload, scenario.cluster(choice), num_steps=num_steps, seed=scenario.seed
            )
        return self._results[key]

    def usd_per_1k_steps(self, choice: Choice, num_batches: int = NUM_BATCHES) -> float:
        """Return the cost of 1,000 global steps."""
        return self.scenario.hourly_usd(choice) * self.result(choice, num_batches).step_s / 3.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best choice of a scenario."""

    name: str
    """Of the scenario."""
    choice: Choice
    step_s: float
    usd_per_1k_steps: float
    nothing_usd_per_1k_steps: float
    """Cost of the job as it is."""
    num_candidates: int
    num_simulations: int
    is_complete: bool
    """Whether the bound ended the search, and not its patience."""


def _pairs(num_types: int, max_hosts: int) -> npt.NDArray[np.int64]:
    """Return all groups of data hosts: type and count of one group, type and count of another. A count may be 0."""
    singles = [(kind, count, 0, 0) for kind in range(num_types) for count in range(1, max_hosts + 1)]
    counts = np.arange(1, max_hosts + 1)
    both = np.stack(np.meshgrid(counts, counts), axis=-1).reshape(-1, 2)
    tables = [np.array([(0, 0, 0, 0), *singles])]
    for first, second in itertools.combinations(range(num_types), 2):
        table = np.empty((len(both), 4), dtype=np.int64)
        table[:, 0], table[:, 1], table[:, 2], table[:, 3] = first, both[:, 0], second, both[:, 1]
        tables.append(table)
    return np.concatenate(tables)


class _Candidates:
    """All choices of a scenario whose bound is below a cost, in the order of their bounds."""

    def __init__(self, scenario: Scenario, *, max_hosts: int, below_usd: float) -> None:
        self._scenario = scenario
        self._pairs = _pairs(len(scenario.menu), max_hosts)
        self._grid = trainer_grid(scenario)
        self._per_host = per_host_grid(scenario)
        prices = np.array([machine.hourly_usd for machine in scenario.menu])
        hourly_usd = scenario.trainer.hourly_usd * scenario.num_trainers + self._sum(prices)
        bounds = Bounds(scenario)
        costs, places = [], []
        for option, per_host in enumerate(self._per_host):
            rates = self._sum(bounds.host_rates(per_host))
            for number, endpoints in enumerate(self._grid):
                usd = hourly_usd * bounds.step_s(rates, endpoints) / 3.6 * _BOUND_MARGIN
                usd[0] = np.inf if option or not endpoints else usd[0]  # the first has no data hosts
                rows = np.flatnonzero(usd < below_usd)
                costs.append(usd[rows])
                places.append(np.stack([np.full(len(rows), option), np.full(len(rows), number), rows], axis=-1))
        self.num_all = len(self._pairs) * len(self._grid) * len(self._per_host)
        self._costs, self._places = np.concatenate(costs), np.concatenate(places)
        self._order = np.argsort(self._costs, kind="stable")

    def __iter__(self) -> Iterator[tuple[float, Choice]]:
        """Yield the bounds and choices, the lowest bound first."""
        for at in self._order:
            option, number, row = self._places[at]
            yield float(self._costs[at]), self._choice(self._pairs[row], self._grid[number], self._per_host[option])

    def _sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sum of a value of each type over the hosts of each group."""
        pairs = self._pairs
        second = np.where(pairs[:, 3] > 0, values[pairs[:, 2]], 0.0)
        return values[pairs[:, 0]] * pairs[:, 1] + second * pairs[:, 3]

    def _choice(self, row: Sequence[int], trainer_endpoints: int, endpoints_per_host: int) -> Choice:
        groups = ((row[0], row[1]), (row[2], row[3]))
        data = sorted((self._scenario.menu[kind].name, int(count)) for kind, count in groups if count)
        return Choice(
            trainer_endpoints=trainer_endpoints, data=tuple(data), endpoints_per_host=endpoints_per_host if data else 0
        )


def trainer_grid(scenario: Scenario) -> list[int]:
    """Return the numbers of trainer endpoints that the search tries."""
    most, vcpus = scenario.most_trainer_endpoints, scenario.trainer.vcpus
    ranks_per_host = scenario.workload.num_ranks // scenario.num_trainers
    left_over = vcpus - math.ceil(ranks_per_host * scenario.workload.rank_cpu_cores)
    wanted = {0, vcpus // 4, vcpus // 2, 3 * vcpus // 4, left_over, vcpus, 2 * vcpus, most}
    return sorted(number for number in wanted if 0 <= number <= most)


def per_host_grid(scenario: Scenario) -> list[int]:
    """Return the numbers of endpoints per data host that the search tries. 0 means one per vCPU."""
    if not scenario.waits:
        return [0]
    return [0, *sorted({factor * machine.vcpus for machine in scenario.menu for factor in (2, 4)})]


def search(
    scenario: Scenario, truth: Truth | None = None, *, max_hosts: int = MAX_HOSTS, patience: float = PATIENCE
) -> Found:
    """Return the choice with the lowest cost per 1,000 steps.

    Args:
        scenario: The job.
        truth: Simulations of the job so far.
        max_hosts: Largest number of data hosts of one type.
        patience: The search ends after this number of simulations without a better choice. Infinite for a search that
            only the bound ends.
    """
    truth = truth or Truth(scenario)
    best_usd = truth.usd_per_1k_steps(NOTHING, SCREENING_BATCHES)
    candidates = _Candidates(scenario, max_hosts=max_hosts, below_usd=best_usd)
    screened, since_better, is_complete = [], 0, True
    for bound_usd, choice in candidates:
        if bound_usd >= best_usd * (1.0 - TOLERANCE):
            break
        if since_better >= patience:
            is_complete = False
            break
        usd = truth.usd_per_1k_steps(choice, SCREENING_BATCHES)
        screened.append((usd, choice))
        since_better = 0 if usd < best_usd * (1.0 - TOLERANCE) else since_better + 1
        best_usd = min(best_usd, usd)
    screened.sort()
    finalists = [choice for _, choice in screened[:_FINALISTS]]
    best = min((NOTHING, *finalists), key=truth.usd_per_1k_steps)
    best = _refine(scenario, truth, best)
    return Found(
        name=scenario.name,
        choice=best,
        step_s=truth.result(best).step_s,
        usd_per_1k_steps=truth.usd_per_1k_steps(best),
        nothing_usd_per_1k_steps=truth.usd_per_1k_steps(NOTHING),
        num_candidates=candidates.num_all,
        num_simulations=truth.num_simulations,
        is_complete=is_complete,
    )


def _refine(scenario: Scenario, truth: Truth, best: Choice) -> Choice:
    """Return the best choice among the neighbours of a choice, repeatedly with smaller distances."""
    distance = max(1, scenario.trainer.vcpus // 8)
    for _ in range(16):
        nearby = min(_neighbours(scenario, best, distance), key=truth.usd_per_1k_steps, default=best)
        if truth.usd_per_1k_steps(nearby) < truth.usd_per_1k_steps(best):
            best = nearby
        elif distance == 1:
            break
        else:
            distance = max(1, distance // 2)
    return best


def _neighbours(scenario: Scenario, choice: Choice, distance: int) -> Iterable[Choice]:
    for step in (-distance, distance):
        number = choice.trainer_endpoints + step
        if 0 <= number <= scenario.most_trainer_endpoints:
            yield replace(choice, trainer_endpoints=number)
    for index, (name, count) in enumerate(choice.data):
        for changed in {count - 1, count + 1} & set(range(1, MAX_HOSTS + 1)):
            data = (*choice.data[:index], (name, changed), *choice.data[index + 1 :])
            yield replace(choice, data=data)
    if len(choice.data) == 1:
        yield from (
            replace(choice, data=tuple(sorted((*choice.data, (machine.name, 1)))))
            for machine in scenario.menu
            if machine.name != choice.data[0][0]
        )
    else:
        yield from (replace(choice, data=(group,)) for group in choice.data)

"""Finds the cluster for a job: enumerates candidates, predicts their step times, and chooses one.

Candidates are enumerated in the order in which money should be spent (`STEPS_OF_SPENDING`). Of candidates that cost
about the same, the plan takes the one that comes first in this order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.errors import ConfigError
from hetero.planning.candidates import AS_IS, UINT8, Candidate, DataGroup
from hetero.planning.machines import Machine
from hetero.planning.model import MOST_PROCESSES_PER_CPU, Prediction, StepModel
from hetero.planning.profile import Profile
from hetero.pricing.cost import break_even_speedup, cost_per_1k_steps_usd

__all__ = ["GOALS", "MAX_HOSTS", "STEPS_OF_SPENDING", "Alternative", "Constraints", "Search", "search"]

GOALS = ("cost", "time")
MAX_HOSTS = 64
"""Largest number of data hosts of one type that a plan considers."""
STEPS_OF_SPENDING = (
    "as it is",
    "free CPUs",
    "cheaper bytes",
    "bigger machine",
    "data hosts",
    "two types",
    "spot data hosts",
)
_TIE = 0.005
"""Relative difference in cost below which the earlier step of spending wins."""
_REMOVABLE = ("trainer network", "data network", "memory", "window", "trainer CPU")
"""Limits that a plan names as the reason if data hosts would pay without them."""
_NUM_DRAWS = 200
_NUM_LEADERS = 4
"""Number of single-type clusters that mixtures of two types start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the user wants from a plan."""

    goal: str = "cost"
    """``cost``: fewest USD per step. ``time``: shortest step."""
    max_usd_per_1k_steps: float | None = None
    max_step_s: float | None = None
    """Longest step time in seconds, from the hours that the job may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One candidate with its prediction and cost."""

    candidate: Candidate
    prediction: Prediction
    spending: str
    """One of `STEPS_OF_SPENDING`."""
    usd_per_1k_steps: float | None
    """None if a price is unknown."""
    endpoints_per_host: int | None = None
    """Endpoints per data host if it is not one per vCPU. With two types, that of the type with the fewest."""

    @property
    def usd_interval(self) -> tuple[float, float] | None:
        """Ends of the 90 % interval of `usd_per_1k_steps`. None if a price is unknown."""
        hourly = self.candidate.hourly_usd
        if hourly is None:
            return None
        low_s, high_s = self.prediction.low_s, self.prediction.high_s
        return cost_per_1k_steps_usd(hourly, low_s), cost_per_1k_steps_usd(hourly, high_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The result of a search."""

    baseline: Alternative
    """The cluster without data hosts, used as in the profile."""
    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    """The chosen candidate and the best of each kind, in the order of spending and then of cost."""
    chance_to_pay: float
    """Share of the draws in which `chosen` costs less than `baseline`. 1 if they are the same."""
    prevented_by: str
    """The limit without which data hosts would be chosen, one of `BOTTLENECKS`. Empty if there is none."""

    @property
    def break_even(self) -> float | None:
        """Speed-up above which `chosen` costs less than `baseline`. None if a price is unknown."""
        own, base = self.chosen.candidate.hourly_usd, self.baseline.candidate.hourly_usd
        return None if own is None or base is None else break_even_speedup(own, base)


def search(
    profile: Profile,
    trainer: Machine,
    menu: Sequence[Machine],
    *,
    bigger: Sequence[Machine] = (),
    constraints: Constraints | None = None,
    vcpu_speeds: Mapping[str, float] | None = None,
    endpoints_per_host: int | None = None,
) -> Search:
    """Return the best cluster for a job, and the alternatives to it.

    Args:
        profile: The figures of the job. Its numbers of hosts and ranks are those of the plan.
        trainer: The machine of the trainer hosts.
        menu: Machines that may become data hosts.
        bigger: Machines with the same accelerators as ``trainer`` and more vCPUs.
        constraints: Goal and bounds. None means the lowest cost.
        vcpu_speeds: Relative speed of a vCPU by instance type, compared with the profile's first supply.
        endpoints_per_host: Endpoints per data host. None means one per vCPU, or more if they wait for storage.

    Raises:
        ConfigError: If no candidate satisfies the constraints. The message names the closest one.
    """
    constraints = constraints or Constraints()
    base = Candidate(
        trainer=trainer,
        num_trainer_hosts=profile.training.num_hosts,
        local_endpoints=profile.training.num_local_processes,
    )

    def model(*, num_draws: int, ignored: Collection[str] = ()) -> StepModel:
        return StepModel(
            profile,
            vcpu_speeds=vcpu_speeds,
            endpoints_per_host=endpoints_per_host,
            ignored=ignored,
            num_draws=num_draws,
        )

    def rank(*ignored: str) -> _Ranking:
        quick = model(num_draws=0, ignored=ignored)
        ranking = _Ranking(quick, constraints)
        ranking.add(_without_data(profile, base, bigger))
        if profile.has_registered_dataset:
            ranking.add(_with_data(profile, quick, ranking.best_local(), menu))
            ranking.add(_mixtures(ranking.leaders(), menu))
        return ranking

    ranking = rank()
    chosen = ranking.choose()
    prevented_by = ""
    if not chosen.data and profile.has_registered_dataset:
        prevented_by = next((limit for limit in _REMOVABLE if rank(limit).choose().data), "")
        if not prevented_by and rank(*_REMOVABLE).choose().data:  # several limits together
            prevented_by = ranking.limit_of_leader()
    # Intervals cost time, so only the candidates that are shown get them.
    shown = list(dict.fromkeys([base, *ranking.shown(chosen), chosen]))
    alternatives = dict(zip(shown, _alternatives(shown, model(num_draws=_NUM_DRAWS)), strict=True))
    return Search(
        baseline=alternatives[base],
        chosen=alternatives[chosen],
        alternatives=tuple(sorted(alternatives.values(), key=_order)),
        chance_to_pay=_chance_to_pay(alternatives[chosen], alternatives[base]),
        prevented_by=prevented_by,
    )


def _chance_to_pay(chosen: Alternative, base: Alternative) -> float:
    """Return the share of the draws in which the chosen cluster costs less. 1 if they are the same."""
    own_usd, base_usd = chosen.candidate.hourly_usd, base.candidate.hourly_usd
    if chosen is base or own_usd is None or base_usd is None:
        return 1.0
    return float((chosen.prediction.draws_s * own_usd < base.prediction.draws_s * base_usd).mean())


def spending_of(candidate: Candidate, base: Candidate) -> str:
    """Return the step of spending that a candidate belongs to, one of `STEPS_OF_SPENDING`."""
    if candidate.has_spot:
        return "spot data hosts"
    if len(candidate.data) > 1:
        return "two types"
    if candidate.data:
        return "data hosts"
    if candidate.trainer != base.trainer:
        return "bigger machine"
    if candidate.form != AS_IS:
        return "cheaper bytes"
    return "as it is" if candidate.local_endpoints == base.local_endpoints else "free CPUs"


# Enumeration


def _process_counts(profile: Profile, machine: Machine) -> list[int]:
    """Return numbers of processes that may preprocess beside the ranks of a trainer host, in ascending order.

    Processes that wait for storage leave their CPU to others, so there may be more of them than free CPUs.
    """
    training, supply = profile.training, profile.supply[0]
    cores = training.rank_cpu_cores.value if training.rank_cpu_cores else 0.0
    free = max(0, math.floor(machine.vcpus - cores * training.ranks_per_host))
    cpu_s = supply.sample_cpu_s.mean + supply.batch_cpu_s.mean
    per_cpu = min(MOST_PROCESSES_PER_CPU, 1 + supply.sample_wait_s.mean / cpu_s) if cpu_s > 0 else 1.0
    most = max(free, math.floor(free * per_cpu))
    counts = {training.num_local_processes, free, most}
    counts |= {math.ceil(most * eighth / 8) for eighth in range(1, 8)}
    return sorted(count for count in counts if count >= 0)


def _without_data(profile: Profile, base: Candidate, bigger: Sequence[Machine]) -> Iterator[Candidate]:
    yield base
    for machine in (base.trainer, *bigger):
        for count in _process_counts(profile, machine):
            if count or profile.training.num_local_processes == 0:
                yield replace(base, trainer=machine, local_endpoints=count)


def _forms(profile: Profile) -> list[str]:
    forms = [AS_IS, *(codec.name for codec in profile.codecs)]
    if any(leaf.fits_uint8 for leaf in profile.leaves):
        forms.append(UINT8)
    return forms


def _with_data(
    profile: Profile, model: StepModel, best_local: Candidate, menu: Sequence[Machine]
) -> Iterator[Candidate]:
    """Yield clusters with data hosts of one type.

    More hosts than those whose batches the accelerators can use only cost more, so the counts end there.
    """
    base = replace(best_local, local_endpoints=0)
    counts = [0, *_process_counts(profile, base.trainer)]
    for form in _forms(profile):
        for machine in menu:
            enough = model.hosts_for_headspace(machine, form)
            for local_endpoints in dict.fromkeys(counts):
                for count in range(1, min(MAX_HOSTS, enough + 1) + 1):
                    groups = (DataGroup(machine=machine, count=count),)
                    yield replace(base, local_endpoints=local_endpoints, data=groups, form=form)


def _mixtures(leaders: Iterable[Candidate], menu: Sequence[Machine]) -> Iterator[Candidate]:
    """Yield clusters in which a few hosts of another type replace some hosts of a good cluster."""
    for leader in leaders:
        (group,) = leader.data
        for fewer in range(1, 3):
            if group.count > fewer:
                for machine in menu:
                    if machine != group.machine:
                        for count in range(1, 3):
                            rest = DataGroup(machine=group.machine, count=group.count - fewer)
                            yield replace(leader, data=(rest, DataGroup(machine=machine, count=count)))


# Choice


class _Ranking:
    """The candidates with their expected step times and costs."""

    def __init__(self, model: StepModel, constraints: Constraints) -> None:
        self._model = model
        self._constraints = constraints
        self._base: Candidate | None = None
        self._step_s: dict[Candidate, float] = {}

    def add(self, candidates: Iterable[Candidate]) -> None:
        new = [candidate for candidate in dict.fromkeys(candidates) if candidate not in self._step_s]
        if new and self._base is None:
            self._base = new[0]
        for candidate, prediction in zip(new, self._model.predict(new), strict=True):
            self._step_s[candidate] = prediction.step_s

    def _cost(self, candidate: Candidate) -> float:
        """Return what the goal minimises: USD per step in arbitrary units, or seconds."""
        if self._constraints.goal == "time":
            return self._step_s[candidate]
        hourly = candidate.hourly_usd
        return math.inf if hourly is None else hourly * self._step_s[candidate]

    def _is_allowed(self, candidate: Candidate) -> bool:
        limits, hourly = self._constraints, candidate.hourly_usd
        if limits.max_step_s is not None and self._step_s[candidate] > limits.max_step_s:
            return False
        if limits.max_usd_per_1k_steps is None:
            return True
        return hourly is not None and cost_per_1k_steps_usd(hourly, self._step_s[candidate]) <= (
            limits.max_usd_per_1k_steps
        )

    def _key(self, candidate: Candidate) -> tuple[int, int, int]:
        assert self._base is not None
        return (
            STEPS_OF_SPENDING.index(spending_of(candidate, self._base)),
            candidate.num_data_hosts,
            candidate.local_endpoints,
        )

    def choose(self) -> Candidate:
        allowed = [candidate for candidate in self._step_s if self._is_allowed(candidate)]
        if not allowed:
            raise ConfigError(self._too_strict())
        best = min(map(self._cost, allowed))
        if math.isinf(best):  # without the trainer host's price only the shortest step can be compared
            return min(allowed, key=self._key)
        return min((c for c in allowed if self._cost(c) <= best * (1 + _TIE)), key=self._key)

    def _too_strict(self) -> str:
        limits, parts = self._constraints, []
        fastest = min(self._step_s, key=lambda candidate: self._step_s[candidate])
        if limits.max_step_s is not None:
            parts.append(
                f"the shortest step of all clusters is {self._step_s[fastest]:.4g} s, the limit is "
                f"{limits.max_step_s:.4g} s"
            )
        priced = [candidate for candidate in self._step_s if candidate.hourly_usd is not None]
        if limits.max_usd_per_1k_steps is not None and priced:
            cheapest = min(cost_per_1k_steps_usd(c.hourly_usd or 0.0, self._step_s[c]) for c in priced)
            parts.append(
                f"the lowest cost is {cheapest:.4g} USD per 1,000 steps, the limit is {limits.max_usd_per_1k_steps:.4g}"
            )
        return f"no cluster satisfies the limits: {'; '.join(parts)}\n  to do: relax a limit, or extend --menu"

    def best_local(self) -> Candidate:
        """Return the best cluster without data hosts, of the baseline's trainer machine."""
        assert self._base is not None
        local = [c for c in self._step_s if not c.data and c.trainer == self._base.trainer]
        return min(local, key=lambda candidate: (self._step_s[candidate], candidate.local_endpoints))

    def leaders(self) -> list[Candidate]:
        """Return the best clusters with one type of data hosts, at most one per type."""
        best: dict[Machine, Candidate] = {}
        for candidate in self._step_s:
            if len(candidate.data) == 1:
                machine = candidate.data[0].machine
                if machine not in best or self._cost(candidate) < self._cost(best[machine]):
                    best[machine] = candidate
        return sorted(best.values(), key=self._cost)[:_NUM_LEADERS]

    def limit_of_leader(self) -> str:
        """Return what limits the best cluster with data hosts, one of `BOTTLENECKS`, or an empty text."""
        leaders = self.leaders()
        return self._model.predict(leaders[:1])[0].bottleneck if leaders else ""

    def shown(self, chosen: Candidate) -> list[Candidate]:
        """Return the candidates for the table: the best of each kind, and the neighbours of the chosen one."""
        best: dict[object, Candidate] = {}
        for candidate in self._step_s:
            assert self._base is not None
            spending = spending_of(candidate, self._base)
            keys: list[object] = [spending, (spending, candidate.form)]
            if len(candidate.data) == 1:
                keys.append(candidate.data[0].machine)
                if chosen.data and candidate.data[0].machine == chosen.data[0].machine:
                    keys.append((candidate.data, candidate.form == chosen.form))
            for key in keys:
                if key not in best or self._cost(candidate) < self._cost(best[key]):
                    best[key] = candidate
        fastest = min(self._step_s, key=lambda candidate: (self._step_s[candidate], self._cost(candidate)))
        found = sorted(dict.fromkeys([*best.values(), fastest]), key=self._cost)
        own = chosen.num_data_hosts
        near = [c for c in found if c.data and chosen.data and abs(c.num_data_hosts - own) <= 1]
        return list(dict.fromkeys([*found[:12], *near[:4], fastest]))


def _alternatives(candidates: Sequence[Candidate], model: StepModel) -> list[Alternative]:
    base = candidates[0]
    return [
        Alternative(
            candidate=candidate,
            prediction=prediction,
            spending=spending_of(candidate, base),
            usd_per_1k_steps=None
            if candidate.hourly_usd is None
            else cost_per_1k_steps_usd(candidate.hourly_usd, prediction.step_s),
            endpoints_per_host=_endpoints_per_host(candidate, model),
        )
        for candidate, prediction in zip(candidates, model.predict(candidates), strict=True)
    ]


def _endpoints_per_host(candidate: Candidate, model: StepModel) -> int | None:
    numbers = [(model.endpoints_on(group.machine)[0], group.machine.vcpus) for group in candidate.data]
    return min((number for number, _ in numbers), default=None) if any(n != v for n, v in numbers) else None


def _order(alternative: Alternative) -> tuple[int, float]:
    cost = alternative.usd_per_1k_steps
    return STEPS_OF_SPENDING.index(alternative.spending), math.inf if cost is None else cost

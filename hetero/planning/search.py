"""Finds the cluster for a job: enumerates candidates, predicts their step times, and chooses one.

Candidates are enumerated in the order of `STEPS_OF_SPENDING`, free changes first. Of candidates that cost about the
same, the plan takes the one that comes first in this order.
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
_TIE = 0.003
"""Relative difference in cost below which the simpler cluster wins."""
_WORTH_SPENDING = 0.015
"""Saving of the cost, as a share of it, that the next step of spending must bring."""
_SHORTLIST = 200
"""Number of candidates whose expected cost over all draws is computed."""
_REMOVABLE = ("trainer network", "data network", "memory", "window", "trainer CPU")
"""Limits that a plan names as the reason if data hosts would pay without them."""
_NUM_DRAWS = 200
_NUM_FEW_DRAWS = 48
_NUM_TYPES = 8
"""Number of types of data hosts in the table."""
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
    """Share of the draws that make `chosen` cost less than `baseline`. 1 if they are the same."""
    prevented_by: str
    """The limit that keeps data hosts from being chosen, one of `BOTTLENECKS`. Empty if no limit does."""

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
        careful = None if ignored else model(num_draws=_NUM_FEW_DRAWS)
        ranking = _Ranking(quick, constraints, careful)
        ranking.add(_without_data(profile, base, bigger))
        if profile.has_registered_dataset:
            ranking.add(_with_data(profile, quick, ranking.best_local(), menu))
            ranking.add(_refined(profile, ranking.leaders()))
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
    """Return the share of the draws that make the chosen cluster cost less. 1 if they are the same."""
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
    if candidate.trainer is not base.trainer:
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
    forms = [codec.name for codec in profile.codecs]
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
    for machine in menu:
        forms = [AS_IS, *(_forms(profile) if model.has_bytes_limit(base.trainer, machine) else ())]
        for form in forms:
            enough = model.hosts_for_headspace(machine, form)
            for count in range(1, min(MAX_HOSTS, enough + 1) + 1):
                groups = (DataGroup(machine=machine, count=count),)
                for local_endpoints in dict.fromkeys((0, best_local.local_endpoints)):
                    yield replace(base, local_endpoints=local_endpoints, data=groups, form=form)


def _refined(profile: Profile, leaders: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield good clusters with other numbers of processes on the trainer hosts, and one host more or less."""
    for leader in leaders:
        (group,) = leader.data
        for count in range(max(1, group.count - 1), min(MAX_HOSTS, group.count + 1) + 1):
            groups = (DataGroup(machine=group.machine, count=count),)
            for local_endpoints in _process_counts(profile, leader.trainer):
                yield replace(leader, local_endpoints=local_endpoints, data=groups)


def _mixtures(leaders: Iterable[Candidate], menu: Sequence[Machine]) -> Iterator[Candidate]:
    """Yield each good cluster with some of its data hosts replaced by a few hosts of another type."""
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A candidate, and the figures that decide whether it is chosen."""

    candidate: Candidate
    spending: str
    step_s: float
    hourly_usd: float | None
    cost: float
    """What the goal minimises: USD per step in arbitrary units, or seconds. Infinite without a price."""

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Sort key in the order of spending."""
        candidate = self.candidate
        return STEPS_OF_SPENDING.index(self.spending), candidate.num_data_hosts, candidate.local_endpoints


class _Ranking:
    """The candidates with their expected step times and costs."""

    def __init__(self, model: StepModel, constraints: Constraints, careful: StepModel | None = None) -> None:
        self._model = model
        self._careful = careful
        self._constraints = constraints
        self._entries: dict[tuple[object, ...], _Entry] = {}
        self._base: Candidate | None = None

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Predict and rank more candidates. The first one of all is the baseline."""
        # The hash of a candidate takes longer than its prediction, so the machines' identities are the keys.
        new = {key: candidate for candidate in candidates if (key := _identity(candidate)) not in self._entries}
        self._base = self._base or next(iter(new.values()))
        by_time = self._constraints.goal == "time"
        for (key, candidate), step_s in zip(new.items(), self._model.expected_s(list(new.values())), strict=True):
            hourly = candidate.hourly_usd
            cost = step_s if by_time else math.inf if hourly is None else hourly * step_s
            spending = spending_of(candidate, self._base)
            self._entries[key] = _Entry(candidate, spending, step_s, hourly, cost)

    def _is_allowed(self, entry: _Entry) -> bool:
        limits = self._constraints
        if limits.max_step_s is not None and entry.step_s > limits.max_step_s:
            return False
        if limits.max_usd_per_1k_steps is None:
            return True
        hourly = entry.hourly_usd
        return hourly is not None and cost_per_1k_steps_usd(hourly, entry.step_s) <= limits.max_usd_per_1k_steps

    def choose(self) -> Candidate:
        """Return the best candidate.

        Raises:
            ConfigError: If no candidate satisfies the constraints.
        """
        allowed = [entry for entry in self._entries.values() if self._is_allowed(entry)]
        if not allowed:
            raise ConfigError(self._too_strict())
        if self._careful is not None:
            allowed = self._expected(allowed, self._careful)
        chosen = None
        for spending in STEPS_OF_SPENDING:
            group = [entry for entry in allowed if entry.spending == spending]
            if not group:
                continue
            best = min(entry.cost for entry in group)
            near = (entry for entry in group if entry.cost <= best * (1 + _TIE))
            simplest = min(near, key=lambda entry: entry.simplicity)
            if chosen is None or simplest.cost < chosen.cost * (1 - _WORTH_SPENDING):
                chosen = simplest
        assert chosen is not None
        return chosen.candidate

    def _expected(self, entries: Sequence[_Entry], model: StepModel) -> list[_Entry]:
        """Return the best candidates of each step of spending with their mean costs over all draws.

        One data host too few costs more than one too many. So the mean cost, unlike the cost of the mean figures,
        prefers a cluster with a reserve.
        """
        found = []
        for spending in STEPS_OF_SPENDING:
            group = [entry for entry in entries if entry.spending == spending]
            group = sorted(group, key=lambda entry: entry.cost)[:_SHORTLIST]
            predictions = model.predict([entry.candidate for entry in group])
            for entry, prediction in zip(group, predictions, strict=True):
                mean_s = float(prediction.draws_s.mean())
                found.append(replace(entry, cost=entry.cost * mean_s / entry.step_s))
        return found

    def _too_strict(self) -> str:
        limits, parts = self._constraints, []
        if limits.max_step_s is not None:
            fastest_s = min(entry.step_s for entry in self._entries.values())
            parts.append(
                f"the shortest step of all clusters is {fastest_s:.4g} s, the limit is {limits.max_step_s:.4g} s"
            )
        costs = [
            cost_per_1k_steps_usd(entry.hourly_usd, entry.step_s)
            for entry in self._entries.values()
            if entry.hourly_usd is not None
        ]
        if limits.max_usd_per_1k_steps is not None and costs:
            parts.append(
                f"the lowest cost is {min(costs):.4g} USD per 1,000 steps, the limit is "
                f"{limits.max_usd_per_1k_steps:.4g}"
            )
        return f"no cluster satisfies the limits: {'; '.join(parts)}\n  to do: relax a limit, or extend --menu"

    def best_local(self) -> Candidate:
        """Return the fastest cluster without data hosts, of the baseline's trainer machine."""
        assert self._base is not None
        trainer = self._base.trainer
        local = [e for e in self._entries.values() if not e.candidate.data and e.candidate.trainer is trainer]
        return min(local, key=lambda entry: (entry.step_s, entry.candidate.local_endpoints)).candidate

    def leaders(self) -> list[Candidate]:
        """Return the best clusters with one type of data hosts, at most one per type."""
        best: dict[int, _Entry] = {}
        for entry in self._entries.values():
            if len(entry.candidate.data) == 1:
                machine = id(entry.candidate.data[0].machine)
                if machine not in best or entry.cost < best[machine].cost:
                    best[machine] = entry
        return [entry.candidate for entry in sorted(best.values(), key=lambda entry: entry.cost)[:_NUM_LEADERS]]

    def limit_of_leader(self) -> str:
        """Return what limits the best cluster with data hosts, one of `BOTTLENECKS`, or an empty text."""
        leaders = self.leaders()
        return self._model.predict(leaders[:1])[0].bottleneck if leaders else ""

    def shown(self, chosen: Candidate) -> list[Candidate]:
        """Return the candidates for the table: the best of each kind, and the neighbours of the chosen one."""
        best: dict[object, _Entry] = {}
        for entry in self._entries.values():
            candidate = entry.candidate
            keys: list[object] = [entry.spending, (entry.spending, candidate.form)]
            if len(candidate.data) == 1:
                (group,) = candidate.data
                keys.append(id(group.machine))
                own = chosen.data[0] if len(chosen.data) == 1 else None
                if own is not None and group.machine is own.machine and abs(group.count - own.count) <= 1:
                    keys.append((id(group.machine), group.count))
            for key in keys:
                if key not in best or entry.cost < best[key].cost:
                    best[key] = entry
        fastest = min(self._entries.values(), key=lambda entry: (entry.step_s, entry.cost))
        kinds = [best[key] for key in best if not isinstance(key, int)]
        types = sorted((best[key] for key in best if isinstance(key, int)), key=lambda entry: entry.cost)
        found = {_identity(entry.candidate): entry.candidate for entry in (*kinds, *types[:_NUM_TYPES], fastest)}
        return list(found.values())


def _identity(candidate: Candidate) -> tuple[object, ...]:
    """Return a key that is equal for equal candidates with the same machine objects."""
    groups = tuple((id(group.machine), group.count) for group in candidate.data)
    return (id(candidate.trainer), candidate.num_trainer_hosts, candidate.local_endpoints, groups, candidate.form)


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

"""Finds the cluster for a job: enumerates candidates, predicts their step times, and chooses one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.decide.planning.candidates import Candidate
from hetero.decide.planning.enumeration import mixtures, refined, spending_of, with_data, without_data
from hetero.decide.planning.finals import Finals
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.ranking import Constraints, Ranking, simplest
from hetero.decide.planning.steps.model import NUM_DRAWS, Prediction, StepModel
from hetero.decide.planning.steps.timelines import Timelines
from hetero.metrics.profile.profile import Profile, TrainingProfile
from hetero.pricing.cost import break_even_speedup, cost_per_1k_steps_usd
from hetero.report.plan import STEPS_OF_SPENDING

__all__ = ["Alternative", "Search", "search"]


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
    """Endpoints per data host if it is not one per vCPU."""

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

    constraints: Constraints
    baseline: Alternative
    """The cluster without data hosts, used as in the profile."""
    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    """The chosen candidate and the best of each kind, in the order of spending and then of cost."""
    chance_to_pay: float | None
    """Share of the draws that make `chosen` cost less than `baseline`. 1 if they are the same. None if a price is
    unknown."""
    prevented_by: str
    """The limit of the cluster that would be chosen without limits, one of
    `hetero.decide.planning.steps.model.REMOVABLE`. Empty if none limits it."""

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
    measured: TrainingProfile | None = None,
) -> Search:
    """Return the best cluster for a job, and the alternatives to it.

    Args:
        profile: The figures of the job. The plan has the same numbers of trainer hosts and ranks.
        trainer: The machine of the trainer hosts.
        menu: Machines that may become data hosts.
        bigger: Machines with the same accelerators as ``trainer`` and more vCPUs.
        constraints: Goal and bounds. None means the lowest cost.
        vcpu_speeds: Relative speed of a vCPU by instance type, compared with the profile's first supply.
        endpoints_per_host: Endpoints per data host. None means one per vCPU, or more if they wait for storage.
        measured: The training as it was measured. None if ``profile`` has the measured numbers of hosts and ranks.

    Raises:
        ConfigError: If no candidate satisfies the constraints. The message names the closest one.
    """
    constraints = constraints or Constraints()
    base = Candidate(
        trainer=trainer,
        num_trainer_hosts=profile.training.num_hosts,
        local_endpoints=profile.training.num_local_processes,
    )

    # Data hosts cannot build a data set whose factory is not registered.
    menu = menu if profile.has_registered_dataset else ()
    # All models share the timelines, because each must be computed only once.
    timelines = Timelines(
        profile, vcpu_speeds=vcpu_speeds or {}, endpoints_per_host=endpoints_per_host, measured=measured
    )

    def make_model(*, num_draws: int = NUM_DRAWS, has_removable_limits: bool = True) -> StepModel:
        """Return a model of the job's steps. Without draws, it has no intervals, but is fast."""
        return StepModel(
            profile,
            vcpu_speeds=vcpu_speeds,
            endpoints_per_host=endpoints_per_host,
            has_removable_limits=has_removable_limits,
            num_draws=num_draws,
            timelines=timelines,
        )

    def rank_candidates(*, has_removable_limits: bool = True) -> Ranking:
        """Return the clusters that may be the best, ranked by predictions without intervals, which are fast."""
        model = make_model(num_draws=0, has_removable_limits=has_removable_limits)
        ranking = Ranking(model, constraints)
        # The order matters. The first candidate of all is the baseline. Candidates with data hosts are made from the
        # best one without them, and later candidates from the best ones so far.
        ranking.add(without_data(profile, base, bigger))
        ranking.add(with_data(profile, model, ranking.best_local(), menu))
        ranking.add(refined(profile, ranking.leaders()))
        ranking.add(mixtures(ranking.leaders(), menu))
        return ranking

    ranking = rank_candidates()
    model = make_model()
    chosen = Finals(ranking, model, menu).choose()
    prevented_by = ""
    if menu and not chosen.data:
        # Rank once more without the limits that could be removed, such as a slow network. If data hosts win then,
        # one of these limits prevents them. Otherwise they cost too much in any case.
        unlimited = simplest(rank_candidates(has_removable_limits=False).allowed()).candidate
        prevented_by = model.limit_of(unlimited) if unlimited.data else ""
    # Only the candidates that are shown get intervals, because intervals cost time. The chosen candidate is added,
    # because the finals may have chosen a neighbour that is not among the best of its kind.
    shown = list(dict.fromkeys([base, *ranking.shown(chosen), chosen]))
    alternatives = dict(zip(shown, _alternatives(shown, model), strict=True))
    return Search(
        constraints=constraints,
        baseline=alternatives[base],
        chosen=alternatives[chosen],
        alternatives=tuple(sorted(alternatives.values(), key=_order_in_table)),
        # The baseline never costs less than itself, so the draws would give 0.
        chance_to_pay=1.0 if chosen == base else chance_to_pay(alternatives[chosen], alternatives[base]),
        prevented_by=prevented_by,
    )


def chance_to_pay(chosen: Alternative, base: Alternative) -> float | None:
    """Return the share of the draws that make a cluster cost less than another, or None if a price is unknown."""
    own_usd, base_usd = chosen.candidate.hourly_usd, base.candidate.hourly_usd
    if own_usd is None or base_usd is None:
        return None
    return float((chosen.prediction.draws_s * own_usd < base.prediction.draws_s * base_usd).mean())


def _alternatives(candidates: Sequence[Candidate], model: StepModel) -> list[Alternative]:
    """Return the candidates with their predicted step time and cost. The first candidate is the baseline."""
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
    """Return the endpoints per data host, or None if each data host has one per vCPU, the launcher's default."""
    machines = [group.machine for group in candidate.data]
    numbers = [model.endpoints_on(machine, candidate.endpoints_per_host)[0] for machine in machines]
    # A job states one number for all data hosts. The smallest one fits into the memory of each type.
    return None if numbers == [machine.vcpus for machine in machines] else min(numbers)


def _order_in_table(alternative: Alternative) -> tuple[int, float]:
    """Return a sort key: the step of spending, then the cost. Alternatives without a price come last in their step."""
    cost = alternative.usd_per_1k_steps
    return STEPS_OF_SPENDING.index(alternative.spending), math.inf if cost is None else cost

"""Comparison of two runs: how much faster and cheaper the second run is, and whether it is worth it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.metrics.figures import Figure
from hetero.pricing import cost
from hetero.report.build import cost_objection
from hetero.report.model import Headline, Report

__all__ = ["FEW_STEPS", "Comparison", "compare"]

FEW_STEPS = 20
"""Lowest number of measured steps for a comparison of means."""
_MANY_OVERRUNS = 0.1
"""Limit on the share of steps or batches that took longer than emulated. Above it, times are not compared."""

_NUMBER = re.compile(r" \(\d+\)$")
_STOPPED = 143
"""Exit code of a job that ended because it was asked to stop. Its steps count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run against its baseline."""

    baseline: Report
    candidate: Report
    per: str
    """``step`` if a step is the same work in both runs, otherwise ``sample``."""
    speedup: Figure | None
    """Baseline time / candidate time for the same step or number of samples. None if the runs are not comparable."""
    break_even_speedup: Figure | None
    """Speed-up above which the candidate is cheaper. None if a price is missing or differs between the runs."""
    saving: Figure | None
    """Fraction of the baseline's cost for the same work. Negative if dearer. None if it cannot be determined."""
    objections: tuple[str, ...]
    """Reasons other than missing prices why the saving is None, and possibly the speed-up too. One sentence each."""
    caveats: tuple[str, ...]
    """Other differences that make the runs less comparable, one sentence each."""

    @property
    def is_worth_it(self) -> bool | None:
        """Whether the candidate does the same work for less money. None if it cannot be determined."""
        return None if self.saving is None else self.saving.value > 0


def compare(baseline: Report, candidate: Report) -> Comparison:
    """Compare two runs of the same training.

    If both runs have the same global batch, a step is the same work, and steps are compared. Otherwise only samples are
    compared.

    Args:
        baseline: Report of the baseline, usually the homogeneous run.
        candidate: Report of the candidate, usually the heterogeneous run.

    Raises:
        ConfigError: If a run has no measured step.
    """
    base, other = _headline(baseline, "first"), _headline(candidate, "second")
    per = "step" if base.global_batch_samples == other.global_batch_samples else "sample"
    base_s, other_s = _time_per_unit(base, per), _time_per_unit(other, per)
    if base_s is None or other_s is None:
        which = "first" if base_s is None else "second"
        raise ConfigError(f"{which} report: no time per {per} was measured, so there is nothing to compare")
    # Collect the reasons why speed, prices or costs of the two runs cannot be compared.
    basis = "simulated" if "simulated" in (baseline.run.basis, candidate.run.basis) else "measured"
    of_pace = [*_unlike(baseline, candidate, base, other)]
    of_prices = [*_other_prices(baseline, candidate)]
    of_cost = [*_cost_objections(baseline, candidate), *of_prices]
    # A saving needs both comparable times and comparable costs.
    break_even = saving = None
    if baseline.cost.hourly is not None and candidate.cost.hourly is not None and not of_prices:
        base_usd, other_usd = baseline.cost.hourly.value, candidate.cost.hourly.value
        break_even = Figure(value=cost.break_even_speedup(other_usd, base_usd), unit="1", basis="modelled")
        if not (of_pace or of_cost):
            saved = cost.saving(cost.job_cost_usd(other_usd, other_s), cost.job_cost_usd(base_usd, base_s))
            saving = Figure(value=saved, unit="1", basis=basis)
    speedup = None if of_pace else Figure(value=cost.speedup(other_s, base_s), unit="1", basis=basis)
    return Comparison(
        baseline=baseline,
        candidate=candidate,
        per=per,
        speedup=speedup,
        break_even_speedup=break_even,
        saving=saving,
        objections=(*of_pace, *of_cost),
        caveats=tuple(_caveats(baseline, candidate, base, other)),
    )


def _headline(report: Report, which: str) -> Headline:
    if report.headline is None or report.headline.step_time_mean is None:
        raise ConfigError(
            f"{which} report: no step was measured on every rank (run {report.run.run_id}), so there is nothing to "
            "compare; train for more steps than the warm-up"
        )
    return report.headline


def _time_per_unit(headline: Headline, per: str) -> float | None:
    figure = headline.step_time_mean if per == "step" else headline.samples_per_s
    if figure is None or figure.value <= 0:
        return None
    return figure.value if per == "step" else 1 / figure.value


def _unlike(baseline: Report, candidate: Report, base: Headline, other: Headline) -> Iterator[str]:
    """Yield reasons why the times of the two runs are not times of the same work."""
    first, second = baseline.run, candidate.run
    if first.basis != second.basis:
        yield f"The first run was {first.basis}, the second {second.basis}. Compare two of a kind."
    for name in sorted(set(first.options) | set(second.options)):
        values = [run.options.get(name, "unset") for run in (first, second)]
        if name.startswith("emulate") and values[0] != values[1]:
            yield (
                f"The emulation differs: {name} is {values[0]} in the first run and {values[1]} in the second. "
                "Give both runs the same."
            )
    if _name(base.loader) != _name(other.loader):
        yield (
            f"The loaders differ: {base.loader} in the first run, {other.loader} in the second. If they are the same, "
            "give both the same name (an argument of the loader)."
        )
    for which, headline in (("first", base), ("second", other)):
        if headline.num_steps_measured < FEW_STEPS:
            yield (
                f"The {which} run measured only {headline.num_steps_measured} steps. Train for {FEW_STEPS} or more "
                "after the warm-up."
            )
    for which, report, headline in (("first", baseline, base), ("second", candidate, other)):
        yield from (
            f"{line} Emulate longer times, or use a machine that does nothing else."
            for line, share in _overruns(which, report, headline)
            if share > _MANY_OVERRUNS
        )


def _cost_objections(baseline: Report, candidate: Report) -> Iterator[str]:
    """Yield reasons why costs cannot be compared, although the times may be of the same work."""
    yield from dict.fromkeys(filter(None, map(cost_objection, (baseline.run, candidate.run))))
    for which, report in (("first", baseline), ("second", candidate)):
        if report.run.exit_code not in (0, _STOPPED):
            yield f"The {which} run failed (exit code {report.run.exit_code}). Compare runs that ended well."


def _other_prices(baseline: Report, candidate: Report) -> Iterator[str]:
    """Yield a sentence for each instance type whose price differs between the runs."""
    known = {price.instance_type: price.hourly_usd for price in baseline.cost.prices}
    for price in candidate.cost.prices:
        before = known.get(price.instance_type, price.hourly_usd)
        if not math.isclose(before, price.hourly_usd):
            yield (
                f"{price.instance_type} costs {before:g} USD/h in the first run, {price.hourly_usd:g} in the second. "
                "Give both runs the same prices."
            )


def _caveats(baseline: Report, candidate: Report, base: Headline, other: Headline) -> Iterator[str]:
    first, second = baseline.run, candidate.run
    if base.global_batch_samples != other.global_batch_samples:
        yield (
            f"The global batch differs ({base.global_batch_samples} against {other.global_batch_samples} samples), "
            "so a step is not the same work: only samples are compared."
        )
    if first.command != second.command:
        yield "The commands differ."
    if base.loader != other.loader and _name(base.loader) == _name(other.loader):
        yield (
            f"The times are of {base.loader} in the first run and of {other.loader} in the second. If these do other "
            "work, give each loader a different name (an argument of the loader)."
        )
    for which, report, headline in (("first", baseline, base), ("second", candidate, other)):
        yield from (line for line, share in _overruns(which, report, headline) if share <= _MANY_OVERRUNS)
    if len({(price.region, price.as_of) for report in (baseline, candidate) for price in report.cost.prices}) > 1:
        yield "The prices are not all of one region and date."


def _name(label: str) -> str:
    """Return the name of a loader from its label: ``photos`` from ``photos (2)``."""
    return _NUMBER.sub("", label)


def _overruns(which: str, report: Report, headline: Headline) -> Iterator[tuple[str, float]]:
    """Yield sentences about real work that took longer than emulated, each with the share of such steps or batches."""
    loaders = [loader for rank in report.run.ranks for label, loader in rank.labelled if label == headline.loader]
    for num_overruns, num_all, words in (
        (sum(loader.num_emulation_overruns for loader in loaders), sum(loader.num_steps for loader in loaders),
         "steps (over all ranks) computed longer than the emulated accelerator"),
        (report.run.events.get("emulation overruns", 0), report.run.events.get("batches computed", 0),
         "batches took longer to make than the emulated vCPUs"),
    ):  # fmt: skip
        if num_overruns:
            text = f"In the {which} run {num_overruns} of {num_all} {words} would: the real work of this machine shows."
            yield text, num_overruns / max(num_overruns, num_all)

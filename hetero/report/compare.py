"""Comparison of two runs: how much faster and cheaper the second run is, and whether it is worth it.

A measured step time may be too long, for two reasons: other programs used the CPUs, or real work took longer than the
time that the run emulates. So each run has a range of step times, and the comparison has a range of speed-ups and
savings. The second run is worth it, or not worth it, only if this is true in the whole range.
"""

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
from hetero.report.overruns import upper_bounds_note

__all__ = ["FEW_STEPS", "Comparison", "Range", "compare"]

FEW_STEPS = 20
"""Lowest number of measured steps for a comparison of means."""

_NUMBER = re.compile(r" \(\d+\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Lower and upper bound of a ratio. They are equal if nothing made the measured times too long."""

    low: float
    high: float
    basis: str
    """``measured`` or ``simulated``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run against its baseline."""

    baseline: Report
    candidate: Report
    per: str
    """``step`` if a step is the same work in both runs, otherwise ``sample``."""
    speedup: Range | None
    """Baseline time / candidate time for the same step or number of samples. None if the runs are not comparable."""
    break_even_speedup: Figure | None
    """Speed-up above which the candidate is cheaper. None if a price is missing or differs between the runs."""
    saving: Range | None
    """Fraction of the baseline's cost for the same work. Negative if dearer. None if it cannot be determined."""
    objections: tuple[str, ...]
    """Reasons other than missing prices against a saving, and possibly against the speed-up too. One sentence each."""
    caveats: tuple[str, ...]
    """Other differences that make the runs less comparable, one sentence each."""

    @property
    def is_worth_it(self) -> bool | None:
        """Whether the candidate does the same work for less money. None if it cannot be determined."""
        if self.saving is None or self.saving.low <= 0 < self.saving.high:
            return None
        return self.saving.low > 0


def compare(baseline: Report, candidate: Report) -> Comparison:
    """Compare two runs of the same training.

    If both runs have the same global batch, a step is the same work, and steps are compared. Otherwise only samples are
    compared.

    Args:
        baseline: Report of the baseline, usually the homogeneous run.
        candidate: Report of the candidate, usually the heterogeneous run.

    Raises:
        ConfigError: If a run lacks a measured step.
    """
    base, other = _headline(baseline, "first"), _headline(candidate, "second")
    per = "step" if base.global_batch_samples == other.global_batch_samples else "sample"
    base_range_s, other_range_s = _times_per_unit(base, per), _times_per_unit(other, per)
    if base_range_s is None or other_range_s is None:
        which = "first" if base_range_s is None else "second"
        raise ConfigError(f"{which} report: no time per {per} was measured, so there is nothing to compare")
    # Collect the reasons why speed, prices or costs of the two runs cannot be compared.
    basis = "simulated" if "simulated" in (baseline.run.basis, candidate.run.basis) else "measured"
    speed_objections = [*_speed_objections(baseline, candidate, base, other)]
    price_objections = [*_price_objections(baseline, candidate)]
    cost_objections = [*_cost_objections(baseline, candidate), *price_objections]
    # The lower bound of the speed-up is the shortest time of the first run / the longest time of the second run.
    speedup = saving = break_even = None
    if not speed_objections:
        (base_low_s, base_high_s), (other_low_s, other_high_s) = base_range_s, other_range_s
        low, high = cost.speedup(other_high_s, base_low_s), cost.speedup(other_low_s, base_high_s)
        speedup = Range(low=low, high=high, basis=basis)
    # A saving needs both comparable times and comparable costs.
    if baseline.cost.hourly is not None and candidate.cost.hourly is not None and not price_objections:
        ratio = cost.break_even_speedup(candidate.cost.hourly.value, baseline.cost.hourly.value)
        break_even = Figure(value=ratio, unit="1", basis="modelled")
        # A run costs its hourly price times its time. So cost of the second / cost of the first = ratio / speed-up.
        if speedup is not None and not cost_objections:
            saving = Range(low=1 - ratio / speedup.low, high=1 - ratio / speedup.high, basis=basis)
    return Comparison(
        baseline=baseline,
        candidate=candidate,
        per=per,
        speedup=speedup,
        break_even_speedup=break_even,
        saving=saving,
        objections=(*speed_objections, *cost_objections),
        caveats=tuple(_caveats(baseline, candidate, base, other)),
    )


def _headline(report: Report, which: str) -> Headline:
    """Return the figures of a run. Raise `ConfigError` if it measured no step."""
    if report.headline is None or report.headline.step_time_mean is None:
        raise ConfigError(
            f"{which} report: no step was measured on every rank (run {report.run.run_id}), so there is nothing to "
            "compare; train for more steps than the warm-up"
        )
    return report.headline


def _times_per_unit(headline: Headline, per: str) -> tuple[float, float] | None:
    """Return the lower and the upper bound of the time per step or sample. None if nothing was measured."""
    times_s, rate = headline.step_time_range_s, headline.samples_per_s
    if times_s is None or rate is None or times_s[0] <= 0 or rate.value <= 0:
        return None
    if per == "step":
        return times_s
    # The rate belongs to the measured step time, which is the upper bound. The lower bound is shorter in proportion.
    sample_s = 1 / rate.value
    return sample_s * times_s[0] / times_s[1], sample_s


def _speed_objections(baseline: Report, candidate: Report, base: Headline, other: Headline) -> Iterator[str]:
    """Yield reasons why the times of the two runs are not times of the same work."""
    first, second = baseline.run, candidate.run
    if first.basis != second.basis:
        yield f"The first run was {first.basis}, the second {second.basis}. Compare two of a kind."
    # Only the options of the emulation must be equal. The other options are what a comparison is about.
    for name in sorted({*first.options, *second.options}):
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


def _cost_objections(baseline: Report, candidate: Report) -> Iterator[str]:
    """Yield reasons why costs cannot be compared, although the times may be of the same work."""
    # Both runs may have the same objection, which is stated once.
    yield from dict.fromkeys(filter(None, map(cost_objection, (baseline.run, candidate.run))))
    for which, report in (("first", baseline), ("second", candidate)):
        if not report.run.has_ended_well:
            yield f"The {which} run failed (exit code {report.run.exit_code}). Compare runs that ended well."


def _price_objections(baseline: Report, candidate: Report) -> Iterator[str]:
    """Yield a sentence for each instance type whose price differs between the runs."""
    known = {price.instance_type: price.hourly_usd for price in baseline.cost.prices}
    for price in candidate.cost.prices:
        before = known.get(price.instance_type, price.hourly_usd)
        # Prices of two sources may differ in their last digit.
        if not math.isclose(before, price.hourly_usd):
            yield (
                f"{price.instance_type} costs {before:g} USD/h in the first run, {price.hourly_usd:g} in the second. "
                "Give both runs the same prices."
            )


def _caveats(baseline: Report, candidate: Report, base: Headline, other: Headline) -> Iterator[str]:
    """Yield differences between two runs that can be compared. A reader of the comparison must know them."""
    first, second = baseline.run, candidate.run
    if base.global_batch_samples != other.global_batch_samples:
        yield (
            f"The global batch differs ({base.global_batch_samples} against {other.global_batch_samples} samples), "
            "so a step is not the same work: only samples are compared."
        )
    if first.command != second.command:
        yield "The commands differ."
    # Loaders with the same name and different numbers may do different work.
    if base.loader != other.loader and _name(base.loader) == _name(other.loader):
        yield (
            f"The times are of {base.loader} in the first run and of {other.loader} in the second. If these do other "
            "work, give each loader a different name (an argument of the loader)."
        )
    if note := upper_bounds_note({"the first run": baseline, "the second run": candidate}):
        yield note
    if len({(price.region, price.as_of) for report in (baseline, candidate) for price in report.cost.prices}) > 1:
        yield "The prices are not all of one region and date."


def _name(label: str) -> str:
    """Return the name of a loader from its label: ``photos`` from ``photos (2)``."""
    return _NUMBER.sub("", label)

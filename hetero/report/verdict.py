"""The verdict of a comparison in words, for every form of a report."""

from __future__ import annotations

from hetero.documents.quantities import NOT_KNOWN, seconds_text
from hetero.report.build import missing_emulation
from hetero.report.compare import Comparison
from hetero.report.overruns import EMULATION_FLAGS, lost_share

__all__ = ["answer_text", "bound_text", "pace_text", "saving_text", "speedup_text", "verdict_text"]


def answer_text(comparison: Comparison) -> str:
    """Return the answer of a comparison without objections: verdict, pace and break-even, as one paragraph."""
    break_even = comparison.break_even_speedup
    if comparison.saving is None or break_even is None:
        return f"The second run has {pace_text(comparison)}. Whether it is cheaper cannot be said without all prices."
    verdict = verdict_text(comparison)
    start = f"The second run is **{verdict}** for the same work." if comparison.is_worth_it is not None else verdict
    return (
        f"{start} It has {pace_text(comparison)}; above {break_even.value:.2f} times ({break_even.basis}) it is the "
        "cheaper one."
    )


def verdict_text(comparison: Comparison) -> str:
    """Return whether the second run is worth it, for a comparison with a saving.

    The text completes "The second run is". If the run may be cheaper or dearer, the text is a whole sentence instead.
    The sentence names the step time that is not known well enough, and what to run to know it.
    """
    saving = comparison.saving
    assert saving is not None, "there is no verdict without a saving"
    if comparison.is_worth_it is None:
        return (
            "Whether the second run is cheaper cannot be said: it is between "
            f"{_percent(-saving.low)} % dearer and {_percent(saving.high)} % cheaper, because {_obstacle(comparison)} "
            f"{_to_decide(comparison)}"
        )
    # Bounds that read the same are shown as one exact figure.
    at_least = "" if _percent(saving.low) == _percent(saving.high) else "at least "
    if comparison.is_worth_it:
        return f"worth it: {at_least}{_percent(saving.low)} % cheaper"
    return f"not worth it: {at_least}{_percent(-saving.high)} % dearer"


def pace_text(comparison: Comparison) -> str:
    """Return the pace of the second run as a multiple of the first run's."""
    reports = (comparison.baseline, comparison.candidate)
    # Without emulation, simulated hosts are as fast as this machine and not as their instance types.
    here = " on this machine" if any(missing_emulation(report.run) for report in reports) else ""
    assert comparison.speedup is not None
    return f"{speedup_text(comparison)} times the pace per {comparison.per}{here} ({comparison.speedup.basis})"


def speedup_text(comparison: Comparison) -> str:
    """Return the speed-up of the second run as `bound_text` does, with two decimals. It must be known."""
    speedup = comparison.speedup
    assert speedup is not None, "there is no pace if the runs cannot be compared"
    return bound_text(f"{speedup.low:.2f}", f"{speedup.high:.2f}", comparison.is_worth_it)


def saving_text(comparison: Comparison) -> str:
    """Return the saving of the second run in percent as `bound_text` does, with one decimal. A dash if not known."""
    saving = comparison.saving
    if saving is None:
        return NOT_KNOWN
    return f"{bound_text(_percent(saving.low), _percent(saving.high), comparison.is_worth_it)} %"


def bound_text(low: str, high: str, is_worth_it: bool | None) -> str:
    """Return the bound of a figure that proves the verdict.

    A run is worth it if even its lower bound is good enough. A run is not worth it if even its upper bound is not. The
    other bound is left out, because the verdict does not need it and it may be wrong. For example, a late first step
    made the other steps of a short run look too short, and the upper bound of its saving was wrong by half a
    percent. Without a verdict, the text has both bounds. Equal bounds are one exact figure.

    Args:
        low: Text of the lower bound.
        high: Text of the upper bound.
        is_worth_it: See `Comparison.is_worth_it`.
    """
    if low == high:
        return low
    if is_worth_it is None:
        return f"{low} to {high}"
    return f"at least {low}" if is_worth_it else f"at most {high}"


def _percent(fraction: float) -> str:
    # The sum of -0.0 and 0.0 is 0.0, which has no sign in the text.
    return f"{round(100 * fraction, 1) + 0.0:.1f}"


def _obstacle(comparison: Comparison) -> str:
    """Return a sentence about the run whose bounds of the step time differ most."""
    headlines = {"first": comparison.baseline.headline, "second": comparison.candidate.headline}
    ranges_s = {which: headline.step_time_range_s for which, headline in headlines.items() if headline is not None}
    known_s = {which: range_s for which, range_s in ranges_s.items() if range_s is not None}
    which = max(known_s, key=lambda name: known_s[name][1] / known_s[name][0])
    low_s, high_s = known_s[which]
    return (
        f"a step of the {which} run took {seconds_text(high_s)} with the other work of this machine, and would take "
        f"{seconds_text(low_s)} or more without it."
    )


def _to_decide(comparison: Comparison) -> str:
    """Return a sentence that says what to run if the step times are not known well enough for a verdict."""
    if any(lost_share(report.run) for report in (comparison.baseline, comparison.candidate)):
        return "To decide, run both again on machines that do nothing else."
    return f"To decide, run both again with longer emulated times: {' and '.join(EMULATION_FLAGS.values())}."

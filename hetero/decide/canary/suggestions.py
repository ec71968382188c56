"""Says what more canary runs would tell. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hetero.decide.canary.model import Refusal
from hetero.decide.canary.points import MAX_FRACTION, CanaryPoint
from hetero.decide.canary.refusals import percent

__all__ = ["BUDGET_S", "suggestion"]

BUDGET_S = 600.0
"""Time of the runs that a suggestion is about."""
_BY_VALUES = (
    "More canaries with larger fractions would not tell how long the whole runs, because the script decides that by "
    "its values. Give it a fixed number of passes for a forecast."
)
_BY_RULE = {
    # No text here, because the reason of this refusal already says what to do.
    "busy": "",
    "passes": _BY_VALUES,
    "failed": _BY_VALUES,
    "fixed-steps": (
        "More canaries with larger fractions would not tell how long the whole runs, because its steps do not depend "
        "on the data. Run the script with fewer steps, and multiply."
    ),
    "curved": "Larger fractions would show whether the growth keeps its power, or turns into a line.",
    "no-growth": "Larger fractions would show whether the time grows at all.",
    "short-passes": "The passes of larger fractions have more batches.",
    "cpu-cache": "Larger fractions would show how much slower the memory of a larger job is.",
}
"""What more canaries would tell, by the rule that refused the time. The first one counts."""


def suggestion(points: Sequence[CanaryPoint], refusals: Sequence[Refusal]) -> str:
    """Return what more canaries would tell.

    Without a refusal, the text is about two runs that take ten minutes together.

    Args:
        points: The finished runs.
        refusals: The reasons against the forecast of the time.
    """
    rules = {refusal.rule for refusal in refusals}
    # If several rules refused, the first one in the table counts. The table begins with the rules that more runs cannot
    # change.
    found = next((text for rule, text in _BY_RULE.items() if rule in rules), None)
    if found is not None:
        return found
    fixed_s = statistics.median(point.fixed_s for point in points)
    # Time of the growing part in the whole job, in proportion to the data.
    growing_s = statistics.median(point.growing_s / point.fraction for point in points)
    minutes = f"{BUDGET_S / 60:.0f} minutes"
    if fixed_s + growing_s <= BUDGET_S:
        return (
            f"The whole job takes less than another {minutes}, about {fixed_s + growing_s:,.0f} s in proportion to the "
            "data. Run it instead of more canaries."
        )
    # The suggestion is two runs: one with this fraction, and one with half of this fraction. So 1.5 fractions and two
    # starts must fit into the time.
    fraction = min(MAX_FRACTION, (BUDGET_S - 2 * fixed_s) / max(1e-9, 1.5 * growing_s))
    largest = max(point.fraction for point in points)
    if fraction > largest:
        return f"Another {minutes} of canaries suffice for {percent(fraction / 2)} and {percent(fraction)} of the data."
    return (
        f"Another {minutes} do not suffice for larger fractions than {percent(largest)}. They would only add "
        "replicates."
    )

"""Compares the candidates: which is the cheapest, with its probability. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.decide.canary.forecast import Forecast
from hetero.decide.canary.model import Decision

__all__ = ["CERTAIN", "decide"]

CERTAIN = 0.9
"""Least probability of a candidate that counts as the cheapest."""


def decide(forecasts: Sequence[Forecast]) -> Decision | None:
    """Return which candidate is the cheapest. None for fewer than two candidates.

    Candidates that most probably run out of memory are left out. If the cost of another candidate was refused, nothing
    is decided.
    """
    if len(forecasts) < 2:
        return None
    # Leave out clusters that most probably fail, because they cannot be chosen. One such candidate once made every
    # comparison undecided.
    excluded = [each for each in forecasts if (each.candidate.out_of_memory or 0.0) > 0.5]
    able = [each for each in forecasts if (each.candidate.out_of_memory or 0.0) <= 0.5]
    without_cost = [
        each.candidate.name
        for each in able
        if not len(each.usd) or each.candidate.refused("time") or each.candidate.refused("cost")
    ]
    if without_cost or not able:
        why = f"the cost of {without_cost[0]} has no forecast" if without_cost else "none has enough memory"
        return Decision(cheapest="", probability=0.0, sentence=f"Which cluster is the cheapest is not known: {why}.")
    # Each draw is one possible future. The candidates are compared in each draw, so a share of draws is a probability.
    usd = np.stack([each.usd for each in able])
    # Share of the draws in which each candidate costs the least.
    shares = np.bincount(np.argmin(usd, axis=0), minlength=len(able)) / usd.shape[1]
    best = int(np.argmax(shares))
    name, probability = able[best].candidate.name, float(shares[best])
    about_memory = ""
    if excluded:
        names = ", ".join(each.candidate.name for each in excluded)
        about_memory += f" {names} would most probably run out of memory."
    unknown = [each.candidate.name for each in able if each.candidate.out_of_memory is None]
    if unknown:
        about_memory += f" Whether the memory of {', '.join(unknown)} is enough was not forecast."
    if probability < CERTAIN:
        # Name the two candidates that are the cheapest in the most draws. The intervals of two expensive candidates may
        # overlap too, but such candidates do not decide which one is the cheapest.
        second = int(np.argsort(shares)[-2])
        sentence = (
            f"Which cluster is the cheapest is not decided: {name} with a probability of {probability:.0%}. "
            f"The intervals of {name} and {able[second].candidate.name} overlap.{about_memory}"
        )
        return Decision(cheapest="", probability=probability, sentence=sentence)
    return Decision(
        cheapest=name,
        probability=probability,
        # State at most 99.9 %, because four thousand draws cannot show a probability of 100 %.
        sentence=f"{name} is the cheapest with a probability of {min(probability, 0.999):.1%}.{about_memory}",
    )

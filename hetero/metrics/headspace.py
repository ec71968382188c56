"""How many vCPUs, hosts or slots of endpoints make batches as fast as the accelerators use them.

Everything that answers this question uses this formula: plans, the report of a run, ``--trainer-endpoints auto``, and
the number of data hosts for autoscalers. They only measure the rates in different ways.
"""

from __future__ import annotations

import math

__all__ = ["needed_for_headspace", "number_for_headspace"]


def needed_for_headspace(wanted_per_s: float, made_per_s: float) -> float:
    """Return how many vCPUs, hosts or slots suffice for steps without waits, as a number that need not be whole.

    The result assumes that preprocessing scales with this number.

    Args:
        wanted_per_s: Samples or batches per second that the accelerators use if batches are always ready: those of a
            step / headspace. Both rates may be relative to the same rate.
        made_per_s: Samples or batches per second that one of them makes. Above 0.
    """
    return wanted_per_s / made_per_s


def number_for_headspace(wanted_per_s: float, made_per_s: float) -> int:
    """Return `needed_for_headspace`, rounded up."""
    # Subtract a little, because floating point may turn 160 into 160.00000000000003, which must not become 161.
    return math.ceil(needed_for_headspace(wanted_per_s, made_per_s) - 1e-9)

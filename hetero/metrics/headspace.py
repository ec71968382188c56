"""Computes how many vCPUs, hosts or slots of endpoints make batches as fast as the accelerators use them.

Plans, the report of a run, and the number of data hosts for autoscalers use this formula. They differ in the way that
they measure the two rates.
"""

from __future__ import annotations

import math

__all__ = ["needed_for_headspace", "number_for_headspace"]


def needed_for_headspace(wanted_per_s: float, made_per_s: float) -> float:
    """Return how many vCPUs, hosts or slots suffice for steps without waits. The number need not be whole.

    The result assumes that twice as many vCPUs, hosts or slots make twice as many batches per second.

    Args:
        wanted_per_s: Samples or batches per second that the accelerators use if batches are always ready.
        made_per_s: Samples or batches per second that one vCPU, host or slot makes, above 0. Both rates may have
            another unit if it is the same for both, because only their ratio counts.
    """
    return wanted_per_s / made_per_s


def number_for_headspace(wanted_per_s: float, made_per_s: float) -> int:
    """Return `needed_for_headspace`, rounded up."""
    # Subtract a little, because floating point may turn 160 into 160.00000000000003, which must not become 161.
    return math.ceil(needed_for_headspace(wanted_per_s, made_per_s) - 1e-9)

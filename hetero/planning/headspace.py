"""How many vCPUs or hosts make batches as fast as the accelerators use them.

The planner and the report of a run share this formula. It is a module of its own because launchers write reports and
must not import NumPy, which the planner's model needs.
"""

from __future__ import annotations

import math

__all__ = ["number_for_headspace"]


def number_for_headspace(wanted_per_s: float, made_per_s: float) -> int:
    """Return the number of vCPUs, or of hosts, that suffice for steps without waits.

    The result assumes that preprocessing scales with this number.

    Args:
        wanted_per_s: Samples per second that the accelerators use if batches are always ready: samples of a step /
            headspace. Both rates may be relative to the same rate.
        made_per_s: Samples per second that one vCPU, or one host, makes. Above 0.

    Returns:
        The number, rounded up.
    """
    # Floating point may turn 160 into 160.00000000000003, which must not become 161.
    return math.ceil(wanted_per_s / made_per_s - 1e-9)

"""Limits of this user's open files."""

from __future__ import annotations

import resource

from hetero.doctor.finding import Finding, error, ok, warning
from hetero.doctor.surroundings import Surroundings

__all__ = ["examine"]

_COMFORTABLE = 4096


def examine(surroundings: Surroundings) -> list[Finding]:
    """Compare the limits of open files with the needs of a launcher."""
    from hetero.launch.placement import needed_descriptors  # only here, because it imports gRPC, which may be broken

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_descriptors(max(1, len(surroundings.hosts)))
    bound = float("inf") if hard == resource.RLIM_INFINITY else hard
    found = f"a process may open {_shown(hard)} files ({_shown(soft)} until it raises that)"
    to_do = "raise the hard limit: ulimit -Hn, LimitNOFILE= of a systemd unit, docker run --ulimit nofile=65536"
    details = {"soft": _shown(soft), "hard": _shown(hard), "needed": needed}
    if bound < needed:
        return [error(f"{found}; a launcher needs about {needed} (it would end with HET-24)", to_do, **details)]
    if bound < _COMFORTABLE:
        return [warning(f"{found}; data sets of many files, and jobs of many endpoints, need more", to_do, **details)]
    return [ok(found, **details)]


def _shown(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)

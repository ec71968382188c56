"""The description of the cluster: whether there is one, whether it is valid, and this host's place in it."""

from __future__ import annotations

from hetero.doctor.finding import Finding, error, ok, warning
from hetero.doctor.surroundings import Surroundings

__all__ = ["examine"]


def examine(surroundings: Surroundings) -> list[Finding]:
    """Report what a launcher would read."""
    cluster = surroundings.cluster
    if cluster is not None:
        groups = ", ".join(
            f"{group.name}={group.instance_type or 'unknown type'}:{len(group.hosts)} ({group.role.value})"
            for group in cluster.groups
        )
        return [ok(f"{cluster.current_host} of {groups}, from {cluster.source}")]
    if surroundings.hosts and surroundings.options.cluster_file is not None and surroundings.options.host is None:
        found = f"{len(surroundings.hosts)} hosts are described, and this machine is none of them"
        return [warning(found, "on a host of the cluster say --host NAME; from elsewhere only names and ports count")]
    if surroundings.cluster_problem:
        return [error(surroundings.cluster_problem, "correct the description; hetero launch would end with HET-10")]
    return [ok("none is described here: this machine alone is examined")]

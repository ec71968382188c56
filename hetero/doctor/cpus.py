"""CPUs that this process may use, compared with those of the machine and of the instance type."""

from __future__ import annotations

import os

from hetero.doctor.finding import Finding, ok, warning
from hetero.doctor.surroundings import Surroundings
from hetero.pricing import Catalogue
from hetero.system.cgroups import cpu_quota

__all__ = ["examine"]


def examine(surroundings: Surroundings) -> list[Finding]:
    """Compare the machine's CPUs, the affinity, the quota of the control group, and the catalogue."""
    from hetero.launch.placement import usable_cpus  # only here, because it imports gRPC, which may be broken

    seen, allowed, quota = os.cpu_count() or 1, len(os.sched_getaffinity(0)), cpu_quota()
    usable = usable_cpus()
    details = {"cpus": seen, "affinity": allowed, "quota": quota, "usable": usable}
    found = f"{usable} CPUs are usable: {seen} there, {allowed} by affinity, " + (
        "no quota" if quota is None else f"{quota:g} by the quota of the control group"
    )
    findings = [ok(found, **details)]
    if quota is not None and quota < allowed:
        to_do = (
            f"lift the quota, or start processes by it: libraries that count cores start {allowed} threads where "
            f"{quota:g} run and are held back; hetero itself starts {usable} endpoints"
        )
        findings.append(warning(f"the quota of {quota:g} CPUs is less than the {allowed} cores to be seen", to_do))
    cluster = surroundings.cluster
    if cluster is not None and cluster.current_group.instance_type and not surroundings.is_simulated:
        kind = cluster.current_group.instance_type
        info = Catalogue.load().find(kind)
        if info is not None and info.vcpus is not None and usable < info.vcpus:
            to_do = "check the container's limits, or the instance type in the description of the cluster"
            findings.append(warning(f"{usable} CPUs are usable here, and {kind} has {info.vcpus} vCPUs", to_do))
    return findings

"""Limits of this host: CPUs, open files, and the shared memory of torch's loader workers and NCCL."""

from __future__ import annotations

import os
import resource

from hetero.doctor.snapshot import Snapshot
from hetero.pricing import Catalogue
from hetero.system.cgroups import cpu_quota, usable_cpus
from hetero.system.diagnosis import Diagnosis, error, ok, warning

__all__ = ["SHARED_MEMORY", "examine_cpus", "examine_descriptors", "examine_shared_memory"]

SHARED_MEMORY = "/dev/shm"
_SCARCE_SHARED_BYTES = 512 * 2**20
"""Shared memory counts as scarce below this size, which is enough for eight workers with two batches of 32 MiB each."""
_COMFORTABLE = 4096


def examine_cpus(snapshot: Snapshot) -> list[Diagnosis]:
    """Compare the numbers of CPUs in the machine, the affinity, the control group's quota and the catalogue."""
    seen, allowed, quota = os.cpu_count() or 1, len(os.sched_getaffinity(0)), cpu_quota()
    usable = usable_cpus()
    details = {"cpus": seen, "affinity": allowed, "quota": quota, "usable": usable}
    found = f"{usable} CPUs are usable: {seen} in the machine, {allowed} by affinity, " + (
        "no quota" if quota is None else f"{quota:g} by the quota of the control group"
    )
    diagnoses = [ok(found, **details)]
    if quota is not None and quota < allowed:
        to_do = (
            f"raise the quota, or limit the threads of libraries: those that count cores start {allowed} threads, "
            f"which the quota of {quota:g} slows down; hetero starts {usable} endpoints"
        )
        diagnoses.append(warning(f"the quota of {quota:g} CPUs is less than the {allowed} visible cores", to_do))
    cluster = snapshot.cluster
    if cluster is not None and cluster.current_group.instance_type and not snapshot.is_simulated:
        kind = cluster.current_group.instance_type
        info = Catalogue.load().find(kind)
        if info is not None and info.vcpus is not None and usable < info.vcpus:
            to_do = "check the container's limits, or the instance type in the description of the cluster"
            diagnoses.append(warning(f"{usable} CPUs are usable here, and {kind} has {info.vcpus} vCPUs", to_do))
    return diagnoses


def examine_descriptors(snapshot: Snapshot) -> list[Diagnosis]:
    """Compare the limits of open files with the number that a launcher needs."""
    from hetero.launch.placement import needed_descriptors  # only here, because it imports gRPC, which may be broken

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = needed_descriptors(max(1, len(snapshot.hosts)))
    bound = float("inf") if hard == resource.RLIM_INFINITY else hard
    found = f"a process may open {_shown(hard)} files ({_shown(soft)} before it raises its limit)"
    to_do = "raise the hard limit: ulimit -Hn, LimitNOFILE= of a systemd unit, docker run --ulimit nofile=65536"
    details = {"soft": _shown(soft), "hard": _shown(hard), "needed": needed}
    if bound < needed:
        return [error(f"{found}; a launcher needs about {needed} (it would end with HET-24)", to_do, **details)]
    if bound < _COMFORTABLE:
        return [warning(f"{found}; data sets of many files, and jobs of many endpoints, need more", to_do, **details)]
    return [ok(found, **details)]


def _shown(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def examine_shared_memory(snapshot: Snapshot) -> list[Diagnosis]:
    """Check the size and the free space of shared memory."""
    del snapshot
    to_do = "give the container more shared memory: docker run --shm-size=8g, or --ipc=host"
    try:
        facts = os.statvfs(SHARED_MEMORY)
    except OSError as problem:
        return [error(f"there is no {SHARED_MEMORY} ({problem.strerror}): torch's loader workers and NCCL fail", to_do)]
    room, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    found = f"{SHARED_MEMORY} has {_mib(room)}, {_mib(free)} of it free"
    details = {"bytes": room, "free_bytes": free}
    if not os.access(SHARED_MEMORY, os.W_OK):
        return [error(f"{SHARED_MEMORY} cannot be written to: torch's loader workers and NCCL fail", to_do, **details)]
    if room < _SCARCE_SHARED_BYTES:
        hint = " (64 MiB is Docker's default)" if room == 64 * 2**20 else ""
        why = "a homogeneous job's loader workers, or NCCL, may run out of it"
        return [warning(f"{found}{hint}: {why}", to_do, **details)]
    if free < _SCARCE_SHARED_BYTES:
        to_do = f"remove the files in {SHARED_MEMORY} that no process uses"
        return [warning(f"{found}: it is nearly full", to_do, **details)]
    return [ok(found, **details)]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"

"""Limits of this host: CPUs, open files, shared memory, the memory of endpoints, and folders that a job writes to."""

from __future__ import annotations

import os
import resource
import tempfile
from collections import defaultdict
from pathlib import Path

from hetero.cache.folders import kept_in_memory
from hetero.doctor.leftovers import find_processes
from hetero.doctor.snapshot import Snapshot
from hetero.documents.diagnosis import Diagnosis, error, ok, warning
from hetero.documents.quantities import bytes_text
from hetero.errors import ConfigError
from hetero.pricing import Catalogue
from hetero.system.cgroups import cpu_quota, usable_cpus
from hetero.system.memory import ProcessMemory, process_memory
from hetero.system.workdir import private_folder

__all__ = ["examine_cpus", "examine_descriptors", "examine_disk", "examine_memory", "examine_shared_memory"]

SHARED_MEMORY = "/dev/shm"
_SCARCE_SHARED_BYTES = 512 * 2**20
"""Free shared memory is scarce below this size. It is enough for eight workers with two batches of 32 MiB each."""
_LEAST_BYTES = 64 * 2**20
"""Below it, logs and reports may not fit. tests/doctor/test_limits.py has a file system of 1 MiB, which is an error."""


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
    # Simulated hosts share this machine, so its CPUs are not those of their types.
    if cluster is not None and cluster.current_group.instance_type and not snapshot.is_simulated:
        instance_type = cluster.current_group.instance_type
        info = Catalogue.load().find(instance_type)
        if info is not None and info.vcpus is not None and usable < info.vcpus:
            to_do = "check the container's limits, or the instance type in the description of the cluster"
            diagnoses.append(
                warning(f"{usable} CPUs are usable here, and {instance_type} has {info.vcpus} vCPUs", to_do)
            )
    return diagnoses


def examine_descriptors(snapshot: Snapshot) -> list[Diagnosis]:
    """Compare the limits of open files with the number that a launcher needs."""
    # Imported only here, because this module imports gRPC, which may be broken.
    from hetero.launch.placement import needed_descriptors

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Without a description of a cluster, the job has one host.
    needed = needed_descriptors(max(1, len(snapshot.hosts)))
    found = f"a process may open {_shown(hard)} files ({_shown(soft)} before it raises its limit)"
    to_do = "raise the hard limit: ulimit -Hn, LimitNOFILE= of a systemd unit, docker run --ulimit nofile=65536"
    details = {"soft": _shown(soft), "hard": _shown(hard), "needed": needed}
    if hard != resource.RLIM_INFINITY and hard < needed:
        return [error(f"{found}; a launcher needs about {needed} (it would end with HET-24)", to_do, **details)]
    return [ok(found, **details)]


def _shown(limit: int) -> str:
    """Return the number of files in words that follow "may open"."""
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def examine_shared_memory(_snapshot: Snapshot) -> list[Diagnosis]:
    """Check the size and the free space of shared memory."""
    to_do = "give the container more shared memory: docker run --shm-size=8g, or --ipc=host"
    try:
        facts = os.statvfs(SHARED_MEMORY)
    except OSError as problem:
        return [error(f"there is no {SHARED_MEMORY} ({problem.strerror}): torch's loader workers and NCCL fail", to_do)]
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    found = f"{SHARED_MEMORY} has {bytes_text(size)}, {bytes_text(free)} of it free"
    details = {"bytes": size, "free_bytes": free}
    if not os.access(SHARED_MEMORY, os.W_OK):
        return [error(f"{SHARED_MEMORY} cannot be written to: torch's loader workers and NCCL fail", to_do, **details)]
    if free < _SCARCE_SHARED_BYTES:
        to_do += f"; or remove the files in {SHARED_MEMORY} that no process uses"
        return [warning(f"{found}: a homogeneous job's loader workers, or NCCL, may run out of it", to_do, **details)]
    return [ok(found, **details)]


def examine_memory(_snapshot: Snapshot) -> list[Diagnosis]:
    """Report the memory of the endpoints of each job, and of caches of samples in ``/dev/shm``."""
    by_job: dict[str, list[ProcessMemory]] = defaultdict(list)
    for process in find_processes():
        if process.kind == "endpoint" and (memory := process_memory(Path(f"/proc/{process.pid}"))) is not None:
            by_job[process.job_id].append(memory)
    diagnoses = []
    for job, memories in sorted(by_job.items()):
        # The endpoints of a job share the same memory, so count it once.
        private, shared = sum(each.private_bytes for each in memories), max(each.shared_bytes for each in memories)
        largest = max(each.private_bytes for each in memories)
        found = (
            f"endpoints{f' of the job {job}' if job else ''}: {len(memories)} processes have {bytes_text(private)} of "
            f"private memory, at most {bytes_text(largest)} in one of them, and share {bytes_text(shared)}"
        )
        diagnoses.append(ok(found, private_bytes=private, largest_private_bytes=largest, shared_bytes=shared))
    if cached := kept_in_memory():
        diagnoses.append(ok(f"samples that data sets have kept in memory take {bytes_text(cached)}", kept_bytes=cached))
    return diagnoses or [ok("no endpoint runs here")]


def examine_disk(snapshot: Snapshot) -> list[Diagnosis]:
    """Write to the folder for temporary files and to the platform's folders, and check their free space."""
    folders, output_dir = snapshot.platform.folders, snapshot.options.output_dir
    contents = {
        folders.failure.parent: "the failure file and the report",
        folders.model: "the model",
        folders.checkpoints: "checkpoints",
    }
    if output_dir is not None:
        contents[output_dir.absolute()] = "the report (--output-dir)"
    diagnoses = [_examine_folder(folder, what) for folder, what in contents.items() if folder.is_dir()]
    return [_examine_temporary(), *diagnoses]


def _examine_temporary() -> Diagnosis:
    """Make a folder as a launcher does, because some file systems cannot make a folder private to one user."""
    folder = Path(tempfile.gettempdir())
    try:
        with private_folder("hetero-doctor-"):
            return _examine_folder(folder, "temporary files")
    except (ConfigError, OSError) as problem:
        to_do = "set TMPDIR to a folder of this user on a local disk with free space"
        return error(f"cannot make a private folder in {folder}: {problem}", to_do)


def _examine_folder(folder: Path, what: str) -> Diagnosis:
    """Return whether a folder can be written to and has enough free space.

    Args:
        folder: The folder, which exists.
        what: What a job writes to the folder.
    """
    facts = os.statvfs(folder)
    free = facts.f_bavail * facts.f_frsize
    details = {"folder": str(folder), "free_bytes": free}
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError:
        to_do = f"give this user the right to write to {folder}"
        return error(f"{folder} ({what}) cannot be written to", to_do, **details)
    found = f"{folder} ({what}) has {bytes_text(free)} free"
    if free < _LEAST_BYTES:
        to_do = f"free space on the file system of {folder}, or give the host a larger volume"
        return error(f"{found}: a job would end with HET-24, or lose its checkpoint", to_do, **details)
    return ok(found, **details)

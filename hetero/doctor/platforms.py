"""Checks what a platform does that a job depends on: how it ends jobs, what it loses, its names and its ports."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

from hetero.doctor.diagnosis import Diagnosis, ok, warning
from hetero.doctor.snapshot import Snapshot
from hetero.errors import ClusterError

__all__ = ["examine"]

_TIMEOUT_S = 3.0
_GRACE_S = 50.0
"""Seconds that ranks get to save a checkpoint where the platform gives enough."""
_NO_KILL = re.compile(r"^#SBATCH\s.*(--no-kill|-k\b)", re.MULTILINE)
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*([0-9]+)", re.MULTILINE)
_SCHEDULER = re.compile(r"^SchedulerParameters\s*=\s*(.*)$", re.MULTILINE)


def examine(snapshot: Snapshot) -> list[Diagnosis]:
    """Report the platform and what is special about this job on it."""
    platform = snapshot.platform
    if not platform.is_here():
        return [ok("no job of a platform runs here")]
    check = _CHECKS.get(platform.name)
    found = [] if check is None else list(check(snapshot))
    return [ok(f"{platform.name}, which gives a job {platform.kill_after_s:.0f} s to stop"), *found]


def _slurm(snapshot: Snapshot) -> Iterator[Diagnosis]:
    config = _output("scontrol", "show", "config")
    wait = _KILL_WAIT.search(config)
    if wait is not None and float(wait[1]) / 2 < _GRACE_S:
        yield warning(
            f"KillWait of this site is {wait[1]} s, so after scancel ranks have {float(wait[1]) / 2:.0f} s to save",
            "end jobs with scancel --signal=TERM first, or save checkpoints during the training",
        )
    parameters = _SCHEDULER.search(config)
    is_heterogeneous = snapshot.environ.get("SLURM_HET_SIZE", "1") != "1"
    if is_heterogeneous and parameters is not None and "disable_hetero_steps" in parameters[1]:
        yield warning(
            "this site has disable_hetero_steps, so one srun cannot start several components",
            "start one srun for each component: hetero render slurm --separate-steps",
        )
    script = _output("scontrol", "write", "batch_script", snapshot.environ.get("SLURM_JOB_ID", ""), "-")
    if script and _NO_KILL.search(script) is None:
        yield warning(
            "the batch script has no --no-kill, so the loss of a data node ends the whole job",
            "add #SBATCH --no-kill to each component, as hetero render slurm does",
        )


def _kubernetes(snapshot: Snapshot) -> Iterator[Diagnosis]:
    if "HETERO_GRACE_S" not in snapshot.environ:
        yield warning(
            "HETERO_GRACE_S is not set, so ranks have half of Kubernetes' 30 s to save a checkpoint",
            "set it to terminationGracePeriodSeconds of the pod, as hetero render does",
        )
    own = snapshot.own_host
    if own is not None and "." not in own:
        yield warning(
            f"the name {own} of this pod has no subdomain, so other pods cannot resolve it",
            "give the job a headless service: enableDNSHostnames of a JobSet, the plugin svc of Volcano",
        )


def _vertex(snapshot: Snapshot) -> Iterator[Diagnosis]:
    yield warning(
        f"Vertex AI does not document which ports are open between replicas; hetero needs {snapshot.options.port}, and "
        "ports that endpoints choose",
        "see whether the ports below are reached; otherwise give the job a VPC network",
    )


def _aws_batch(snapshot: Snapshot) -> Iterator[Diagnosis]:
    try:
        registration = snapshot.platform.registration()
    except ClusterError:
        return  # the description of the cluster is examined apart
    if registration is None:
        return
    main = registration.main_address
    where = f"with the main node {main}" if main else "with this node, the main node"
    yield ok(f"a node of group {registration.group}; {registration.num_hosts} nodes register {where}")


def _output(*command: str) -> str:
    """Return what a program of the platform writes. Empty if it is not there, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return done.stdout if done.returncode == 0 else ""


_CHECKS: dict[str, Callable[[Snapshot], Iterator[Diagnosis]]] = {
    "slurm": _slurm,
    "jobset": _kubernetes,
    "trainjob": _kubernetes,
    "volcano": _kubernetes,
    "vertex": _vertex,
    "aws-batch": _aws_batch,
}

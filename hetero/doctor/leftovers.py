"""Finds what earlier runs left behind: processes and a failure file."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetero.doctor.snapshot import Snapshot
from hetero.documents.diagnosis import Diagnosis, ok, warning
from hetero.documents.text import listing

__all__ = ["OwnProcess", "examine", "find_processes"]

_MODULES = {
    "hetero.cli": "launcher",
    "hetero.endpoint.endpoint": "endpoint",
    "hetero.pool.fork_server": "endpoint",
    "hetero.launch.ranks.agent": "ranks",
    "hetero.launch.ranks.rank": "ranks",
    "hetero.pool.tf_server": "server of tf.data.service",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProcess:
    """A process of hetero."""

    pid: int
    ancestors: frozenset[int]
    owner_pid: int
    """Process id of another Python program that started this one, directly or by others of hetero. 0 for none."""
    kind: str
    job_id: str
    """Id of the process's job. Empty if this user cannot see it."""


def examine(snapshot: Snapshot) -> list[Diagnosis]:
    """Report processes and a failure file that a killed run left behind. Remove nothing."""
    diagnoses = [*_processes(), *_failure(snapshot)]
    return diagnoses or [ok("no process or failure file of an earlier run is here")]


def find_processes() -> list[OwnProcess]:
    """Return hetero's processes that this user may see, except this one."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        kind = _kind(process.info["cmdline"] or [])
        if kind and process.pid != os.getpid():
            ancestors, owner_pid, job = frozenset[int](), 0, ""
            # The owner is a training script that started the process without a launcher, see `_owner_pid`. If the
            # process has ended meanwhile, or belongs to another user, some of these facts are not known.
            with contextlib.suppress(psutil.Error, OSError):
                parents = process.parents()
                ancestors = frozenset(parent.pid for parent in parents)
                owner_pid = _owner_pid([(parent.pid, parent.cmdline()) for parent in parents])
                job = process.environ().get("HETERO_JOB_ID", "")
            found.append(OwnProcess(pid=process.pid, ancestors=ancestors, owner_pid=owner_pid, kind=kind, job_id=job))
    return found


def _owner_pid(parents: Iterable[tuple[int, list[str]]]) -> int:
    """Return the process id of the nearest ancestor that is not hetero's, if it is a Python program, otherwise 0.

    A Python program with endpoints is a training script that started them without a launcher. If a launcher has ended,
    the parent of its children is the first process of the host or container, which is rarely Python.

    Args:
        parents: Process id and command line of each ancestor, the parent first.
    """
    for pid, command in parents:
        if not _kind(command):
            return pid if _is_python(command) else 0
    return 0


def _kind(command: list[str]) -> str:
    """Return the kind of process that a command line starts, or an empty text if it is not hetero's."""
    for word, following in itertools.pairwise(command):
        if word == "-m" and following in _MODULES:
            kind = _MODULES[following]
            # The module of the command line runs all commands. Only `launch` is a launcher.
            return kind if kind != "launcher" or "launch" in command else ""
        if Path(word).name == "hetero" and following == "launch":
            return "launcher"
    # An editor that has the file open is not a launcher.
    is_launcher = _is_python(command) and any(Path(word).name.endswith("launcher.py") for word in command[:4])
    return "launcher" if is_launcher else ""


def _is_python(command: list[str]) -> bool:
    return Path(command[0] if command else "").name.startswith("python")


def _processes() -> Iterator[Diagnosis]:
    """Yield a warning for each group of hetero's processes that runs on this host."""
    processes = find_processes()
    launchers = {process.pid for process in processes if process.kind == "launcher"}
    for job, pids in _by_job(process for process in processes if process.pid in launchers).items():
        found = f"a launcher runs here: process {listing(pids)}{job}"
        yield warning(found, "keep it if it belongs to this job; otherwise kill it, which also ends its children")
    # Children of a launcher that runs belong to its line above.
    others = [each for each in processes if each.pid not in launchers and not each.ancestors & launchers]
    # Do not advise to kill processes of a program that runs. The advice once was to kill 8 of the 17 endpoints of a
    # training that ran. Processes without such a program have the owner 0.
    for owner_pid in sorted({each.owner_pid for each in others} - {0}):
        pids = [each.pid for each in others if each.owner_pid == owner_pid]
        found = f"a Python program reads data here: process {owner_pid}, with the processes {listing(pids)}"
        yield warning(found, "keep it if it belongs to this job; otherwise kill it, which also ends the others")
    for job, pids in _by_job(each for each in others if not each.owner_pid).items():
        yield warning(f"processes without their launcher: {listing(pids)}{job}", f"kill {' '.join(map(str, pids))}")


def _by_job(processes: Iterable[OwnProcess]) -> dict[str, list[int]]:
    """Return process ids by job. A key is the text that names the job in a sentence, empty for an unknown job."""
    found: dict[str, list[int]] = {}
    for process in processes:
        found.setdefault(f" of the job {process.job_id}" if process.job_id else "", []).append(process.pid)
    return found


def _failure(snapshot: Snapshot) -> Iterator[Diagnosis]:
    """Yield a warning if the failure file of an earlier run is still there."""
    path = snapshot.platform.folders.failure
    if path.is_file():
        found = f"a failure file of an earlier run exists: {path}"
        yield warning(found, "remove it, because the platform shows it as the reason if a job fails without one")

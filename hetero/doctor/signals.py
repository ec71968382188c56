"""Checks whether a request to stop reaches a launcher. The platform sends SIGTERM only to the container's process 1.

Every process between process 1 and the launcher must forward the signal. Shells do not forward it while they wait for a
child, and neither does the entry point of SageMaker's stock images. The kernel drops a SIGTERM to a process 1 that has
no handler.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from hetero.doctor.leftovers import find_processes
from hetero.doctor.snapshot import Snapshot
from hetero.documents.diagnosis import Diagnosis, Level, error, ok, warning

__all__ = ["ProcessFacts", "ancestry", "examine", "judge"]

_MACHINE_INITS = {"systemd", "init", "launchd", "openrc-init", "runit", "upstart"}
_FORWARDING_PROGRAMS = {
    "catatonit", "conmon", "docker-init", "dumb-init", "mpirun", "orted", "prted", "prterun", "s6-svscan", "tini",
    "tini-static",
}  # fmt: skip
_SHELLS = {"ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"}
_INTERPRETER = "python"
_SIGTERM_BIT = 1 << (signal.SIGTERM - 1)
"""The bit of SIGTERM in the masks of ``/proc/PID/status``, see proc(5)."""
_ADVICE = (
    "make the launcher process 1 (a container's entry point, or exec in a script), or start it with an init that "
    "forwards signals (docker run --init); until then a stop kills the job without running @hetero.on_stop, so write "
    "checkpoints often"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process, and how it handles SIGTERM, as ``/proc`` reports it."""

    pid: int
    command: tuple[str, ...]
    catches: bool
    ignores: bool
    blocks: bool

    @property
    def program(self) -> str:
        """Name of the program. For an interpreter that runs a script, the name of the script."""
        names = [PurePath(word).name for word in self.command] or [""]
        # With -c, the code is in the command line and lacks a name.
        if names[0].startswith(_INTERPRETER) and "-c" not in names[1:2]:
            return next((name for name in names[1:] if name and not name.startswith("-")), names[0])
        # The name of a login shell begins with a dash.
        return names[0].lstrip("-")

    @property
    def is_toolkit(self) -> bool:
        """Whether this is the entry point of SageMaker's stock images."""
        return self.program == "train" or any("sagemaker_training" in word for word in self.command)

    def __str__(self) -> str:
        return f"process {self.pid} ({self.program})"


def examine(snapshot: Snapshot) -> list[Diagnosis]:
    """Check whether a SIGTERM to process 1 reaches the launcher of the job that runs here.

    If no job or several jobs run here, check whether the signal would reach a launcher that is started from here.
    """
    launchers = [process for process in find_processes() if process.kind == "launcher"]
    jobs = {process.job_id for process in launchers}
    # The platform's torchrun or mpirun may start several launchers of one job. A signal reaches all of them in the same
    # way, so examine one of them. The launchers of several jobs may have different answers, so examine none of them.
    pid = min(process.pid for process in launchers) if len(jobs) == 1 else os.getpid()
    is_job = snapshot.cluster is not None
    of_this_process = judge(ancestry(os.getpid()), is_launcher=False, is_job=is_job)
    # The launcher may have ended meanwhile. Then its chain is empty.
    chain = ancestry(pid)
    if pid == os.getpid() or not chain:
        return of_this_process
    # The job's launcher runs already, so it does not matter whether signals reach this process. Report only errors: a
    # launcher that is started from here would inherit a blocked SIGTERM.
    errors = [diagnosis for diagnosis in of_this_process if diagnosis.level is Level.ERROR]
    return [*judge(chain, is_launcher=True, is_job=is_job), *errors]


def ancestry(pid: int) -> list[ProcessFacts]:
    """Return a process and its visible ancestors, the process itself last."""
    chain: list[ProcessFacts] = []
    while pid > 0:
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            command = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        # The kernel writes the signals that a process catches, ignores and blocks as bits of hexadecimal numbers.
        catches, ignores, blocks = (bool(int(fields[key], 16) & _SIGTERM_BIT) for key in ("SigCgt", "SigIgn", "SigBlk"))
        # Threads of the kernel lack a command line.
        words = tuple(command.rstrip("\0").split("\0")) if command else (fields["Name"].strip(),)
        chain.insert(0, ProcessFacts(pid=pid, command=words, catches=catches, ignores=ignores, blocks=blocks))
        pid = int(fields["PPid"])
    return chain


def judge(chain: Sequence[ProcessFacts], *, is_launcher: bool, is_job: bool) -> list[Diagnosis]:
    """Return diagnoses on whether a SIGTERM to process 1 reaches the last process of a chain.

    Args:
        chain: The first visible ancestor, its child, and so on until the process that must receive the signal.
        is_launcher: Whether the last process is a launcher. If not, it is this examination, which was started as a
            launcher would be started.
        is_job: Whether this host belongs to a job, which a lost SIGTERM would harm.
    """
    *ancestors, last = chain
    who = f"the launcher (process {last.pid})" if is_launcher else "a launcher that is started like this"
    path = " > ".join(f"{facts.program} {facts.pid}" for facts in chain)
    if last.blocks:
        to_do = "unblock SIGTERM in the program that starts it (sigprocmask), because processes inherit blocked signals"
        return [error(f"SIGTERM is blocked in {last}, so {who} never receives it", to_do, path=path)]
    if not ancestors and last.pid == 1:
        return [ok(f"{who} is process 1 and receives SIGTERM directly", path=path)]
    first = chain[0]
    # The parent of a process that was started in a container from outside is not visible there.
    if first.pid != 1:
        found = f"{who} was started beside process 1 (docker exec, nsenter), so signals to process 1 do not reach it"
        return [ok(found, path=path)]
    if first.program in _MACHINE_INITS:
        found = f"process 1 is {first.program}, so this is a whole machine: to stop {who}, signal it directly ({path})"
        return [ok(found, path=path)]
    obstacles = [words for facts in ancestors if (words := _obstacle(facts))]
    if not obstacles:
        return [ok(f"SIGTERM to process 1 is forwarded to {who} ({path})", path=path)]
    if not is_job:
        return [ok(f"no job is described here, so process 1 need not forward a stop ({path})", path=path)]
    found = f"SIGTERM to process 1 may not reach {who} ({path}): {'; '.join(obstacles)}"
    return [warning(found, _ADVICE, path=path)]


def _obstacle(facts: ProcessFacts) -> str:
    """Return why a process does not forward SIGTERM, or an empty text if it does."""
    # Check the name before the handling of signals, because it is known how programs with these names behave.
    if facts.program in _FORWARDING_PROGRAMS:
        return ""
    if facts.is_toolkit:
        return f"{facts} is the platform's toolkit, which forwards no signals"
    # Without a handler, the signal ends any process except process 1.
    if facts.pid == 1 and not facts.catches:
        return f"{facts} has no handler for it, and the kernel drops it"
    if facts.ignores:
        return f"{facts} ignores it"
    if facts.program in _SHELLS:
        return f"{facts} is a shell, which waits for its child"
    # A launcher forwards the signal to its children, which may be another launcher.
    if facts.program == "hetero" or facts.program.endswith("launcher.py"):
        return ""
    return f"it is not known whether {facts} forwards it"

"""Whether a request to stop reaches a launcher. The platform sends SIGTERM only to process 1 of the container.

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

from hetero.doctor.finding import Finding, Level, error, ok, warning
from hetero.doctor.leftovers import find_processes
from hetero.doctor.surroundings import Surroundings

__all__ = ["ProcessFacts", "ancestry", "examine", "judge"]

_MACHINE = {"systemd", "init", "launchd", "openrc-init", "runit", "upstart"}
_FORWARDING = {
    "catatonit", "conmon", "docker-init", "dumb-init", "mpirun", "orted", "prted", "prterun", "s6-svscan", "tini",
    "tini-static",
}  # fmt: skip
_SHELLS = {"ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh"}
_INTERPRETER = "python"
_BIT = 1 << (signal.SIGTERM - 1)
_ADVICE = (
    "make the launcher process 1 (a container's entry point, or exec in a script), or put an init that hands signals "
    "on before it (docker run --init); until then a stop is a SIGKILL: no @hetero.on_stop runs, so write checkpoints "
    "often"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What ``/proc`` reports about a process and SIGTERM."""

    pid: int
    command: tuple[str, ...]
    catches: bool
    ignores: bool
    blocks: bool

    @property
    def program(self) -> str:
        """Name of the program. For an interpreter that runs a script, the name of the script."""
        names = [PurePath(word).name for word in self.command] or [""]
        if names[0].startswith(_INTERPRETER) and "-c" not in names[1:2]:
            return next((name for name in names[1:] if name and not name.startswith("-")), names[0])
        return names[0].lstrip("-")

    @property
    def is_toolkit(self) -> bool:
        """Whether this is the entry point of SageMaker's stock images."""
        return self.program == "train" or any("sagemaker_training" in word for word in self.command)

    def __str__(self) -> str:
        return f"process {self.pid} ({self.program})"


def examine(surroundings: Surroundings) -> list[Finding]:
    """Check the processes from process 1 to the launcher that runs here, or to this process if there is none."""
    launchers = [process for process in find_processes() if process.kind == "launcher"]
    jobs = {process.job_id for process in launchers}
    # A torchrun or mpirun of the platform starts copies of one launcher. Several jobs mean: no host of a platform.
    pid = min(process.pid for process in launchers) if len(jobs) == 1 else os.getpid()
    is_job = surroundings.cluster is not None
    own = judge(ancestry(os.getpid()), is_launcher=False, is_job=is_job)
    if pid == os.getpid():
        return own
    chain = ancestry(pid)
    found = judge(chain, is_launcher=True, is_job=is_job) if chain else []  # the process may have ended meanwhile
    return [*found, *(finding for finding in own if finding.level is Level.ERROR or not found)]


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
        masks = {name: bool(int(fields[name], 16) & _BIT) for name in ("SigCgt", "SigIgn", "SigBlk")}
        words = tuple(command.rstrip("\0").split("\0")) if command else (fields["Name"].strip(),)
        facts = ProcessFacts(
            pid=pid, command=words, catches=masks["SigCgt"], ignores=masks["SigIgn"], blocks=masks["SigBlk"]
        )
        chain.insert(0, facts)
        pid = int(fields["PPid"])
    return chain


def judge(chain: Sequence[ProcessFacts], *, is_launcher: bool, is_job: bool) -> list[Finding]:
    """Return findings on whether a SIGTERM to process 1 arrives.

    Args:
        chain: Processes from the first visible ancestor to the process in question.
        is_launcher: Whether that process is a launcher. If not, it is this examination, which runs in its place.
        is_job: Whether there is a job that would lose something.
    """
    *between, last = chain
    who = f"the launcher, process {last.pid}," if is_launcher else "what is started like this"
    path = " > ".join(f"{facts.program} {facts.pid}" for facts in chain)
    if last.blocks:
        to_do = "have whatever starts it unblock SIGTERM (sigprocmask): processes inherit what is blocked"
        return [error(f"SIGTERM is blocked in {last}, so {who} never sees it", to_do, path=path)]
    if not between and last.pid == 1:
        return [ok(f"{who} is process 1: SIGTERM comes to it directly", path=path)]
    first = chain[0]
    if first.pid != 1:
        found = f"{who} was started beside process 1 (docker exec, nsenter): signals to that one do not come here"
        return [ok(found, path=path)]
    if first.program in _MACHINE:
        found = f"process 1 is {first.program}, a machine's: whoever stops {who} has to signal it ({path})"
        return [ok(found, path=path)]
    obstacles = [words for facts in between if (words := _obstacle(facts))]
    if not obstacles:
        return [ok(f"SIGTERM to process 1 is handed on to {who} ({path})", path=path)]
    if not is_job:
        return [ok(f"no job is described here that process 1 would have to tell of a stop ({path})", path=path)]
    found = f"SIGTERM to process 1 does not surely reach {who} ({path}): {'; '.join(obstacles)}"
    return [warning(found, _ADVICE, path=path)]


def _obstacle(facts: ProcessFacts) -> str:
    """Return why a process does not forward SIGTERM, or an empty text if it does."""
    if facts.program in _FORWARDING:
        return ""
    if facts.is_toolkit:
        return f"{facts} is the platform's toolkit, which hands no signals on"
    if facts.pid == 1 and not facts.catches:
        return f"{facts} has no handler for it, and the kernel drops it"
    if facts.ignores:
        return f"{facts} ignores it"
    if facts.program in _SHELLS:
        return f"{facts} is a shell, which waits for its child"
    if facts.program == "hetero" or facts.program.endswith("launcher.py"):
        return ""
    return f"whether {facts} hands it on is not known"

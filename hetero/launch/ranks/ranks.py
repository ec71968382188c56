"""The ranks of one trainer host, which `hetero.launch.ranks.agent` starts as a child of the launcher."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from hetero.control.rank.variables import RESTART_VARIABLE
from hetero.control.status import Cause
from hetero.errors import PortError
from hetero.launch.ranks.agent import FAILURES_FILE, RANKS_FILE
from hetero.launch.ranks.frameworks import RANK_FRAMEWORKS
from hetero.launch.ranks.rank import LOG_VARIABLE
from hetero.launch.ranks.rank_folder import RankFolder
from hetero.launch.ranks.starter import RanksOptions, RankStarter
from hetero.system.line_relay import LineRelay
from hetero.system.process import PARENT_VARIABLE, is_resource_tracker, kill_all
from hetero.system.scripts import script_words
from hetero.system.waits import END_TIMEOUT_S

__all__ = ["AgentStarter", "RankProcesses", "free_port"]

_AGENT = "rank agent"
"""Name of the agent in messages."""

logger = logging.getLogger(__name__)


class AgentStarter(RankStarter):
    """Starts ranks with the agent.

    Args:
        framework: Training framework of the ranks, a key of `RANK_FRAMEWORKS`.
    """

    def __init__(self, framework: str) -> None:
        self._framework = RANK_FRAMEWORKS[framework]

    def obstacle(self, *, is_trainer: bool, job_restarts: int) -> str:
        """Return why ranks cannot be started on this host, and what to do. Empty if they can be started."""
        return self._framework.obstacle() if is_trainer else ""

    def poll(self) -> None:
        """Do nothing, because the ranks do not exist before `start`."""

    def meeting_hosts(self, trainer_hosts: Sequence[str], ports: Mapping[str, int] | None = None) -> Sequence[str]:
        """Return the trainer hosts where ranks listen."""
        return trainer_hosts if self._framework.meets_everywhere else trainer_hosts[:1]

    def num_ports(self, host: str, trainer_hosts: Sequence[str], num_ranks: int) -> int:
        """Return how many consecutive ports the ranks listen on at ``host``."""
        if host not in self.meeting_hosts(trainer_hosts):
            return 0
        return num_ranks if self._framework.meets_everywhere else 1

    def start(self, options: RanksOptions, *, host: str, relay: LineRelay, run_dir: Path) -> RankProcesses:
        """Start the agent, which starts the ranks."""
        logger.info("starting %d of %d ranks", options.num_ranks, options.num_ranks * options.num_hosts)
        return RankProcesses(options, host=host, relay=relay, run_dir=run_dir)


class RankProcesses:
    """Starts, watches and ends the ranks of this host.

    Create it on the main thread, because the parent-death signal fires when the thread that started the child ends.

    Args:
        options: Options of the ranks.
        host: This host's name, for causes.
        relay: Receives the output of the agent and of the ranks, with one source for each.
        run_dir: Private folder of this launcher.
    """

    def __init__(self, options: RanksOptions, *, host: str, relay: LineRelay, run_dir: Path) -> None:
        first_rank = options.host_index * options.num_ranks
        ranks = range(first_rank, first_rank + options.num_ranks)
        self._folder = RankFolder(run_dir / f"ranks-{options.generation}", ranks, host=host, relay=relay)
        environ = {
            # Without this default, every rank would start as many threads as the host has CPUs. A value of the user
            # replaces it.
            "OMP_NUM_THREADS": str(max(1, options.num_cpus // options.num_ranks)),
            **os.environ,
            **options.environment,
            PARENT_VARIABLE: str(os.getpid()),
            LOG_VARIABLE: self._folder.log_prefix,
            RESTART_VARIABLE: str(options.generation),
            # The last lines of a killed rank must not stay in its buffer.
            "PYTHONUNBUFFERED": "1",
        }
        framework = RANK_FRAMEWORKS[options.framework]
        variables = [framework.variables(options, local_rank, environ) for local_rank in range(options.num_ranks)]
        # The agent reads the variables from a file. An argument may have at most 128 KiB, but TF_CONFIG lists all ranks
        # of the job.
        (self._folder.path / RANKS_FILE).write_text(json.dumps(variables), encoding="utf-8")
        script = script_words(options.script, is_module=options.is_module)
        command = [sys.executable, "-m", "hetero.launch.ranks.agent", str(self._folder.path)]
        self._process = relay.start(_AGENT, [*command, *script, *options.script_args], env=environ)

    @property
    def pid(self) -> int:
        """Process id of the agent, which starts the ranks."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the agent's exit status, None while it runs."""
        return self._process.poll()

    def cause(self, reported: Mapping[int, Cause]) -> Cause:
        """Return why the ranks failed. Call it after `poll` returned a status other than 0.

        Args:
            reported: The causes that ranks reported before they ended, by rank.
        """
        failures = self._failures()
        # The agent has written no failure of a rank, so the agent itself was killed or has failed.
        if not failures:
            # `poll` has returned a status other than 0 already. `or 1` is only for the type.
            return self._folder.describe(_AGENT, self._process.poll() or 1)
        return self._folder.root(failures, reported)

    def kill(self) -> None:
        """Kill the agent, the ranks and everything that they started. Idempotent.

        A process that cannot be killed, for example because it waits for a device, is logged after 5 s and left alone.
        """
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # The ranks die with the agent.
                os.killpg(self._process.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + END_TIMEOUT_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        while living := self._living():
            kill_all(living)
            without_agent = [process for process in living if process.pid != self._process.pid]
            # Do not wait for the agent here, because psutil would take the agent's exit status.
            psutil.wait_procs(without_agent, timeout=0.05)
            # SIGKILL does not end a process that waits for a device. Without this bound, the launcher waited until its
            # watchdog ended it.
            if time.monotonic() > deadline_s:
                names = ", ".join(map(self._name_of, living))
                logger.error(
                    "not ended %.0f s after SIGKILL: %s; continuing without waiting for them", END_TIMEOUT_S, names
                )
                break
        self._folder.close()

    def _living(self) -> list[psutil.Process]:
        """Return the living processes among the agent, the ranks and their children.

        The ranks and their children are identified by `LOG_VARIABLE`, which they inherit.
        """
        living = []
        agent_pid = self._process.pid if self._process.poll() is None else None
        for process in psutil.Process().children(recursive=True):
            # A process may end while it is examined.
            with contextlib.suppress(psutil.Error):
                is_ours = process.pid == agent_pid or process.environ().get(LOG_VARIABLE) == self._folder.log_prefix
                # Python's resource trackers end by themselves, after they have removed the semaphores of killed loader
                # processes.
                if is_ours and not is_resource_tracker(process):
                    living.append(process)
        return living

    def _name_of(self, process: psutil.Process) -> str:
        """Return a process's id, name and state, for messages. A process in disk-sleep waits for a device."""
        with contextlib.suppress(psutil.Error):
            name = _AGENT if process.pid == self._process.pid else process.name()
            return f"process {process.pid} ({name}, {process.status()})"
        return f"process {process.pid}"

    def _failures(self) -> list[tuple[int, int]]:
        """Return the failures that the agent has written, in order of time. Empty without a valid file."""
        try:
            found = json.loads((self._folder.path / FAILURES_FILE).read_text(encoding="utf-8"))
            return [(int(failure["rank"]), int(failure["exit_status"])) for failure in found]
        except (OSError, ValueError, KeyError, TypeError):
            return []


def free_port(count: int = 1) -> int:
    """Return the first of several consecutive ports that are free on all addresses. Ranks bind them seconds later.

    The ports are outside of the range for outgoing connections if possible, because the system might use ports of this
    range before the ranks do.

    Args:
        count: Number of ports, at least 1.

    Raises:
        PortError: If the system has too few consecutive free ports.
    """
    # A job on a busy machine failed with EADDRINUSE, because an outgoing connection got the port before rank 0 did.
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    # All `count` ports must be below the range for outgoing connections, and ports below 1024 belong to the system.
    num_candidates = first_ephemeral - 1024 - (count - 1)
    candidates = [1024 + secrets.randbelow(num_candidates) for _ in range(100)] if num_candidates > 0 else []
    # With port 0 at the end, the system chooses a port if no candidate is free.
    for candidate in (*candidates, 0):
        # If one of the ports is taken or above 65535, the suppressed error leads to the next candidate.
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError, OverflowError):
            first = _bind(probes, candidate)
            for port in range(first + 1, first + count):
                _bind(probes, port)
            return first
    what = "no free port" if count == 1 else f"no {count} free ports in a row"
    raise PortError(f"this host has {what}, and the ranks need a port to meet; end processes that listen on ports")


def _bind(probes: contextlib.ExitStack, port: int) -> int:
    """Bind a port and return it. The exit of the stack releases it. Port 0 binds any free port."""
    probe = probes.enter_context(socket.socket())
    probe.bind(("", port))
    return int(probe.getsockname()[1])

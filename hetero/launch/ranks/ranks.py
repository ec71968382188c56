"""The ranks of one trainer host, started by `torch.distributed.run` or by `hetero.launch.ranks.tf_agent`."""

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
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.control.rank.session import RESTART_VARIABLE
from hetero.control.status import Cause
from hetero.errors import PortError
from hetero.launch.ranks.rank import LOG_VARIABLE
from hetero.launch.ranks.rank_folder import RankFolder
from hetero.launch.ranks.tf_agent import PlainRanks
from hetero.launch.ranks.torchrun_agent import PARENT_VARIABLE
from hetero.system.line_relay import LineRelay
from hetero.system.process import is_resource_tracker, kill_all, start_child
from hetero.system.scripts import script_words

__all__ = ["RankProcesses", "RanksOptions", "free_port"]

_AGENT_NAMES = {"torch": "torchrun", "tensorflow": "rank starter"}
"""Names of the process that starts the ranks, for messages."""
_KILL_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOptions:
    """Options of the ranks of one trainer host."""

    script: str
    """Path of the script, or name of a module."""
    script_args: Sequence[str]
    framework: str
    """Training framework of the ranks, ``torch`` or ``tensorflow``."""
    num_hosts: int
    """Number of trainer hosts of the job."""
    host_index: int
    """Index of this host among the trainer hosts, in natural order."""
    meeting_points: Sequence[tuple[str, int]]
    """Address and first free port of each host where ranks meet. With tensorflow these are all trainer hosts in order,
    with torch the first one, with mpirun the host of rank 0."""
    own_address: str
    num_ranks: int
    """Number of ranks on this host."""
    num_cpus: int
    """Number of CPUs that the ranks share."""
    num_gpus: int
    """Number of GPUs of this host."""
    environment: Mapping[str, str]
    """Variables that are added to this process's environment."""
    is_module: bool = False
    """Whether the script is the name of a module."""
    generation: int = 0
    """Number of earlier restarts of the trainer group."""


class RankProcesses:
    """Starts, watches and ends the ranks of this host.

    Create it on the main thread, because the parent-death signal fires when the thread that started the child ends.

    Args:
        options: Options of the ranks.
        host: This host's name, for causes.
        relay: Receives the ranks' output, one source per rank, and that of the agent.
        run_dir: Private folder of this launcher.
    """

    def __init__(self, options: RanksOptions, *, host: str, relay: LineRelay, run_dir: Path) -> None:
        self._options = options
        first_rank = options.host_index * options.num_ranks
        ranks = range(first_rank, first_rank + options.num_ranks)
        self._folder = RankFolder(run_dir / f"ranks-{options.generation}", ranks, host=host, relay=relay)
        self._result_file = self._folder.path / "ended.json"
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        relay.add(self._agent_name, read_end)
        script = script_words(options.script, is_module=options.is_module)
        self._process = start_child(
            [sys.executable, "-m", *self._agent_command(), *script, *options.script_args],
            env={
                # Without this variable torch's agent gives every rank one thread and logs a warning.
                "OMP_NUM_THREADS": str(max(1, options.num_cpus // options.num_ranks)),
                **os.environ,
                **options.environment,
                PARENT_VARIABLE: str(os.getpid()),
                **self._folder.environment,
                RESTART_VARIABLE: str(options.generation),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which stops the ranks in order
        )
        os.close(write_end)

    @property
    def _agent_name(self) -> str:
        return _AGENT_NAMES[self._options.framework]

    def _agent_command(self) -> list[str]:
        """Return the agent's module and its arguments, without the script."""
        options = self._options
        if options.framework == "tensorflow":
            ranks = PlainRanks(
                meeting_points=tuple(options.meeting_points),
                host_index=options.host_index,
                num_ranks=options.num_ranks,
                num_gpus=options.num_gpus,
            )
            return ["hetero.launch.ranks.tf_agent", str(self._result_file), ranks.to_json()]
        address, port = options.meeting_points[0]
        return [
            "hetero.launch.ranks.torchrun_agent",
            str(self._result_file),
            f"--nnodes={options.num_hosts}",
            f"--node-rank={options.host_index}",
            f"--nproc-per-node={options.num_ranks}",
            f"--master-addr={address}",
            f"--master-port={port}",
            f"--local-addr={options.own_address}",
            "--max-restarts=0",
            "--monitor-interval=0.1",
            f"--log-dir={self._result_file.parent / 'torchrun'}",  # torchrun's default folder would outlive the job
            "--module",
            "hetero.launch.ranks.rank",
        ]

    @property
    def pid(self) -> int:
        """Process id of the agent, torch's or hetero's, which starts the ranks."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the agent's exit status, None while it runs."""
        return self._process.poll()

    def cause(self, reported: Mapping[int, Cause]) -> Cause:
        """Return why the ranks failed. Call it after `poll` returned a status other than 0.

        Args:
            reported: Causes by rank, which ranks reported before they ended.
        """
        failures = self._failures()
        if not failures:
            return self._folder.describe(self._agent_name, self._process.poll() or 1)
        return self._folder.root(failures, reported)

    def failure_at_stop(self) -> Cause | None:
        """Return why a stop callback of a rank failed, None if none failed. Call it after `poll` returned 0."""
        return self._folder.failure_at_stop()

    def kill(self) -> None:
        """Kill the agent, the ranks and everything that they started. Idempotent.

        A process that cannot be killed, for example because it waits for a device, is logged after 5 s and left alone.
        """
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the ranks die with it
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_TIMEOUT_S)
        while left := self._living():
            kill_all(left)
            others = [process for process in left if process.pid != self._process.pid]
            psutil.wait_procs(others, timeout=0.05)  # without the agent, whose exit status it would take
            if time.monotonic() > deadline_s:
                names = ", ".join(map(self._name_of, left))
                logger.error("killed, but not gone after %.0f s: %s; going on without", _KILL_TIMEOUT_S, names)
                break
        self._folder.close()

    def _living(self) -> list[psutil.Process]:
        """Return the living processes among the agent, the ranks and their children.

        The ranks and their children are identified by `LOG_VARIABLE`, which they inherit.
        """
        found = []
        agent_pid = self._process.pid if self._process.poll() is None else None
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.pid != agent_pid:
                    is_theirs = process.environ().get(LOG_VARIABLE) == self._folder.log_prefix
                    if not is_theirs or is_resource_tracker(process):
                        continue
                found.append(process)
        return found

    def _name_of(self, process: psutil.Process) -> str:
        """Return a process's id, name and state, for messages. In the state disk-sleep it waits for a device."""
        with contextlib.suppress(psutil.Error):
            name = self._agent_name if process.pid == self._process.pid else process.name()
            return f"process {process.pid} ({name}, {process.status()})"
        return f"process {process.pid}"

    def _failures(self) -> list[tuple[int, int]]:
        try:
            found = json.loads(self._result_file.read_text(encoding="utf-8"))
            return [(int(failure["rank"]), int(failure["exit_status"])) for failure in found]
        except (OSError, ValueError, KeyError, TypeError):
            return []


def free_port(count: int = 1) -> int:
    """Return the first of several consecutive ports that are free on all addresses. Ranks bind them seconds later.

    If possible, the ports are outside of the range that the system uses for outgoing connections, because it might use
    them before the ranks do.

    Args:
        count: Number of ports, at least 1.

    Raises:
        PortError: If the system has too few free ports in a row.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    num_others = first_ephemeral - 1024 - (count - 1)
    candidates = [1024 + secrets.randbelow(num_others) for _ in range(100)] if num_others > 0 else []
    for candidate in (*candidates, 0):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError, OverflowError):
            first = _bind(probes, candidate)
            for port in range(first + 1, first + count):
                _bind(probes, port)
            return first
    what = "no free port" if count == 1 else f"no {count} free ports in a row"
    raise PortError(f"the system has {what} where the ranks could meet; end what listens on its ports")


def _bind(probes: contextlib.ExitStack, port: int) -> int:
    """Bind a port until the stack is left, and return it. Port 0 binds any free port."""
    probe = probes.enter_context(socket.socket())
    probe.bind(("", port))
    return int(probe.getsockname()[1])

"""The ranks of one trainer host, started by `torch.distributed.run`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.control.status import Cause
from hetero.errors import ExitCode
from hetero.launch.elastic import PARENT_VARIABLE
from hetero.launch.rank import LOG_VARIABLE
from hetero.launch.relay import LineRelay
from hetero.process import describe_exit_status

__all__ = ["RankProcesses", "RanksOptions"]

AGENT_NAME = "torchrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOptions:
    """What `RankProcesses` needs to know."""

    script: str
    script_args: Sequence[str]
    num_hosts: int
    """Trainer hosts of the job."""
    host_index: int
    """This one's place among them, in natural order."""
    rendezvous_address: str
    """Address of the first trainer host."""
    rendezvous_port: int
    own_address: str
    num_ranks: int
    """Ranks on this host."""
    num_cpus: int
    """CPUs that the ranks share."""
    environment: Mapping[str, str]
    """Added to this process's own."""


class RankProcesses:
    """Start, watch and end the ranks of this host.

    Create it on the main thread: the parent-death signal fires when the thread
    that started the child ends.

    Args:
        options: What to run.
        host: This host's name, for causes.
        relay: Takes the ranks' output, one source per rank.
        run_dir: Private folder of this launcher.
    """

    def __init__(self, options: RanksOptions, *, host: str, relay: LineRelay, run_dir: Path) -> None:
        self._options = options
        self._host = host
        self._relay = relay
        self._result_file = run_dir / "ranks.json"
        first_rank = options.host_index * options.num_ranks
        prefix = run_dir / "rank-log-"
        for local_rank in range(options.num_ranks):
            fifo = f"{prefix}{local_rank}"
            os.mkfifo(fifo, 0o600)
            # Read and write: opening does not wait for the rank, and its end is no end of file.
            relay.add(f"rank {first_rank + local_rank}", os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        relay.add(AGENT_NAME, read_end)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hetero.launch.elastic", str(self._result_file), *self._agent_arguments()],
            env={
                # Without it torch's agent gives every rank one thread and warns about that.
                "OMP_NUM_THREADS": str(max(1, options.num_cpus // options.num_ranks)),
                **os.environ,
                **options.environment,
                PARENT_VARIABLE: str(os.getpid()),
                LOG_VARIABLE: str(prefix),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which stops the ranks in order
        )
        os.close(write_end)

    def _agent_arguments(self) -> list[str]:
        options = self._options
        return [
            f"--nnodes={options.num_hosts}",
            f"--node-rank={options.host_index}",
            f"--nproc-per-node={options.num_ranks}",
            f"--master-addr={options.rendezvous_address}",
            f"--master-port={options.rendezvous_port}",
            f"--local-addr={options.own_address}",
            "--max-restarts=0",
            "--monitor-interval=0.1",
            f"--log-dir={self._result_file.parent / 'torchrun'}",  # its own default outlives the job
            "--module",
            "hetero.launch.rank",
            options.script,
            *options.script_args,
        ]

    @property
    def pid(self) -> int:
        """Process id of torch's agent."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the agent's exit status, None while it runs."""
        return self._process.poll()

    def cause(self) -> Cause:
        """Say why the ranks failed; call it after `poll` gave a status other than 0."""
        status = self._process.poll()
        failures = self._failures()
        if not failures:
            name, exit_status = AGENT_NAME, status if status is not None else 1
        else:
            # Signals first: peers of a killed rank fail a moment later with exceptions.
            chosen = next((failure for failure in failures if failure[1] < 0), failures[0])
            name, exit_status = f"rank {chosen[0]}", chosen[1]
        tail = "\n".join(self._relay.tail(name))
        with contextlib.suppress(ValueError):
            return Cause(
                host=self._host,
                summary=f"{name} {describe_exit_status(exit_status)}",
                detail=tail,
                exit_code=ExitCode(exit_status) if exit_status > 2 else ExitCode.SCRIPT_FAILED,
                by_signal=exit_status < 0,
            )
        return Cause(
            host=self._host,
            summary=f"{name} {describe_exit_status(exit_status)}",
            detail=tail,
            exit_code=ExitCode.SCRIPT_FAILED,
        )

    def kill(self, rank_pids: Sequence[int]) -> None:
        """End everything at once and wait for it; idempotent."""
        if self._process.poll() is None:
            for pid in rank_pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _failures(self) -> list[tuple[int, int]]:
        try:
            found = json.loads(self._result_file.read_text(encoding="utf-8"))
            return [(int(failure["rank"]), int(failure["exit_status"])) for failure in found]
        except (OSError, ValueError, KeyError, TypeError):
            return []

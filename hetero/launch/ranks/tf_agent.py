"""Agent that starts the ranks of one host without torch, and writes to a file how they failed.

It is a child of the launcher, as is `hetero.launch.ranks.torchrun_agent` for ranks that train with torch. Usage:
``python -m hetero.launch.ranks.tf_agent RESULT_FILE RANKS SCRIPT ARGUMENTS...``. RANKS is a `HostRanks` in JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.system.process import PARENT_VARIABLE, die_with_parent
from hetero.system.stop_signals import end_signal
from hetero.wire.channels import join_address

if TYPE_CHECKING:  # the agent itself does not import modules that only the launcher needs
    from hetero.launch.ranks.starter import RanksOptions

__all__ = ["HostRanks", "TensorFlowAgent", "main"]

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"

_SETTLE_S = 0.3
"""Seconds from the first failure until the agent ends the other ranks. A failing rank may break its connections before
its process ends, because it closes its GPU in between. Another rank may then end first, but both must be recorded."""
_TERM_GRACE_S = 3.0
"""Seconds from the end signal to SIGKILL. The signal ends a rank by default."""
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.02

_Failure = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanks:
    """The ranks of one host, and the addresses of all ranks."""

    meeting_points: tuple[tuple[str, int], ...]
    """Address and first port of each trainer host, in natural order. The ranks of a host have consecutive ports."""
    host_index: int
    """Index of this host in ``meeting_points``."""
    num_ranks: int
    """Number of ranks on each host."""
    num_gpus: int
    """Number of GPUs of this host."""

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostRanks:
        """Return the object for a JSON text from `to_json`."""
        fields = json.loads(text)
        points = tuple((address, port) for address, port in fields.pop("meeting_points"))
        return cls(meeting_points=points, **fields)

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local rank of this host."""
        return self.host_index * self.num_ranks + local_rank

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables to set for one rank.

        ``MASTER_ADDR`` and ``MASTER_PORT`` are the address of rank 0 in ``TF_CONFIG``. They are for scripts that do not
        use TensorFlow's own communication.

        Args:
            local_rank: Local rank on this host.
            environ: Environment of this process. Its ``CUDA_VISIBLE_DEVICES`` limits the GPUs.
        """
        workers = [
            join_address(address, first_port + number)
            for address, first_port in self.meeting_points
            for number in range(self.num_ranks)
        ]
        rank = self.rank(local_rank)
        address, port = self.meeting_points[0]
        added = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.host_index),
            "WORLD_SIZE": str(len(workers)),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}),
        }
        gpus = self._gpus(local_rank, environ.get(GPU_VARIABLE))
        return added if gpus is None else {**added, GPU_VARIABLE: gpus}

    def _gpus(self, local_rank: int, stated: str | None) -> str | None:
        """Return a rank's share of the usable GPUs, because TensorFlow takes the memory of all GPUs that it sees.

        Return None if the rank may see all GPUs, because it is the only rank or there are fewer GPUs than ranks.
        """
        usable = [str(number) for number in range(self.num_gpus)] if stated is None else stated.split(",")
        share = len(usable) // self.num_ranks
        if self.num_ranks == 1 or share == 0:
            return None
        return ",".join(usable[local_rank * share : (local_rank + 1) * share])


class TensorFlowAgent:
    """This module as an `Agent`."""

    name = "rank starter"
    meets_everywhere = True  # each rank has a server
    has_rank_per_gpu = False
    uses_grpc = True

    def obstacle(self) -> str:
        """Return an empty text, because the agent needs no framework."""
        return ""

    def command(self, options: RanksOptions, result_file: Path) -> list[str]:
        """Return this module and its arguments, without the script."""
        ranks = HostRanks(
            meeting_points=tuple(options.meeting_points),
            host_index=options.host_index,
            num_ranks=options.num_ranks,
            num_gpus=options.num_gpus,
        )
        return ["hetero.launch.ranks.tf_agent", str(result_file), ranks.to_json()]


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of this host. Return 0 if all ended with 0, else write the failures to a file and return 1."""
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    result_file, text, *script = arguments
    ranks = HostRanks.from_json(text)
    # The ranks are children of this process, and must end when it ends.
    environ = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    running = {
        ranks.rank(local_rank): _start(script, {**environ, **ranks.environment(local_rank, environ)})
        for local_rank in range(ranks.num_ranks)
    }
    failures: list[_Failure] = []
    while running and not failures:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # wait until a rank has ended
        failures = _take_ended(running)
    if not failures:
        return 0
    failures += _wait_for_ends(running, _SETTLE_S)
    # Record no later failures, because this agent causes them when it ends the remaining ranks.
    Path(result_file).write_text(json.dumps(failures), encoding="utf-8")
    for process in running.values():
        process.send_signal(end_signal())
    _wait_for_ends(running, _TERM_GRACE_S)
    for process in running.values():
        process.kill()
    _wait_for_ends(running, _KILL_TIMEOUT_S)
    return 1


def _start(script: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "hetero.launch.ranks.rank", *script],
        env=environ,
        start_new_session=True,  # a signal to a rank's group then reaches no other rank, as with torch's agent
    )


def _wait_for_ends(running: dict[int, subprocess.Popen[bytes]], timeout_s: float) -> list[_Failure]:
    """Wait until all ranks have ended or the time is over. Return the failures during the wait, in order of time."""
    failures: list[_Failure] = []
    deadline_s = time.monotonic() + timeout_s
    while True:
        failures += _take_ended(running)
        if not running or time.monotonic() >= deadline_s:
            return failures
        time.sleep(_POLL_S)


def _take_ended(running: dict[int, subprocess.Popen[bytes]]) -> list[_Failure]:
    """Remove ranks that have ended from ``running``, and return the failures among them."""
    ended = {rank: process for rank, process in running.items() if process.poll() is not None}
    for rank in ended:
        del running[rank]
    return [
        {"rank": rank, "exit_status": process.returncode, "pid": process.pid}
        for rank, process in ended.items()
        if process.returncode != 0
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

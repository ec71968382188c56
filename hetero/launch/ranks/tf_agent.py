"""Starts the ranks of one host as a child of the launcher, without torch, and writes down how they ended.

What `hetero.launch.ranks.torchrun_agent` is where they train with torch. Usage:
``python -m hetero.launch.ranks.tf_agent RESULT_FILE RANKS SCRIPT ARGUMENTS...``, where RANKS are `PlainRanks` in JSON.
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

from hetero.launch.ranks.torchrun_agent import PARENT_VARIABLE
from hetero.system.process import die_with_parent
from hetero.wire.channels import join_address

__all__ = ["PlainRanks", "main"]

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"

_SETTLE_S = 0.3
"""From the first failure until the other ranks are ended: what broke its connections may close its GPU first, and then
end."""
_TERM_GRACE_S = 3.0
"""From SIGTERM, which ranks leave at its default action, to SIGKILL."""
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.02

_Failure = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRanks:
    """The ranks of one host, and where those of all hosts meet."""

    meeting_points: tuple[tuple[str, int], ...]
    """Of each trainer host, in natural order: its address, and the first of as many free ports as it has ranks."""
    host_index: int
    """This host's place among them."""
    num_ranks: int
    """Of each host."""
    num_gpus: int
    """Of this host."""

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PlainRanks:
        """Return what `to_json` has written."""
        fields = json.loads(text)
        points = tuple((address, port) for address, port in fields.pop("meeting_points"))
        return cls(meeting_points=points, **fields)

    def rank(self, local_rank: int) -> int:
        """Return the place of a rank of this host among all."""
        return self.host_index * self.num_ranks + local_rank

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what is added to an environment for one rank.

        ``MASTER_ADDR`` and ``MASTER_PORT`` are the first rank's in ``TF_CONFIG``: for whom TensorFlow is not.

        Args:
            local_rank: Its place on this host.
            environ: The environment; says which GPUs may be used.
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
        """Return a rank's share of the GPUs that may be used: TensorFlow takes the memory of all that it sees."""
        usable = [str(number) for number in range(self.num_gpus)] if stated is None else stated.split(",")
        share = len(usable) // self.num_ranks
        if self.num_ranks == 1 or share == 0:
            return None
        return ",".join(usable[local_rank * share : (local_rank + 1) * share])


def main(arguments: Sequence[str]) -> int:
    """Run the ranks; return 0 if every one of this host ended with 0."""
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    result_file, text, *script = arguments
    ranks = PlainRanks.from_json(text)
    # The ranks are children of this process; they must not outlive it either.
    environ = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    running = {
        ranks.rank(local_rank): _start(script, {**environ, **ranks.environment(local_rank, environ)})
        for local_rank in range(ranks.num_ranks)
    }
    failures: list[_Failure] = []
    while running and not failures:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # until one of them has ended
        failures = _take_ended(running)
    if not failures:
        return 0
    failures += _wait_for_ends(running, _SETTLE_S)
    # Those that end from here on say nothing about the cause: they are ended.
    Path(result_file).write_text(json.dumps(failures), encoding="utf-8")
    for process in running.values():
        process.terminate()
    _wait_for_ends(running, _TERM_GRACE_S)
    for process in running.values():
        process.kill()
    _wait_for_ends(running, _KILL_TIMEOUT_S)
    return 1


def _start(script: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "hetero.launch.ranks.rank", *script],
        env=environ,
        start_new_session=True,  # as torch's agent does: a signal to a rank's own group ends nobody else
    )


def _wait_for_ends(running: dict[int, subprocess.Popen[bytes]], timeout_s: float) -> list[_Failure]:
    """Wait until no rank runs any more, or the time is over; return the failures meanwhile, in order of time."""
    failures: list[_Failure] = []
    deadline_s = time.monotonic() + timeout_s
    while True:
        failures += _take_ended(running)
        if not running or time.monotonic() >= deadline_s:
            return failures
        time.sleep(_POLL_S)


def _take_ended(running: dict[int, subprocess.Popen[bytes]]) -> list[_Failure]:
    """Take the ranks that have ended out of those that run; return those of them that failed."""
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

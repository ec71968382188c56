"""The ranks of one trainer host that ``mpirun`` made, Horovod's among them: each runs where ``mpirun`` put it.

A rank of MPI is a process that ``mpirun`` has started, or that such a one starts in its place, since its environment
says which rank it is. There is one such process per rank on every trainer host: copies of the launcher, which follow
the one that leads (`hetero.launch.ranks.leader`). Each starts the training script once, as its rank. No torchrun is
involved, and none of these ranks can be started again: MPI has no place for a second process of one rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hetero.control.rank.session import RESTART_VARIABLE
from hetero.control.status import Cause
from hetero.launch.ranks.leader import Copies
from hetero.launch.ranks.rank_folder import RankFolder
from hetero.launch.ranks.ranks import RanksOptions
from hetero.system.line_relay import LineRelay

__all__ = ["GivenRanks"]

_SETTLE_S = 0.3
"""From the first failure until that is the end of all: the rank whose connection broke may be seen first."""
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.05


class GivenRanks:
    """Start, watch and end the ranks of this host, like `hetero.launch.ranks.ranks.RankProcesses`.

    Create it on the main thread, when all copies are there.

    Args:
        options: What to run; ``meeting_points`` is where the process with rank 0 is.
        copies: The followers.
        host: This host's name, for causes.
        relay: Takes the ranks' output, one source per rank.
        run_dir: Private folder of this launcher.
    """

    def __init__(self, options: RanksOptions, copies: Copies, *, host: str, relay: LineRelay, run_dir: Path) -> None:
        self._options = options
        self._copies = copies
        self._ranks = [copies.ranks[local_rank] for local_rank in range(copies.outer.num_local)]
        self._folder = RankFolder(run_dir / f"ranks-{options.generation}", self._ranks, host=host, relay=relay)
        self._failures: list[tuple[int, int]] = []
        self._ended: dict[int, int] = {}
        self._failed_s = 0.0
        copies.start(self._variables)

    def _variables(self, local_rank: int) -> dict[str, str]:
        """Return what is added to the environment of a rank: what torchrun would say, for scripts that ask."""
        options = self._options
        address, port = options.meeting_points[0]
        found = {
            "RANK": str(self._ranks[local_rank]),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(options.host_index),
            "WORLD_SIZE": str(self._copies.outer.world_size),
            "LOCAL_WORLD_SIZE": str(len(self._ranks)),
            RESTART_VARIABLE: str(options.generation),
            **options.environment,
            **self._folder.environment,
        }
        defaults = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(1, options.num_cpus // options.num_ranks)),
        }
        return {**found, **{name: value for name, value in defaults.items() if name not in os.environ}}

    def poll(self) -> int | None:
        """Return 0 if every rank of this host ended so, 1 if one has failed, None before."""
        self._take_ended()
        if self._failures:
            return 1 if time.monotonic() >= self._failed_s + _SETTLE_S else None
        return 0 if len(self._ended) == len(self._ranks) else None

    def cause(self, reported: Mapping[int, Cause]) -> Cause:
        """Say why the ranks failed; call it after `poll` gave 1.

        Args:
            reported: What ranks said themselves before they ended.
        """
        lost = {self._ranks[local_rank] for local_rank in self._copies.lost}
        if all(rank in lost for rank, _ in self._failures):
            rank, exit_status = self._failures[0]
            summary = f"rank {rank} went with its copy of the launcher; mpirun ends all when one has failed"
            return replace(self._folder.describe(f"rank {rank}", exit_status), summary=summary)
        return self._folder.root(self._failures, reported)

    def failure_at_stop(self) -> Cause | None:
        """Return why a stop callback of a rank failed; call it after `poll` gave 0."""
        return self._folder.failure_at_stop()

    def kill(self) -> None:
        """End the ranks; idempotent. What they have started goes with the copies."""
        self._copies.kill()
        deadline_s = time.monotonic() + _KILL_TIMEOUT_S
        while len(self._ended) < len(self._ranks) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self._take_ended()
        self._folder.close()

    def _take_ended(self) -> None:
        self._copies.poll()
        for local_rank, status in self._copies.ended.items():
            if local_rank in self._ended:
                continue
            self._ended[local_rank] = status
            if status != 0:
                self._failed_s = self._failed_s or time.monotonic()
                self._failures.append((self._ranks[local_rank], status))

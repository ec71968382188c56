"""The ranks of one trainer host whose processes ``mpirun`` made, for example with Horovod.

A rank of MPI is a process that ``mpirun`` started, or a child of it that inherits its environment, because the
environment identifies the rank. On every trainer host there is one such process per rank. Each is a copy of the
launcher that follows the copy that leads (`hetero.launch.ranks.leader`). It starts the training script once, as its
rank.

torchrun is not used. These ranks cannot be restarted, because MPI does not allow a second process for a rank.
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
"""Seconds from the first failure until `GivenRanks.poll` reports it. A rank whose connection broke may be seen before
the rank that failed."""
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.05


class GivenRanks:
    """Starts, watches and ends the ranks of this host, like `hetero.launch.ranks.ranks.RankProcesses`.

    Create it on the main thread, after all copies have connected.

    Args:
        options: Options of the ranks. ``meeting_points`` has only the host of rank 0.
        copies: The followers.
        host: This host's name, for causes.
        relay: Receives the ranks' output, one source per rank.
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
        """Return the variables to add to a rank's environment. Those of torchrun are for scripts that read them."""
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
        """Return 0 if every rank of this host ended with 0, 1 if a rank has failed, else None."""
        self._take_ended()
        if self._failures:
            return 1 if time.monotonic() >= self._failed_s + _SETTLE_S else None
        return 0 if len(self._ended) == len(self._ranks) else None

    def cause(self, reported: Mapping[int, Cause]) -> Cause:
        """Return why the ranks failed. Call it after `poll` returned 1.

        Args:
            reported: Causes by rank, which ranks reported before they ended.
        """
        lost = {self._ranks[local_rank] for local_rank in self._copies.lost}
        if all(rank in lost for rank, _ in self._failures):
            rank, exit_status = self._failures[0]
            summary = f"rank {rank} went with its copy of the launcher; mpirun ends all when one has failed"
            return replace(self._folder.describe(f"rank {rank}", exit_status), summary=summary)
        return self._folder.root(self._failures, reported)

    def failure_at_stop(self) -> Cause | None:
        """Return why a stop callback of a rank failed, None if none failed. Call it after `poll` returned 0."""
        return self._folder.failure_at_stop()

    def kill(self) -> None:
        """End the ranks. Idempotent. The processes that they started end with the copies."""
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

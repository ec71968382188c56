"""The ranks of one trainer host under ``mpirun``, for example with Horovod.

``mpirun`` starts one launcher per rank on every trainer host. Each launcher follows the local leader
(`hetero.launch.ranks.leader`) and starts the training script once, as its rank. MPI accepts this child process as the
rank, because the child inherits the environment variables that identify the rank.

These ranks cannot be restarted, because MPI does not allow a second process for a rank.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetero.control.rank.variables import RESTART_VARIABLE
from hetero.control.status import Cause
from hetero.launch.ranks.agent import SETTLE_S
from hetero.launch.ranks.leader import LocalLeader
from hetero.launch.ranks.rank import LOG_VARIABLE
from hetero.launch.ranks.rank_folder import RankFolder
from hetero.launch.ranks.starter import RanksOptions, RankStarter
from hetero.system.line_relay import LineRelay
from hetero.system.waits import END_TIMEOUT_S, SHORT_POLL_S

__all__ = ["MpiRanks", "MpiStarter"]

logger = logging.getLogger(__name__)


class MpiStarter(RankStarter):
    """Starts the ranks through the followers of the local leader.

    Args:
        leader: The local leader of the processes that mpirun made on this host.
    """

    def __init__(self, leader: LocalLeader) -> None:
        self._leader = leader
        self.num_existing_ranks = leader.parent.num_local

    def obstacle(self, *, is_trainer: bool, job_restarts: int) -> str:
        """Return why ranks cannot be started on this host, and what to do. Empty if they can be started."""
        if not is_trainer:
            return "mpirun started hetero on a data host; make it start hetero only on the trainer hosts"
        if not job_restarts:
            return ""
        return "job_restarts does not work with mpirun, because its ranks start only once; leave it out"

    def poll(self) -> None:
        """Read what the followers have sent."""
        self._leader.poll()

    def waits_for(self) -> str:
        """Return how many processes of mpirun have connected, as text. Empty if all have connected."""
        if self._leader.is_complete:
            return ""
        return f"the processes of mpirun: {len(self._leader.ranks)} of {self.num_existing_ranks} have connected"

    def early_end(self) -> str:
        """Return a message if mpirun ended a process before the ranks were started, else an empty text."""
        return "mpirun ended a process of this host before the ranks were started" if self._leader.ended else ""

    def meeting_hosts(self, trainer_hosts: Sequence[str], ports: Mapping[str, int] | None = None) -> Sequence[str]:
        """Return the host of rank 0, the only host with a port. Before ports are known, return all trainer hosts."""
        return [host for host in trainer_hosts if ports is None or ports[host]]

    def num_ports(self, host: str, trainer_hosts: Sequence[str], num_ranks: int) -> int:
        """Return 1 if rank 0 is on this host, else 0."""
        return int(0 in self._leader.ranks.values())

    def start(self, options: RanksOptions, *, host: str, relay: LineRelay, run_dir: Path) -> MpiRanks:
        """Ask the followers to start the ranks."""
        logger.info("starting %d of the %d ranks that mpirun made", options.num_ranks, self._leader.parent.world_size)
        return MpiRanks(options, self._leader, host=host, relay=relay, run_dir=run_dir)


class MpiRanks:
    """Starts, watches and ends the ranks of this host, like `hetero.launch.ranks.ranks.RankProcesses`.

    Create it on the main thread, after all followers have connected.

    Args:
        options: Options of the ranks. ``meeting_points`` contains only the host of rank 0.
        leader: The local leader, which is connected to the followers.
        host: This host's name, for causes.
        relay: Receives the ranks' output, one source per rank.
        run_dir: Private folder of this launcher.
    """

    def __init__(
        self, options: RanksOptions, leader: LocalLeader, *, host: str, relay: LineRelay, run_dir: Path
    ) -> None:
        self._options = options
        self._leader = leader
        self._ranks = [leader.ranks[local_rank] for local_rank in range(leader.parent.num_local)]
        """The ranks of this host, by local rank."""
        self._folder = RankFolder(run_dir / f"ranks-{options.generation}", self._ranks, host=host, relay=relay)
        self._failed_s: float | None = None
        """Time when the first failure was found, in monotonic seconds. None before."""
        leader.start(self._variables)

    def _variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables to add to a rank's environment. Some scripts read the variables that torchrun sets."""
        options = self._options
        address, port = options.meeting_points[0]
        found = {
            "RANK": str(self._ranks[local_rank]),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(options.host_index),
            "WORLD_SIZE": str(self._leader.parent.world_size),
            "LOCAL_WORLD_SIZE": str(len(self._ranks)),
            RESTART_VARIABLE: str(options.generation),
            **options.environment,
            LOG_VARIABLE: self._folder.log_prefix,
        }
        defaults = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(1, options.num_cpus // options.num_ranks)),
        }
        # The user may have set these variables for mpirun.
        return {**found, **{name: value for name, value in defaults.items() if name not in os.environ}}

    def poll(self) -> int | None:
        """Return 0 if every rank of this host ended with 0, 1 if a rank has failed, else None."""
        self._leader.poll()
        if self._failures():
            self._failed_s = self._failed_s or time.monotonic()
            # Ranks that fail at about the same time are all recorded.
            return 1 if time.monotonic() >= self._failed_s + SETTLE_S else None
        return 0 if self._have_all_ended() else None

    def cause(self, reported: Mapping[int, Cause]) -> Cause:
        """Return why the ranks failed. Call it after `poll` returned 1.

        Args:
            reported: The causes that ranks reported before they ended, by rank.
        """
        failures = self._failures()
        lost = {self._ranks[local_rank] for local_rank in self._leader.lost}
        # mpirun ends all its processes a quarter of a second after one has failed, also processes whose ranks did not
        # fail. If all failed ranks were lost in this way, the first failure was elsewhere.
        if all(rank in lost for rank, _ in failures):
            rank, exit_status = failures[0]
            summary = f"rank {rank} ended with its launcher, because mpirun ends all processes when one has failed"
            return replace(self._folder.describe(f"rank {rank}", exit_status), summary=summary)
        return self._folder.root(failures, reported)

    def kill(self) -> None:
        """End the ranks. Idempotent. When a follower ends, it ends the processes that its rank started."""
        self._leader.kill()
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while not self._have_all_ended() and time.monotonic() < deadline_s:
            time.sleep(SHORT_POLL_S)
            self._leader.poll()
        self._folder.close()

    def _have_all_ended(self) -> bool:
        return len(self._leader.ended) == len(self._ranks)

    def _failures(self) -> list[tuple[int, int]]:
        """Return the rank and the exit status of each rank that has failed, in order of time."""
        ended = self._leader.ended.items()
        return [(self._ranks[local_rank], exit_status) for local_rank, exit_status in ended if exit_status != 0]

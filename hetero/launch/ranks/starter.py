"""The interface of a rank starter, and the options that it gets. CONTRIBUTING.md says how to add a starter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hetero.control.status import Cause
from hetero.system.line_relay import LineRelay

__all__ = ["RankStarter", "Ranks", "RanksOptions"]


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
    """Address and first free port of each host whose ranks listen for other ranks. With tensorflow these are all
    trainer hosts in order, with torch the first one, with mpirun the host of rank 0."""
    num_ranks: int
    """Number of ranks on this host."""
    num_cpus: int
    """Number of CPUs that the ranks share."""
    num_gpus: int
    """Number of GPUs of this host."""
    environment: Mapping[str, str]
    """Variables that are added to this process's environment."""
    is_module: bool
    """Whether the script is the name of a module."""
    generation: int
    """Number of earlier restarts of the trainer group."""


class Ranks(Protocol):
    """The ranks of one host, from a start until they end."""

    def poll(self) -> int | None:
        """Return 0 if every rank of this host ended with 0, another status if one has failed, None while they run."""

    def cause(self, reported: Mapping[int, Cause]) -> Cause:
        """Return why the ranks failed. Call it after `poll` returned a status other than 0.

        Args:
            reported: The causes that ranks reported before they ended, by rank.
        """

    def kill(self) -> None:
        """End the ranks and everything that they started. Idempotent."""


class RankStarter(ABC):
    """Starts the ranks of this host. There is one object per launcher."""

    num_existing_ranks: int = 0
    """Number of ranks of this host whose processes exist before `start`. 0 if `start` makes the processes."""

    def obstacle(self, *, is_trainer: bool, job_restarts: int) -> str:
        """Return why ranks cannot be started on this host, and what to do. Empty if they can be started."""
        return ""

    @abstractmethod
    def poll(self) -> None:
        """Handle events, such as messages of followers. Called several times per second. Does not wait."""

    def waits_for(self) -> str:
        """Return what is missing before ranks can be started, as text. Empty if nothing is missing."""
        return ""

    def early_end(self) -> str:
        """Return a message if a process of a rank ended before the ranks were started, else an empty text."""
        return ""

    @abstractmethod
    def meeting_hosts(self, trainer_hosts: Sequence[str], ports: Mapping[str, int] | None = None) -> Sequence[str]:
        """Return the trainer hosts whose ranks listen for other ranks.

        Args:
            trainer_hosts: All trainer hosts.
            ports: First port of each host. If None, because some host has not published it, return all possible hosts.
        """

    @abstractmethod
    def num_ports(self, host: str, trainer_hosts: Sequence[str], num_ranks: int) -> int:
        """Return how many consecutive ports the ranks listen on at ``host``. May be 0."""

    @abstractmethod
    def start(self, options: RanksOptions, *, host: str, relay: LineRelay, run_dir: Path) -> Ranks:
        """Start the ranks of this host. Call it on the main thread.

        Args:
            options: Options of the ranks.
            host: This host's name, for causes.
            relay: Receives the ranks' output, one source per rank.
            run_dir: Private folder of this launcher.
        """

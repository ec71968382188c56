"""Finds out whether another launcher started this one: ``mpirun``, or a ``torchrun`` per group.

Such a parent launcher starts several launchers of hetero on each host. One of them leads and does the host's work. The
others follow it, see `hetero.launch.ranks.leader`.

A process learns its rank from environment variables of the parent launcher, under ``mpirun`` those of Open MPI. The
platform's own variables are wrong under ``mpirun``, which copies them from its first host to all other hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hetero.errors import ConfigError

__all__ = ["ParentLauncher", "find_parent", "take_variables"]

_MPI_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "ORTE_", "PMI_")
_TORCH_NAMES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentLauncher:
    """The launcher that started this process, and the rank and local rank that it gave to this process."""

    name: str
    """Name of the parent launcher, ``mpirun`` or ``torchrun``."""
    run: str
    """Identifier of this run of the parent launcher. Consecutive runs on a host have different identifiers."""
    rank: int
    world_size: int
    local_rank: int
    """Index of this process among the processes that the parent launcher made on this host."""
    num_local: int
    """Number of processes that the parent launcher made on this host."""

    @property
    def gives_ranks(self) -> bool:
        """Whether the parent launcher's processes must be the ranks, because hetero cannot make new ranks of MPI."""
        return self.name == "mpirun"


def find_parent(environ: Mapping[str, str]) -> ParentLauncher | None:
    """Return the launcher that started this process, or None if it was not mpirun or torchrun.

    Raises:
        ConfigError: If the launcher's environment variables contradict each other.
    """
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        # Newer and older versions of Open MPI name the run by different variables.
        run = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
        names = ("COMM_WORLD_RANK", "COMM_WORLD_SIZE", "COMM_WORLD_LOCAL_RANK", "COMM_WORLD_LOCAL_SIZE")
        return _parent_of("mpirun", run, environ, tuple(f"OMPI_{name}" for name in names))
    if "TORCHELASTIC_RUN_ID" in environ and "LOCAL_RANK" in environ:
        # The id of a run is "none" by default, so the run is identified by all of these values together.
        parts = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        run = " ".join(environ.get(name, "") for name in parts)
        return _parent_of("torchrun", run, environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return None


def take_variables(environ: MutableMapping[str, str], parent: ParentLauncher) -> dict[str, str]:
    """Remove from an environment the variables that the parent launcher set for this process alone. Return them.

    Otherwise all children would inherit them. If a second process used the same rank, MPI would wait for ever. With the
    ``OMP_NUM_THREADS`` of torchrun, each rank would have one thread.
    """
    names = [name for name in environ if _is_of_one_process(name, parent)]
    # torchrun sets this variable to 1 if it starts several processes and the variable is not set.
    if parent.name == "torchrun" and parent.num_local > 1 and environ.get("OMP_NUM_THREADS") == "1":
        names.append("OMP_NUM_THREADS")
    return {name: environ.pop(name) for name in names}


def _is_of_one_process(name: str, parent: ParentLauncher) -> bool:
    """Return whether the parent launcher set the variable ``name`` for one process alone."""
    if parent.name == "mpirun":
        return name.startswith(_MPI_PREFIXES)
    return name in _TORCH_NAMES or name.startswith("TORCHELASTIC_")


def _parent_of(name: str, run: str, environ: Mapping[str, str], variables: tuple[str, ...]) -> ParentLauncher:
    """Return the parent launcher with the ranks and counts that four environment variables state.

    Raises:
        ConfigError: If the numbers contradict each other.
    """
    texts = [environ.get(variable, "") for variable in variables]
    # -1 is in no range, so a text that is no number is rejected below.
    numbers = [int(text) if text.isdecimal() else -1 for text in texts]
    rank, world_size, local_rank, num_local = numbers
    if not (0 <= rank < world_size and 0 <= local_rank < num_local <= world_size):
        found = ", ".join(f"{variable}={text!r:.20}" for variable, text in zip(variables, texts, strict=True))
        raise ConfigError(
            f"the variables of {name} contradict each other: {found}\n"
            f"  expected: each rank below its number of ranks\n  to do: start the job again with {name}"
        )
    return ParentLauncher(
        name=name, run=run, rank=rank, world_size=world_size, local_rank=local_rank, num_local=num_local
    )

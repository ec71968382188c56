"""Finds out whether another launcher started this one: ``mpirun``, or a ``torchrun`` per group.

Platforms with such launchers start several copies of the entry point on each host. Only one copy does the host's work.
See `hetero.launch.ranks.leader` for the other copies.

The environment of a copy identifies it. Under ``mpirun``, Open MPI's variables do. The platform's own variables do not,
because ``mpirun`` copies those of its first host to all other hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hetero.errors import ConfigError

__all__ = ["Outer", "outer_launcher", "take_variables"]

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
class Outer:
    """The place of this process among those that another launcher made."""

    name: str
    """Name of the other launcher, ``mpirun`` or ``torchrun``."""
    run: str
    """Identifies a run of the other launcher among consecutive runs on one host."""
    rank: int
    world_size: int
    local_rank: int
    """Index of this copy among those of its host."""
    num_local: int
    """Number of copies on this host."""

    @property
    def leads(self) -> bool:
        """Whether this copy does the host's work."""
        return self.local_rank == 0

    @property
    def gives_ranks(self) -> bool:
        """Whether the processes must be the ranks of the job, because hetero cannot make new ranks of MPI."""
        return self.name == "mpirun"


def outer_launcher(environ: Mapping[str, str]) -> Outer | None:
    """Return this process's place among those of another launcher, None if another launcher did not start it.

    Raises:
        ConfigError: If the variables contradict each other.
    """
    if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
        run = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
        names = ("COMM_WORLD_RANK", "COMM_WORLD_SIZE", "COMM_WORLD_LOCAL_RANK", "COMM_WORLD_LOCAL_SIZE")
        return _outer("mpirun", run, environ, tuple(f"OMPI_{name}" for name in names))
    if "TORCHELASTIC_RUN_ID" in environ and "LOCAL_RANK" in environ:
        parts = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        run = " ".join(environ.get(name, "") for name in parts)
        return _outer("torchrun", run, environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return None


def take_variables(environ: MutableMapping[str, str], outer: Outer) -> dict[str, str]:
    """Remove the variables that the other launcher set for this process alone from an environment, and return them.

    Otherwise all children would inherit them. A process of MPI would wait for ever if another process of its rank
    followed it, and a second torchrun would keep one thread per rank.
    """
    names = [name for name in environ if _is_its(name, outer)]
    # torchrun sets this variable if it starts several processes and the variable is not set.
    if outer.name == "torchrun" and outer.num_local > 1 and environ.get("OMP_NUM_THREADS") == "1":
        names.append("OMP_NUM_THREADS")
    return {name: environ.pop(name) for name in names}


def _is_its(name: str, outer: Outer) -> bool:
    if outer.name == "mpirun":
        return name.startswith(_MPI_PREFIXES)
    return name in _TORCH_NAMES or name.startswith("TORCHELASTIC_")


def _outer(name: str, run: str, environ: Mapping[str, str], variables: tuple[str, ...]) -> Outer:
    texts = [environ.get(variable, "") for variable in variables]
    numbers = [int(text) if text.isdecimal() else -1 for text in texts]
    rank, world_size, local_rank, num_local = numbers
    if not (0 <= rank < world_size and 0 <= local_rank < num_local <= world_size):
        found = ", ".join(f"{variable}={text!r:.20}" for variable, text in zip(variables, texts, strict=True))
        raise ConfigError(
            f"the variables of {name} contradict each other: {found}\n"
            f"  expected: a rank below the number of ranks, on this host and in all; start this anew with {name}"
        )
    return Outer(name=name, run=run, rank=rank, world_size=world_size, local_rank=local_rank, num_local=num_local)

"""What an examination reads: the same options, files and variables that a launcher would read here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetero.cluster import ClusterSpec, base_dir, read_cluster, read_host_names
from hetero.config import LaunchOptions
from hetero.errors import ClusterError, HeteroError

__all__ = ["Surroundings", "look_around"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The known facts about one host."""

    options: LaunchOptions
    environ: Mapping[str, str]
    base_dir: Path
    """Folder that the platform fills. It need not exist."""
    cluster: ClusterSpec | None
    """The cluster. None if no cluster is described here, or if the description is unusable."""
    hosts: tuple[str, ...]
    """All hosts in natural order. They are known even if the description does not name this host."""
    cluster_problem: str = ""
    """Why an existing description is unusable."""

    @property
    def own_host(self) -> str | None:
        """This host's name in the cluster."""
        return None if self.cluster is None else self.cluster.current_host

    @property
    def is_simulated(self) -> bool:
        """Whether this is one of the hosts of `hetero simulate`, which share a machine."""
        return "HETERO_SIMULATED" in self.environ


def look_around(options: LaunchOptions, environ: Mapping[str, str]) -> Surroundings:
    """Collect what there is to examine. Read the cluster if one is described.

    Args:
        options: Options as a launcher would have them.
        environ: Environment of this process.

    Raises:
        ConfigError: If roles in the options are malformed.
    """
    base = base_dir(environ)
    cluster: ClusterSpec | None = None
    hosts: tuple[str, ...] = ()
    problem = ""
    if _is_described(options, environ, base):
        try:
            cluster = read_cluster(
                env=environ, cluster_file=options.cluster_file, host=options.host, roles=options.roles
            )
            hosts = tuple(host.name for host in cluster.hosts)
        except ClusterError as error:
            problem = str(error)
            with contextlib.suppress(HeteroError):
                hosts = tuple(read_host_names(Path(options.cluster_file or _platform_file(base))))
    return Surroundings(
        options=options, environ=environ, base_dir=base, cluster=cluster, hosts=hosts, cluster_problem=problem
    )


def _is_described(options: LaunchOptions, environ: Mapping[str, str], base: Path) -> bool:
    if options.cluster_file is not None or "SM_HOSTS" in environ or "SM_RESOURCE_CONFIG" in environ:
        return True
    try:
        return _platform_file(base).exists()
    except OSError:
        return True  # reading the file will report the reason


def _platform_file(base: Path) -> Path:
    return base / "input/config/resourceconfig.json"

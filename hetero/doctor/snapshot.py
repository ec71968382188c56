"""Snapshot of the environment: the options, files and variables that a launcher would read here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.cluster import ClusterSpec, Platform, find_platform
from hetero.config import LaunchOptions
from hetero.errors import ClusterError, HeteroError

__all__ = ["Snapshot", "take_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The input of an examination of one host."""

    options: LaunchOptions
    environ: Mapping[str, str]
    platform: Platform
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


def take_snapshot(options: LaunchOptions, environ: Mapping[str, str]) -> Snapshot:
    """Collect the input of an examination. Read the cluster if one is described.

    Args:
        options: Options that a launcher would use.
        environ: Environment of this process.

    Raises:
        ConfigError: If roles in the options are malformed.
    """
    platform = find_platform(environ, cluster_file=options.cluster_file, name=options.platform)
    cluster: ClusterSpec | None = None
    hosts: tuple[str, ...] = ()
    problem = ""
    if platform.is_here():
        try:
            # A cluster file lists all hosts, so they do not register.
            registration = None if options.cluster_file else platform.registration()
            # On a platform with a registration, the hosts learn of each other only when the job starts. Until then, at
            # most the main host is known.
            if registration is not None:
                hosts = (registration.main_address,) if registration.main_address else ()
                return Snapshot(options=options, environ=environ, platform=platform, cluster=None, hosts=hosts)
            cluster = platform.read_cluster(host=options.host, roles=options.roles)
            hosts = tuple(host.name for host in cluster.hosts)
        except ClusterError as error:
            problem = str(error)
            # The names of the hosts may be readable although the rest of the description is not.
            with contextlib.suppress(HeteroError):
                hosts = tuple(platform.host_names())
    return Snapshot(
        options=options, environ=environ, platform=platform, cluster=cluster, hosts=hosts, cluster_problem=problem
    )

"""Machines that a file lists, for ``--cluster-file FILE --host NAME``.

The file lists only the hosts. Everything else, such as the folders and the name of the job, comes from the platform
that runs the processes.
"""

from __future__ import annotations

import socket
from pathlib import Path

from hetero.cluster.description import host_names
from hetero.cluster.document import load
from hetero.cluster.platforms.platform import ClusterDescription, Platform, PlatformWrapper

__all__ = ["ClusterFile", "read_host_names"]


class ClusterFile(PlatformWrapper):
    """A platform that takes only its list of hosts from a file. Everything else comes from another platform.

    Args:
        own_platform: The other platform, which runs the processes.
        path: The file, in the schema of ``resourceconfig.json``. It may leave out ``current_host`` and
            ``instance_type``.
    """

    name = "cluster file"
    may_change = True

    def __init__(self, own_platform: Platform, path: str) -> None:
        super().__init__(own_platform)
        self._path = path

    def describe(self) -> ClusterDescription:
        """Return the content of the file."""
        name = socket.gethostname()
        # A host may know its whole domain name, and the file only the first part of it.
        own_names = (name, name.partition(".")[0])
        return ClusterDescription(document=load(Path(self._path)), source=self._path, own_names=own_names)


def read_host_names(cluster_file: Path) -> list[str]:
    """Return all hosts of a description in natural order, without their roles or the name of this host.

    Raises:
        ClusterError: If the description cannot be read, or if it is malformed.
    """
    return host_names(load(cluster_file), source=str(cluster_file))

"""A running job that this host has joined. A trainer host of the job describes the cluster.

The description lists this host too. Everything else, such as the folders, comes from the platform that runs this
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero.cluster.platforms.platform import ClusterDescription, Folders, JobParameters, Platform

__all__ = ["Joined"]


class Joined(Platform):
    """A platform that takes its cluster and the id of the job from a job that is running.

    Args:
        below: The platform that runs this process.
        document: The description of the cluster, with this host as the current host.
        source: The trainer host that described it, for messages.
        roles: ``GROUP=ROLE`` for each group.
        job: Id of the job.
        own_address: Numeric address of this host.
    """

    name = "joined job"

    def __init__(
        self,
        below: Platform,
        document: Mapping[str, object],
        *,
        source: str,
        roles: Sequence[str],
        job: str,
        own_address: str,
    ) -> None:
        super().__init__({**below.environ, "HETERO_JOB_ID": job})
        self._below = below
        self._description = ClusterDescription(document=document, source=source, roles=roles)
        self._job = job
        self.own_address = own_address
        self.stripped = below.stripped
        self.stop_signals = below.stop_signals
        self.signals_every_process = below.signals_every_process
        self.kill_after_s = below.kill_after_s

    def is_here(self) -> bool:
        """Return True, because this host has joined the job."""
        return True

    def describe(self) -> ClusterDescription:
        """Return what the trainer host has answered."""
        return self._description

    @property
    def folders(self) -> Folders:
        """The folders of the platform below."""
        return self._below.folders

    def job_name(self) -> str:
        """Return the id of the job."""
        return self._job

    def parameters(self) -> JobParameters | None:
        """Return the parameters of the platform below."""
        return self._below.parameters()

    def num_gpus(self) -> int | None:
        """Return the number of accelerators that the platform below states."""
        return self._below.num_gpus()

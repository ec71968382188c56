"""A running job that this host has joined. A trainer host of the job describes the cluster.

The description lists this host too. Everything else, such as the folders, comes from the platform that runs this
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero.cluster.platforms.platform import ClusterDescription, Platform, PlatformWrapper

__all__ = ["Joined"]


class Joined(PlatformWrapper):
    """A platform that takes its cluster and the id of the job from a job that is running.

    Args:
        own_platform: The platform that runs this process.
        document: The description of the cluster, with this host as the current host.
        source: The trainer host that described it, for messages.
        roles: ``GROUP=ROLE`` for each group.
        job: Id of the job.
        own_address: Numeric address of this host.
    """

    name = "joined job"

    def __init__(
        self,
        own_platform: Platform,
        document: Mapping[str, object],
        *,
        source: str,
        roles: Sequence[str],
        job: str,
        own_address: str,
    ) -> None:
        # The id must be that of the joined job. `Platform.job_id` prefers this variable to the platform's own name.
        super().__init__(own_platform, {**own_platform.environ, "HETERO_JOB_ID": job})
        self._description = ClusterDescription(document=document, source=source, roles=roles)
        self.own_address = own_address

    def describe(self) -> ClusterDescription:
        """Return what the trainer host has answered."""
        return self._description

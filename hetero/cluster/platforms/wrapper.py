"""The base of platforms that take only the description of the cluster from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.cluster.platforms.platform import Folders, JobParameters, Platform
from hetero.cluster.spec import ClusterSpec

__all__ = ["PlatformWrapper"]


class PlatformWrapper(Platform):
    """A platform that takes only the description of the cluster from somewhere else.

    Args:
        below: The platform that runs this process.
        environ: Environment that replaces that of the platform below. None: the same.
    """

    def __init__(self, below: Platform, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(below.environ if environ is None else environ)
        self._below = below
        self.stripped = below.stripped
        self.stop_signals = below.stop_signals
        self.kill_after_s = below.kill_after_s

    def is_here(self) -> bool:
        """Return True, because the user or the job has named the description."""
        return True

    @property
    def folders(self) -> Folders:
        """The folders of the platform below."""
        return self._below.folders

    def job_name(self) -> str:
        """Return the job's name on the platform below."""
        return self._below.job_name()

    def parameters(self) -> JobParameters | None:
        """Return the parameters of the platform below."""
        return self._below.parameters()

    def num_gpus(self) -> int | None:
        """Return the number of accelerators that the platform below states."""
        return self._below.num_gpus()

    def own_variables(self, cluster: ClusterSpec) -> dict[str, str]:
        """Return the variables of the platform below."""
        return self._below.own_variables(cluster)

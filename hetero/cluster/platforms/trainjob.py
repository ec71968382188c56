"""Kubeflow TrainJob (Trainer v2), which makes a JobSet.

The pods that train have torchrun's defaults in ``PET_*``. With the runtime of `hetero render trainjob`, the pods also
have the variables of a JobSet, and so have the data hosts, which have no ``PET_*``. With another runtime there are only
the pods that train, and their names follow from ``PET_MASTER_ADDR``.
"""

from __future__ import annotations

import re

from hetero.cluster.groups import group_document, stated_groups
from hetero.cluster.platforms.jobset import JobSet
from hetero.cluster.platforms.platform import ClusterDescription

__all__ = ["TrainJob"]

_MASTER = re.compile(r"([A-Za-z0-9-]{1,200})-0(\.[A-Za-z0-9.-]{1,200})?")
_MAX_NODES = 4096


class TrainJob(JobSet):
    """A pod of a TrainJob."""

    name = "trainjob"
    _source = "PET_*"

    def is_here(self) -> bool:
        """Return whether this process runs in a pod of a TrainJob that trains."""
        return "PET_NNODES" in self.environ and "PET_NODE_RANK" in self.environ

    def describe(self) -> ClusterDescription:
        """Return the groups of the JobSet, or the pods that train."""
        if super().is_here() and stated_groups(self.environ):
            return super().describe()
        nodes = self.environ["PET_NNODES"].rpartition(":")[2]  # may be 1:4
        if not (nodes.isascii() and nodes.isdigit() and 1 <= int(nodes) <= _MAX_NODES):
            raise self._error(f"PET_NNODES is {nodes!r:.40}", f"a number from 1 to {_MAX_NODES}", "")
        rank = self._index("PET_NODE_RANK")
        master = self.environ.get("PET_MASTER_ADDR", "")
        found = _MASTER.fullmatch(master)
        if found is None and int(nodes) > 1:
            raise self._error(
                f"PET_MASTER_ADDR is {master!r:.80}",
                "the address of the first pod, such as JOB-node-0-0.JOB",
                "use the runtime of hetero render trainjob",
            )
        hosts = (
            [master or "localhost"] if found is None else [f"{found[1]}-{i}{found[2] or ''}" for i in range(int(nodes))]
        )
        if rank >= len(hosts):
            raise self._error(
                f"PET_NODE_RANK is {rank}, and PET_NNODES {nodes}", "a rank below the number of nodes", ""
            )
        document = {"instance_groups": [group_document("trainer", "", hosts)], "current_host": hosts[rank]}
        return ClusterDescription(document=document, source=f"the {self._source} environment")

    def _jobset(self) -> str:
        name = self.environ.get("JOBSET_NAME", "")
        return name or self.environ.get("PET_MASTER_ADDR", "").partition(".")[0].removesuffix("-node-0-0")

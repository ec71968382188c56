"""AWS Batch multi-node parallel jobs. A node learns only the address of the main node, where all nodes register.

Batch numbers the nodes of a job from 0. ``HETERO_GROUPS`` divides them into groups in the order of their numbers, as
the job definition does with its node ranges. The main node waits until every node has registered. The names of the
hosts are their addresses, because other hosts cannot resolve the names of nodes. The job ends when the main node ends,
so the main node belongs into the group that trains.

Source: https://docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html#mnp-env-vars
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hetero.cluster.document import MAX_HOSTS
from hetero.cluster.groups import GROUPS_VARIABLE, StatedGroup, group_document, stated_groups
from hetero.cluster.platforms.platform import ClusterDescription, Folders, Platform, Registration
from hetero.cluster.platforms.pods import pod_folders
from hetero.documents.diagnosis import Diagnosis, ok
from hetero.errors import ClusterError

__all__ = ["AwsBatch"]

_ONLY_GROUP = "trainer"
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


class AwsBatch(Platform):
    """A node of a multi-node parallel job."""

    name = "aws-batch"
    variables = ("AWS_BATCH_",)
    source = "AWS_BATCH_*"

    def is_here(self) -> bool:
        """Return whether this process runs on a node of a multi-node parallel job."""
        return "AWS_BATCH_JOB_NUM_NODES" in self.environ

    def registration(self) -> Registration | None:
        """Return how this node finds the other nodes. None for a job of one node."""
        num_nodes, index, main_index = (
            self._number(f"AWS_BATCH_JOB_{name}", to_do="run the job as a multi-node parallel job of AWS Batch")
            for name in ("NUM_NODES", "NODE_INDEX", "MAIN_NODE_INDEX")
        )
        if index >= num_nodes or main_index >= num_nodes:
            raise self._error(
                f"node {index} of {num_nodes}, with node {main_index} as the main node",
                f"1 to {MAX_HOSTS} nodes, numbered from 0",
            )
        groups = self._groups(num_nodes)
        # A single node has no other node to find. Return only now, because the checks above are also for a single node.
        if num_nodes == 1:
            return None
        is_main = index == main_index
        # AWS Batch does not tell the main node its own address.
        main_address = "" if is_main else self.environ.get(_MAIN_ADDRESS, "")
        if not is_main and not main_address:
            raise self._error(f"{_MAIN_ADDRESS} is not set", "the address of the main node")
        group_of_nodes = [group for group in groups for _ in range(group.count)]
        return Registration(
            num_hosts=num_nodes,
            main_address=main_address,
            group=group_of_nodes[index].name,
            instance_type=group_of_nodes[index].instance_type,
            groups=tuple(group.name for group in groups),
        )

    def describe(self) -> ClusterDescription:
        """Return the description of a job of one node. Other jobs are described by their registrar."""
        if self.registration() is not None:
            raise self._error("several nodes", "one node, or nodes that have registered with the main node")
        (group,) = self._groups(1)
        # The loopback address is enough, because the job has no other host.
        return self._described([group_document(group.name, group.instance_type, ["127.0.0.1"])], "127.0.0.1")

    @property
    def folders(self) -> Folders:
        """Folders below ``HETERO_WORKSPACE`` or ``/workspace``, a volume of the job definition."""
        folders = pod_folders(self.environ)
        # The failure file of `pod_folders` is for Kubernetes.
        return dataclasses.replace(folders, failure=folders.output / "failure")

    def job_name(self) -> str:
        """Return the id of the job with the number of the job's attempt, and without the number of the node."""
        # The id of a node is JOB#NUMBER.
        job = self.environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
        attempt = self.environ.get("AWS_BATCH_JOB_ATTEMPT", "")
        return f"{job}-{attempt}" if job and attempt else job

    def examine(self, own_host: str | None, port: int) -> Iterator[Diagnosis]:
        """Yield where this node registers."""
        try:
            registration = self.registration()
        except ClusterError:
            # `hetero doctor` reports this error when it reads the description of the cluster.
            return
        if registration is None:
            return
        main = registration.main_address
        where = f"with the main node {main}" if main else "with this node, the main node"
        yield ok(f"a node of group {registration.group}; {registration.num_hosts} nodes register {where}")

    def _groups(self, num_nodes: int) -> list[StatedGroup]:
        """Return the groups of a job. Without ``HETERO_GROUPS``, all nodes are one group.

        Raises:
            ClusterError: If the groups do not have ``num_nodes`` hosts together.
        """
        groups = stated_groups(self.environ) or [StatedGroup(name=_ONLY_GROUP, instance_type="", count=num_nodes)]
        num_hosts = sum(group.count for group in groups)
        if num_hosts != num_nodes:
            raise self._error(
                f"{GROUPS_VARIABLE} has {num_hosts} hosts, and the job has {num_nodes} nodes",
                "one host for each node",
                f"correct {GROUPS_VARIABLE} in the job definition",
            )
        return groups

"""Kubeflow TrainJob (Trainer v2), which makes a JobSet.

The pods that train have torchrun's defaults in ``PET_*``. Data hosts have no ``PET_*``. With the runtime of
`hetero render trainjob`, all pods also have the variables of a JobSet. With another runtime, all pods train, and their
names follow from ``PET_MASTER_ADDR``.

A TrainJob makes a JobSet from its runtime. The rendered runtime has the group that trains as the job ``node``, and one
job for each group of data hosts.
"""

from __future__ import annotations

import re

from hetero.cluster.document import MAX_HOSTS
from hetero.cluster.groups import group_document, stated_groups
from hetero.cluster.platforms.jobset import JobSet, replicated_job
from hetero.cluster.platforms.platform import ClusterDescription
from hetero.cluster.rendering.kubernetes import check_pods, head, indented, pod, text, time_limit
from hetero.cluster.rendering.request import RenderRequest
from hetero.cluster.spec import Role
from hetero.errors import ConfigError

__all__ = ["TrainJob"]

# The name of a TrainJob may end with -0 too, so only the last -0 is the number of the pod.
_MASTER = re.compile(r"([A-Za-z0-9-]{1,200})-0(\.[A-Za-z0-9.-]{1,200})?")
_TRAINER = "node"
"""The group that trains, as a job of the JobSet. Kubeflow's convention."""


class TrainJob(JobSet):
    """A pod of a TrainJob."""

    name = "trainjob"
    renders = "a TrainJob of Kubeflow, with its runtime"
    source = "PET_*"

    def is_here(self) -> bool:
        """Return whether this process runs in a pod of a TrainJob that trains."""
        return "PET_NNODES" in self.environ and "PET_NODE_RANK" in self.environ

    def describe(self) -> ClusterDescription:
        """Return the groups of the JobSet, or the pods that train."""
        # With the runtime of `hetero render trainjob`, the pods have the variables of a JobSet.
        if super().is_here() and stated_groups(self.environ):
            return super().describe()
        # With another runtime, all pods train. Their number may be stated as MIN:MAX.
        stated = self.environ["PET_NNODES"].rpartition(":")[2]
        if not (stated.isascii() and stated.isdigit() and 1 <= int(stated) <= MAX_HOSTS):
            raise self._error(f"PET_NNODES is {stated!r:.40}", f"a number from 1 to {MAX_HOSTS}")
        num_pods = int(stated)
        rank = self._index("PET_NODE_RANK")
        master = self.environ.get("PET_MASTER_ADDR", "")
        found = _MASTER.fullmatch(master)
        # The names of all pods follow from the name of the first one. A single pod needs no such name.
        if found is not None:
            hosts = [f"{found[1]}-{index}{found[2] or ''}" for index in range(num_pods)]
        elif num_pods == 1:
            hosts = [master or "localhost"]
        else:
            raise self._error(
                f"PET_MASTER_ADDR is {master!r:.80}",
                "the address of the first pod, such as JOB-node-0-0.JOB",
                "use the runtime of hetero render trainjob",
            )
        if rank >= num_pods:
            raise self._error(f"PET_NODE_RANK is {rank}, and PET_NNODES {stated}", "a rank below the number of nodes")
        return self._described([group_document("trainer", "", hosts)], hosts[rank])

    def _jobset(self) -> str:
        """Return the name of the JobSet. Without its variable, the name is a part of the first pod's name."""
        name = self.environ.get("JOBSET_NAME", "")
        return name or self.environ.get("PET_MASTER_ADDR", "").partition(".")[0].removesuffix("-node-0-0")

    @classmethod
    def render(cls, request: RenderRequest) -> str:
        """Return the manifest of the runtime and of the job.

        Raises:
            ConfigError: If the image is missing, a name cannot be the name of a pod, or a group other than ``node``
                trains.
        """
        check_pods(request, what="a TrainJob or of its jobs")
        trainers = request.members(Role.TRAINER)
        if len(trainers) != 1 or trainers[0].name != _TRAINER:
            raise ConfigError(
                f"the groups that train are {', '.join(group.name for group in trainers)}; a TrainJob has one, whose "
                f"name is {_TRAINER}\n  to do: give --group {_TRAINER}={trainers[0].instance_type}:{trainers[0].count}"
            )
        (trainer,) = trainers
        # The runtime, with the trainers as the job that Kubeflow expects.
        lines = [
            *head(request, "TrainJob"),
            "apiVersion: trainer.kubeflow.org/v1alpha1",
            "kind: TrainingRuntime",
            "metadata:",
            f"  name: {text(request.name)}",
            "  labels: {trainer.kubeflow.org/framework: torch}",
            "spec:",
            "  mlPolicy:",
            f"    numNodes: {trainer.count}",
            "    torch: {}",
            "  template:",
            "    spec:",
            "      network: {enableDNSHostnames: true, publishNotReadyAddresses: true}",
            "      # The job has ended when the trainers have, whatever the data hosts do.",
            f"      successPolicy: {{operator: All, targetReplicatedJobs: [{_TRAINER}]}}",
            "      replicatedJobs:",
            f"      - name: {_TRAINER}  # {trainer.instance_type}",
            "        replicas: 1",
            "        template:",
            "          metadata:",
            "            labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}",
            "          spec:",
            "            backoffLimit: 0  # a trainer that fails ends the job",
            *indented(time_limit(request), 12),
            "            template:",
            "              spec:",
            *indented(pod(request, trainer, restart_policy="Never", is_of_jobset=True, container=_TRAINER), 16),
        ]
        # Kubeflow knows no data hosts, so each group of data hosts is one more job of the runtime.
        for group in request.members(Role.DATA):
            lines += indented(replicated_job(request, group, Role.DATA), 6)
        # The job itself, which only names the runtime.
        lines += [
            "---",
            "apiVersion: trainer.kubeflow.org/v1alpha1",
            "kind: TrainJob",
            f"metadata: {{name: {text(request.name)}}}",
            "spec:",
            "  runtimeRef:",
            "    apiGroup: trainer.kubeflow.org",
            "    kind: TrainingRuntime",
            f"    name: {text(request.name)}",
            f"  trainer: {{numNodes: {trainer.count}}}",
        ]
        return "\n".join(lines) + "\n"

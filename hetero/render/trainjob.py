"""Renders a job as a TrainJob of Kubeflow with a runtime of its own. Pure.

A TrainJob makes a JobSet from its runtime. The runtime has the group that trains as the job ``node``, by Kubeflow's
convention, and one job for each group of data hosts.
"""

from __future__ import annotations

from hetero.cluster.spec import Role
from hetero.errors import ConfigError
from hetero.render.jobset import replicated_job, time_limit
from hetero.render.kubernetes import DOWNWARD, head, indented, pod, text
from hetero.render.request import RenderRequest
from hetero.render.spot import check_data_groups

__all__ = ["render_trainjob"]

_TRAINER = "node"


def render_trainjob(request: RenderRequest) -> str:
    """Return the manifest of the runtime and of the job.

    Raises:
        ConfigError: If there is no image, a name cannot be that of a pod, or not exactly one group trains.
    """
    request.check_image()
    request.check_dns_names("a TrainJob or of its jobs")
    check_data_groups(request)
    trainers = request.members(Role.TRAINER)
    if len(trainers) != 1 or trainers[0].name != _TRAINER:
        raise ConfigError(
            f"the groups that train are {', '.join(group.name for group in trainers)}; a TrainJob has one, whose name "
            f"is {_TRAINER}\n  to do: give --group {_TRAINER}={trainers[0].instance_type}:{trainers[0].count}"
        )
    (trainer,) = trainers
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
        *indented(pod(request, trainer, restart_policy="Never", labels=DOWNWARD, container=_TRAINER), 16),
    ]
    for group in request.members(Role.DATA):
        lines += indented(replicated_job(request, group, Role.DATA), 6)
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

"""Renders a job as a JobSet of Kubernetes. Pure."""

from __future__ import annotations

from hetero.cluster.groups import StatedGroup
from hetero.cluster.spec import Role
from hetero.render.kubernetes import DOWNWARD, head, indented, pod, text
from hetero.render.request import RenderRequest
from hetero.render.spot import check_data_groups

__all__ = ["DATA_RESTARTS", "render_jobset", "replicated_job", "time_limit"]

DATA_RESTARTS = 100
"""Restarts of data pods until the job fails. A data host that restarts joins the job again."""
_SPOT_FAILURES = [
    "      podFailurePolicy:  # a pod that is moved from a spot node does not count; it needs restartPolicy Never",
    '        rules: [{action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}]',
]


def render_jobset(request: RenderRequest) -> str:
    """Return the manifest.

    Raises:
        ConfigError: If there is no image, or a name cannot be that of a pod.
    """
    request.check_image()
    request.check_dns_names("a JobSet or of its jobs")
    check_data_groups(request)
    trainers = [group.name for group in request.members(Role.TRAINER)]
    lines = [
        *head(request, "JobSet"),
        "apiVersion: jobset.x-k8s.io/v1alpha2",
        "kind: JobSet",
        f"metadata: {{name: {text(request.name)}}}",
        "spec:",
        "  network: {enableDNSHostnames: true, publishNotReadyAddresses: true}",
        "  # The job has ended when the trainers have, whatever the data hosts do.",
        f"  successPolicy: {{operator: All, targetReplicatedJobs: {text(trainers)}}}",
        "  # A restart of the whole job goes on from the last checkpoint. State how often.",
        "  failurePolicy: {maxRestarts: 0}",
        "  replicatedJobs:",
    ]
    for group, role in zip(request.groups, request.roles, strict=True):
        lines += indented(replicated_job(request, group, role), 2)
    return "\n".join(lines) + "\n"


def replicated_job(request: RenderRequest, group: StatedGroup, role: Role) -> list[str]:
    """Return the replicated job of a group, with one pod per host."""
    is_data, is_spot = role is Role.DATA, request.is_spot(group)
    return [
        f"- name: {text(group.name)}  # {group.instance_type}",
        "  replicas: 1",
        "  template:",
        "    spec:",
        f"      parallelism: {group.count}",
        f"      completions: {group.count}",
        "      completionMode: Indexed",
        *(
            [f"      backoffLimit: {DATA_RESTARTS}  # a data host that restarts joins again, and the job goes on"]
            if is_data
            else ["      backoffLimit: 0  # a trainer that fails ends the job"]
        ),
        *(_SPOT_FAILURES if is_spot else []),
        *indented(time_limit(request), 6),
        "      template:",
        "        spec:",
        *indented(
            pod(request, group, restart_policy="OnFailure" if is_data and not is_spot else "Never", labels=DOWNWARD), 10
        ),
    ]


def time_limit(request: RenderRequest) -> list[str]:
    """Return the time limit of a job or pod of Kubernetes. Empty if the request has none."""
    return [] if request.hours is None else [f"activeDeadlineSeconds: {max(1, round(3600 * request.hours))}"]

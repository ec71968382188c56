"""Renders a job for Volcano. Pure."""

from __future__ import annotations

from hetero.cluster.groups import StatedGroup
from hetero.cluster.spec import Role
from hetero.render.jobset import DATA_RESTARTS, time_limit
from hetero.render.kubernetes import head, indented, pod, text
from hetero.render.request import RenderRequest
from hetero.render.spot import check_data_groups

__all__ = ["render_volcano"]


def render_volcano(request: RenderRequest) -> str:
    """Return the manifest.

    Raises:
        ConfigError: If there is no image, or a name cannot be that of a pod.
    """
    request.check_image()
    request.check_dns_names("a Volcano job or of its tasks")
    check_data_groups(request)
    queue = request.settings.get("queue", {}).get("", "")
    total = sum(group.count for group in request.groups)
    lines = [
        *head(request, "Volcano"),
        "apiVersion: batch.volcano.sh/v1alpha1",
        "kind: Job",
        f"metadata: {{name: {text(request.name)}}}",
        "spec:",
        "  schedulerName: volcano",
        *([f"  queue: {text(queue)}"] if queue else []),
        f"  minAvailable: {total}  # all hosts start together",
        "  plugins:",
        "    env: []  # the number of each pod in its task",
        '    svc: ["--publish-not-ready-addresses=true"]  # the hosts of all tasks, and their names',
        f"  maxRetry: {DATA_RESTARTS}",
        "  tasks:",
    ]
    for group, role in zip(request.groups, request.roles, strict=True):
        lines += indented(_task(request, group, role), 2)
    return "\n".join(lines) + "\n"


def _task(request: RenderRequest, group: StatedGroup, role: Role) -> list[str]:
    is_data = role is Role.DATA
    policies = (
        ["  # A data host that restarts joins again, and the job goes on.", "  policies: []"]
        if is_data
        else [
            "  policies:",
            "  - {event: PodFailed, action: AbortJob}  # a trainer that fails ends the job",
            "  - {event: TaskCompleted, action: CompleteJob}  # the end of the trainers is the end of the job",
        ]
    )
    return [
        f"- name: {text(group.name)}  # {group.instance_type}",
        f"  replicas: {group.count}",
        *policies,
        "  template:",
        "    spec:",
        *indented(time_limit(request), 6),
        *indented(pod(request, group, restart_policy="OnFailure" if is_data else "Never"), 6),
    ]

"""Volcano: one task per group, with the plugins ``svc`` and ``env``. `hetero render volcano` makes the manifest.

The plugin svc gives every pod a variable ``VC_<TASK>_HOSTS`` for each task, with ``_`` for each ``-`` in the name of
the task. The plugin env gives every pod ``VC_TASK_INDEX``. No variable names the task of a pod. The task follows from
the name of the pod, which is also the name of the host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from hetero.cluster.document import MAX_FILE_BYTES, MAX_HOSTS, listing
from hetero.cluster.groups import GROUPS_VARIABLE, StatedGroup, group_document, stated_groups
from hetero.cluster.platforms.platform import ClusterDescription
from hetero.cluster.platforms.pods import Pod
from hetero.cluster.rendering.kubernetes import (
    DATA_RESTARTS,
    POD_SETTINGS,
    check_pods,
    head,
    indented,
    pod,
    text,
    time_limit,
)
from hetero.cluster.rendering.request import RenderRequest
from hetero.cluster.spec import Role

__all__ = ["Volcano"]

_HOSTS = re.compile(r"VC_([A-Z0-9_]{1,63})_HOSTS")


class Volcano(Pod):
    """A pod of a Volcano job."""

    name = "volcano"
    variables = ("VC_", "VK_TASK_INDEX")
    source = "VC_*"
    may_change = True
    renders = "a job of Volcano"
    settings: ClassVar[Mapping[str, str]] = {**POD_SETTINGS, "queue": "queue of the job"}
    hosts_folder: ClassVar[Path] = Path("/etc/volcano")
    """Folder where the plugin svc mounts the hosts of each task."""

    def is_here(self) -> bool:
        """Return whether this process runs in a pod of a Volcano job with the plugin env."""
        return "VC_TASK_INDEX" in self.environ

    def describe(self) -> ClusterDescription:
        """Return the tasks of the job and their pods."""
        tasks = self._tasks()
        if not tasks:
            raise self._error(
                "no VC_<TASK>_HOSTS",
                "the hosts of each task",
                "add the plugin svc: [] to the job, as hetero render volcano does",
            )
        # Volcano turns the name of a task into a part of the variable's name. Compare in the form that `_tasks`
        # returns.
        stated = {group.name.replace("-", "_").lower(): group for group in stated_groups(self.environ)}
        unknown = sorted(set(stated) - set(tasks))
        if unknown:
            raise self._error(
                f"{GROUPS_VARIABLE} has {listing(unknown)}, and the tasks are {listing(sorted(tasks))}",
                "a task with the name of each group",
                f"correct {GROUPS_VARIABLE}",
            )
        groups = []
        for name, hosts in tasks.items():
            group = stated.get(name)
            groups.append(group_document(group.name if group else name, group.instance_type if group else "", hosts))
        return self._described(groups, self._own(tasks))

    def job_name(self) -> str:
        """Return the name of the job, which is the subdomain of its pods."""
        return next((host.partition(".")[2] for hosts in self._tasks().values() for host in hosts), "")

    def _tasks(self) -> dict[str, list[str]]:
        """Return the hosts of each task, by the task's name in lower case with ``_``."""
        tasks = {}
        for variable, value in sorted(self.environ.items()):
            match = _HOSTS.fullmatch(variable)
            hosts = [host.strip() for host in value.split(",") if host.strip()]
            if match and hosts:
                # Keep one host more than allowed. The description is then rejected instead of shortened.
                tasks[match[1].lower()] = hosts[: MAX_HOSTS + 1]
        # Prefer the files, because they list hosts that are added later. The variables do not change after the start.
        return {name: self._from_file(name) or hosts for name, hosts in tasks.items()}

    def _from_file(self, task: str) -> list[str]:
        """Return the hosts in a task's mounted file, which follows changes of the job. Empty without a file."""
        for path in sorted(self.hosts_folder.glob("*.host")):
            if path.stem.replace("-", "_").lower() == task:
                try:
                    with path.open(encoding="utf-8") as file:
                        hosts = file.read(MAX_FILE_BYTES).split()
                except (OSError, UnicodeError):
                    # The caller then uses the variable.
                    return []
                return hosts[: MAX_HOSTS + 1]
        return []

    def _own(self, tasks: dict[str, list[str]]) -> str:
        """Return the name of this pod among the hosts of all tasks.

        Raises:
            ClusterError: If not exactly one host has the name.
        """
        name = self.environ.get("HOSTNAME", "")
        all_hosts = [host for hosts in tasks.values() for host in hosts]
        matches = [host for host in all_hosts if name and host.partition(".")[0] == name]
        if len(matches) != 1:
            raise self._error(
                f"HOSTNAME is {name!r:.80}, which is {'more than one' if matches else 'no'} host of a task",
                "the name of this pod, which is one of VC_<TASK>_HOSTS",
                "do not set hostname in the pod's template",
            )
        return matches[0]

    @classmethod
    def render(cls, request: RenderRequest) -> str:
        """Return the manifest.

        Raises:
            ConfigError: If the image is missing, or a name cannot be the name of a pod.
        """
        check_pods(request, what="a Volcano job or of its tasks")
        queue = request.setting("queue")
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
    """Return the task of a group, with one pod per host."""
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

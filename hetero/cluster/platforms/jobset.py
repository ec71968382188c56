"""Kubernetes JobSet: one replicated job per group. `hetero render jobset` makes the manifest.

A pod knows its own place from labels, which the manifest turns into variables by the downward API: ``JOBSET_NAME``,
``REPLICATED_JOB_NAME``, ``JOB_INDEX``, and ``JOB_COMPLETION_INDEX`` of an indexed job. Nothing tells a pod how many
pods the other groups have, so the manifest has the groups in ``HETERO_GROUPS``. The names of the pods follow by rule:
``JOBSET-GROUP-JOBINDEX-PODINDEX.SUBDOMAIN``. The subdomain is the JobSet's name, unless ``JOBSET_SUBDOMAIN`` is set.
"""

from __future__ import annotations

from hetero.cluster.document import close, listing
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

__all__ = ["JobSet", "replicated_job"]

_SPOT_FAILURES = [
    "      podFailurePolicy:  # a pod that is moved from a spot node does not count; it needs restartPolicy Never",
    '        rules: [{action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}]',
]


class JobSet(Pod):
    """A pod of a JobSet."""

    name = "jobset"
    variables = ("JOBSET_", "REPLICATED_JOB_NAME", "JOB_INDEX", "JOB_COMPLETION_INDEX", "PET_")
    renders = "a JobSet of Kubernetes"
    settings = POD_SETTINGS
    source = "JOBSET_*"

    def is_here(self) -> bool:
        """Return whether this process runs in a pod of a JobSet whose manifest has the variables."""
        return bool(self.environ.get("JOBSET_NAME") and self.environ.get("REPLICATED_JOB_NAME"))

    def describe(self) -> ClusterDescription:
        """Return the groups of the manifest, with the names of their pods."""
        groups = stated_groups(self.environ)
        if not groups:
            raise self._error(
                f"{GROUPS_VARIABLE} is not set",
                "the groups of the job, for example dnn_group=GPU:8:1 data_group=CPU:32:2",
                "make the manifest with hetero render jobset, or set the variable in all replicated jobs",
            )
        # Check that this pod belongs to a group of the job.
        own_job = self.environ["REPLICATED_JOB_NAME"]
        names = [group.name for group in groups]
        if own_job not in names:
            guess = close(own_job, names)
            raise self._error(
                f"replicated job {own_job!r:.80}, and {GROUPS_VARIABLE} has {listing(names)}",
                "a group with the name of each replicated job",
                f"write {own_job!r:.80} for {guess!r}" if guess else "correct the variable",
            )
        # A manifest may lack this variable, because each group has the job index 0.
        if self._index("JOB_INDEX", default="0") != 0:
            raise self._error(
                f"JOB_INDEX is {self.environ['JOB_INDEX']:.20}, so the replicated job has several replicas",
                "replicas: 1, and the hosts of a group as parallelism and completions of its job",
                "make the manifest with hetero render jobset",
            )
        # Nothing lists the pods of other groups. Their names follow by rule.
        host = self._host(own_job, self._index("JOB_COMPLETION_INDEX"))
        documents = [
            group_document(group.name, group.instance_type, [self._host(group.name, i) for i in range(group.count)])
            for group in groups
        ]
        return self._described(documents, host)

    def job_name(self) -> str:
        """Return the JobSet's name with the number of its restart, because pods of an earlier start may still run."""
        restart = self.environ.get("JOBSET_RESTART_ATTEMPT", "")
        return "-".join(part for part in (self._jobset(), restart) if part)

    def _jobset(self) -> str:
        return self.environ.get("JOBSET_NAME", "")

    def _host(self, group: str, index: int) -> str:
        """Return the name of a pod: JOBSET-GROUP-JOBINDEX-PODINDEX.SUBDOMAIN. Each group has the job index 0."""
        subdomain = self.environ.get("JOBSET_SUBDOMAIN") or self._jobset()
        return f"{self._jobset()}-{group}-0-{index}.{subdomain}"

    def _index(self, variable: str, *, default: str = "") -> int:
        advice = "use completionMode: Indexed, as hetero render jobset does"
        return self._number(variable, default=default, expected="the index of this pod", to_do=advice)

    @classmethod
    def render(cls, request: RenderRequest) -> str:
        """Return the manifest.

        Raises:
            ConfigError: If the image is missing, or a name cannot be the name of a pod.
        """
        check_pods(request, what="a JobSet or of its jobs")
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
    # With OnFailure, Kubernetes restarts a data host that fails, and the host joins the job again. On spot nodes, the
    # manifest has a podFailurePolicy, which Kubernetes accepts only with Never. The Job then makes a new pod instead.
    restart_policy = "OnFailure" if is_data and not is_spot else "Never"
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
        *indented(pod(request, group, restart_policy=restart_policy, is_of_jobset=True), 10),
    ]

"""What the manifests of Kubernetes have in common: text in YAML, and the pod of a group. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hetero.cluster.groups import StatedGroup
from hetero.cluster.rendering.request import GRACE_S, PORT, RenderRequest, machine_of, resources_of
from hetero.cluster.rendering.spot import check_data_groups, node_label, notes, tolerations

__all__ = ["DATA_RESTARTS", "POD_SETTINGS", "check_pods", "head", "indented", "pod", "text", "time_limit"]

_JOBSET_LABELS = {
    "JOBSET_NAME": "jobset.sigs.k8s.io/jobset-name",
    "REPLICATED_JOB_NAME": "jobset.sigs.k8s.io/replicatedjob-name",
    "JOB_INDEX": "jobset.sigs.k8s.io/job-index",
    "JOBSET_RESTART_ATTEMPT": "jobset.sigs.k8s.io/restart-attempt",
}
"""The variables that a pod of a JobSet gets from its labels, by the downward API, and the label of each variable."""
POD_SETTINGS = {
    "volume-claim": "claim of the volume for results and checkpoints. Default: a folder of each pod",
    "node-selector": "label LABEL=VALUE of the nodes",
}
"""See `Platform.settings`."""
DATA_RESTARTS = 100
"""Restarts of data pods until the job fails. A data host that restarts joins the job again."""
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"  # a well-known label, which the cloud gives to its nodes
_TOKEN = "/run/hetero/token"
_WORKSPACE = "/workspace"
_USER = 1000
"""User and group of a pod's processes. Pod Security "restricted" forbids root. The group may read the token and write
to the volumes."""
_GPU_CPUS, _GPU_GIB = 2, 8
"""Least request for each GPU: half of the smallest machine with a GPU (g4dn.xlarge and g5.xlarge have 4 vCPUs and 16
GiB), because the node's own programs need a part of the rest."""
_CPU_GIB = 1
"""Least request in GiB for each CPU: what the machines with the least memory have (n2-highcpu)."""


def check_pods(request: RenderRequest, what: str) -> None:
    """Raise `ConfigError` if a job cannot run in pods.

    Args:
        request: The job.
        what: What the names must fit, for example ``a JobSet or of its jobs``.
    """
    request.check_image()
    request.check_dns_names(what)
    check_data_groups(request)


def text(value: object) -> str:
    """Return a value as YAML in one line. Every JSON text is YAML."""
    return json.dumps(value, ensure_ascii=False)


def indented(lines: Iterable[str], spaces: int) -> list[str]:
    """Return lines with spaces in front."""
    return [" " * spaces + line if line else line for line in lines]


def head(request: RenderRequest, kind: str) -> list[str]:
    """Return the comment at the top of a manifest.

    Args:
        request: The job.
        kind: The kind of the manifest, for example ``JobSet``.
    """
    secret = f"kubectl create secret generic {request.name}-token --from-literal=token=$(openssl rand -hex 32)"
    return [
        f"# hetero render {kind.lower()}: {request.groups_text}",
        "#",
        "# 1. Make the token. Only pods that can read this secret can join the job:",
        f"#      {secret}",
        "# 2. Submit the job:  kubectl apply -f FILE",
        *notes(request),
    ]


def pod(
    request: RenderRequest,
    group: StatedGroup,
    *,
    restart_policy: str,
    is_of_jobset: bool = False,
    container: str = "hetero",
) -> list[str]:
    """Return the spec of the pods of a group, as lines of YAML.

    Args:
        request: The job.
        group: The group.
        restart_policy: ``Never`` or ``OnFailure``.
        is_of_jobset: Whether the pod belongs to a JobSet, and so needs the variables that say which pod it is.
        container: Name of the container.
    """
    claim = request.setting("volume-claim", group)
    workspace = f"persistentVolumeClaim: {{claimName: {text(claim)}}}" if claim else "emptyDir: {}"
    claim_note = "  # ReadWriteMany, if its pods are on several nodes" if claim else ""
    node_labels = _node_labels(request, group)
    spot_tolerations = [f"- {text(each)}" for each in tolerations()] if request.is_spot(group) else []
    return [
        f"restartPolicy: {restart_policy}",
        f"terminationGracePeriodSeconds: {GRACE_S}  # to save a checkpoint",
        *([f"nodeSelector: {text(node_labels)}"] if node_labels else []),
        *(["tolerations:  # spot nodes of GKE and AKS", *spot_tolerations] if spot_tolerations else []),
        'securityContext:  # as Pod Security "restricted" demands. The image\'s files must be readable for this user',
        "  runAsNonRoot: true",
        f"  runAsUser: {_USER}",
        f"  runAsGroup: {_USER}",
        f"  fsGroup: {_USER}  # may read the token and write to the volumes",
        # By default, Kubernetes changes the owner of every file of a volume whenever a pod starts.
        "  fsGroupChangePolicy: OnRootMismatch",
        "  seccompProfile: {type: RuntimeDefault}",
        "containers:",
        f"- name: {container}",
        f"  image: {text(request.image)}",
        f"  command: {text(request.command)}",
        "  env:",
        *indented(_environment(request, is_of_jobset=is_of_jobset), 2),
        "  ports:",
        f"  - {{containerPort: {PORT}}}  # launchers; endpoints choose ports of their own",
        *indented(_resources(group), 2),
        "  securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}",
        "  volumeMounts:",
        f"  - {{name: token, mountPath: {_TOKEN}, subPath: token, readOnly: true}}",
        "  - {name: shm, mountPath: /dev/shm}",
        f"  - {{name: workspace, mountPath: {_WORKSPACE}}}",
        "volumes:",
        f"- {{name: token, secret: {{secretName: {text(request.name + '-token')}, defaultMode: 0400}}}}",
        "- {name: shm, emptyDir: {medium: Memory}}  # torch's workers and NCCL need more than a container's 64 MiB",
        f"- {{name: workspace, {workspace}}}{claim_note}",
    ]


def time_limit(request: RenderRequest) -> list[str]:
    """Return the time limit of a job or pod of Kubernetes. Empty without a limit."""
    # Kubernetes rejects 0.
    return [] if request.hours is None else [f"activeDeadlineSeconds: {max(1, round(3600 * request.hours))}"]


def _environment(request: RenderRequest, *, is_of_jobset: bool) -> list[str]:
    """Return the environment variables of a container. In a JobSet, some have the value of a label of the pod."""
    values = {
        **request.environment,
        "HETERO_GRACE_S": str(GRACE_S),
        "HETERO_TOKEN_FILE": _TOKEN,
        "HETERO_WORKSPACE": _WORKSPACE,
    }
    constants = [f"- {{name: {name}, value: {text(value)}}}" for name, value in values.items()]
    from_labels = [
        f"- {{name: {name}, valueFrom: {{fieldRef: {{fieldPath: \"metadata.labels['{label}']\"}}}}}}"
        for name, label in _JOBSET_LABELS.items()
    ]
    return [*constants, *from_labels] if is_of_jobset else constants


def _node_labels(request: RenderRequest, group: StatedGroup) -> dict[str, str]:
    """Return the labels that the nodes of a group must have.

    A selector of the user replaces the label of spot nodes, because services other than GKE and AKS use different
    labels.
    """
    # A group may state accelerators after the machine type: n1-standard-16+NVIDIA_TESLA_V100:4.
    labels = {} if machine_of(group) is None else {_INSTANCE_TYPE: group.instance_type.partition("+")[0]}
    key, equals, value = request.setting("node-selector", group).partition("=")
    if equals:
        labels[key] = value
    elif request.is_spot(group):
        key, value = node_label(group)
        labels[key] = value
    return labels


def _resources(group: StatedGroup) -> list[str]:
    """Return the resources that a pod of a group requests, and their limits."""
    stated, machine = resources_of(group), machine_of(group)
    gpus = stated.gpus or (machine.num_accelerators if machine is not None else 0)
    # A pod that requests more than half of a node is alone on the node.
    if machine is not None and machine.vcpus is not None:
        # If the memory of the node is not known, assume twice the least memory of a node with as many vCPUs.
        node_gib = machine.memory_gib or 2 * _CPU_GIB * machine.vcpus
        cpus, gib = machine.vcpus // 2 + 1, int(node_gib) // 2 + 1
        comment = f"more than half of {group.instance_type}, so each pod has a separate node"
    elif stated.cpus:
        cpus, gib, comment = stated.cpus, _CPU_GIB * stated.cpus, "state the memory that your data set needs"
    elif gpus:
        cpus, gib, comment = _GPU_CPUS * gpus, _GPU_GIB * gpus, "state what your nodes have for each pod"
    else:
        return [f"resources: {{}}  # {group.instance_type}: state its requests, or select its nodes"]
    # A data host runs as many endpoints as it may use CPUs. Without a limit, a pod may use all CPUs of its node.
    # Kubernetes gives GPUs only to a pod with a limit of GPUs. Such a host trains, and may use all CPUs.
    limits: dict[str, int | None] = {}
    if gpus:
        limits = {"nvidia.com/gpu": gpus}
    elif stated.cpus:
        limits = {"cpu": stated.cpus}
    return [
        "resources:",
        f"  requests: {{cpu: {cpus}, memory: {gib}Gi}}  # {comment}",
        *([f"  limits: {text(limits)}"] if limits else []),
    ]

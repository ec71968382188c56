"""Spot capacity, which a platform may take back: labels, tolerations and notes of a rendered job. Pure.

Kubernetes defines no label for spot nodes. Each managed service has one label, and a taint with the same name:

- GKE: https://docs.cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
- AKS: https://learn.microsoft.com/en-us/azure/aks/spot-node-pool
"""

from __future__ import annotations

from hetero.cluster.groups import StatedGroup
from hetero.cluster.rendering.request import RenderRequest
from hetero.cluster.roles import check_spot_groups
from hetero.cluster.spec import Role

__all__ = ["check_data_groups", "node_label", "notes", "tolerations"]

_GKE = ("cloud.google.com/gke-spot", "true")
_AKS = ("kubernetes.azure.com/scalesetpriority", "spot")


def check_data_groups(request: RenderRequest) -> None:
    """Raise `ConfigError` if a spot group trains."""
    names = (group.name for group in request.groups)
    check_spot_groups(request.spot, dict(zip(names, request.roles, strict=True)))


def node_label(group: StatedGroup) -> tuple[str, str]:
    """Return the label of spot nodes and its value: the label of AKS for types of Azure, else of GKE."""
    return _AKS if group.instance_type.startswith("Standard_") else _GKE


def tolerations() -> list[dict[str, str]]:
    """Return the tolerations of a pod that may run on spot nodes. A node of another service lacks this taint."""
    # Return both. A toleration of a taint that no node has does no harm.
    return [{"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in (_GKE, _AKS)]


def notes(request: RenderRequest) -> list[str]:
    """Return a comment about each spot group without a price. May be empty."""
    priced = {flag.removeprefix("--spot=").partition("=")[0] for flag in request.flags if flag.startswith("--spot=")}
    lines: list[str] = []
    for group in request.members(Role.DATA):
        if request.is_spot(group) and group.name not in priced:
            lines += [
                f"# --spot {group.name} has no price, so the job waits for all hosts of {group.name} at the start.",
                f"# With --spot {group.name}=USD it starts as soon as one data host serves, and goes on when they go.",
            ]
    return lines

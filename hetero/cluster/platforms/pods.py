"""What the platforms of Kubernetes share: folders, grace and mistakes of a pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hetero.cluster.platforms.platform import Folders
from hetero.documents.diagnosis import Diagnosis, warning

__all__ = ["examine_pod", "grace_s", "pod_folders"]

_GRACE_VARIABLE = "HETERO_GRACE_S"
"""Environment variable. Seconds from the request to stop until the platform kills the pod."""
_DEFAULT_GRACE_S = 30.0
"""``terminationGracePeriodSeconds`` of Kubernetes."""


def grace_s(environ: Mapping[str, str]) -> float:
    """Return the seconds of grace that the manifest states, or Kubernetes' default if it states no number above 0."""
    try:
        found = float(environ.get(_GRACE_VARIABLE, ""))
    except ValueError:
        return _DEFAULT_GRACE_S
    return found if 0 < found < 1e9 else _DEFAULT_GRACE_S


def pod_folders(workspace: str) -> Folders:
    """Return the folders of a pod.

    Args:
        workspace: A volume, which the pods of a group may share.
    """
    root = Path(workspace)
    return Folders(
        root=root,
        output=root / "output",
        # Kubernetes shows what is in this file as the reason of a failure.
        failure=Path("/dev/termination-log"),
        model=root / "model",
        checkpoints=root / "checkpoints",
        code=root / "code",
    )


def examine_pod(environ: Mapping[str, str], own_host: str | None) -> Iterator[Diagnosis]:
    """Yield what the manifest of a pod lacks. See `Platform.examine`."""
    if _GRACE_VARIABLE not in environ:
        yield warning(
            "HETERO_GRACE_S is not set, so ranks have half of Kubernetes' 30 s to save a checkpoint",
            "set it to terminationGracePeriodSeconds of the pod, as hetero render does",
        )
    if own_host is not None and "." not in own_host:
        yield warning(
            f"the name {own_host} of this pod has no subdomain, so other pods cannot resolve it",
            "give the job a headless service: enableDNSHostnames of a JobSet, the plugin svc of Volcano",
        )

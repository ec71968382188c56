"""What the platforms of Kubernetes share: folders, grace and mistakes of a pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hetero.cluster.platforms.platform import Folders, Platform
from hetero.documents.diagnosis import Diagnosis, warning

__all__ = ["Pod", "pod_folders"]

_GRACE_VARIABLE = "HETERO_GRACE_S"
"""Environment variable. Seconds from the request to stop until the platform kills the pod."""


class Pod(Platform):
    """A pod of Kubernetes, whatever made it."""

    @property
    def kill_after_s(self) -> float:  # type: ignore[override]
        """Seconds of grace that the manifest states, or Kubernetes' default if it states no number above 0."""
        try:
            grace_s = float(self.environ.get(_GRACE_VARIABLE, ""))
        except ValueError:
            return Platform.kill_after_s
        # The upper bound rejects infinity and "nan", which are numbers for Python.
        return grace_s if 0 < grace_s < 1e9 else Platform.kill_after_s

    @property
    def folders(self) -> Folders:
        """Folders below ``HETERO_WORKSPACE`` or ``/workspace``. The failure is the termination message of the pod."""
        return pod_folders(self.environ)

    def examine(self, own_host: str | None, port: int) -> Iterator[Diagnosis]:
        """Yield what the manifest lacks."""
        if _GRACE_VARIABLE not in self.environ:
            yield warning(
                "HETERO_GRACE_S is not set, so ranks have half of Kubernetes' 30 s to save a checkpoint",
                "set it to terminationGracePeriodSeconds of the pod, as hetero render does",
            )
        if own_host is not None and "." not in own_host:
            yield warning(
                f"the name {own_host} of this pod has no subdomain, so other pods cannot resolve it",
                "give the job a headless service: enableDNSHostnames of a JobSet, the plugin svc of Volcano",
            )


def pod_folders(environ: Mapping[str, str]) -> Folders:
    """Return folders below ``HETERO_WORKSPACE`` or ``/workspace``, a volume that the hosts of a group may share."""
    root = Path(environ.get("HETERO_WORKSPACE") or "/workspace")
    return Folders(
        root=root,
        output=root / "output",
        # Kubernetes shows what is in this file as the reason of a failure.
        failure=Path("/dev/termination-log"),
        model=root / "model",
        checkpoints=root / "checkpoints",
        code=root / "code",
    )

"""Environments that platforms really made, and changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "platforms" / "recorded"


def recorded(platform: str, name: str, **changes: str | None) -> dict[str, str]:
    """Return a recorded environment. A change to None removes the variable."""
    lines = (FOLDER / platform / f"{name}.env").read_text(encoding="utf-8").splitlines()
    return changed(dict(line.partition("=")[::2] for line in lines if "=" in line), **changes)


def changed(environ: Mapping[str, str], **changes: str | None) -> dict[str, str]:
    """Return an environment with changes. None removes a variable."""
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


def jobset_variables(group: str, index: int, groups: str) -> dict[str, str]:
    """Return the variables that a JobSet named ``photos`` and the manifests of `hetero render` give to a pod."""
    return {
        "JOBSET_NAME": "photos",
        "REPLICATED_JOB_NAME": group,
        "JOB_INDEX": "0",
        "JOB_COMPLETION_INDEX": str(index),
        "JOBSET_RESTART_ATTEMPT": "0",
        "HETERO_GROUPS": groups,
        "HETERO_GRACE_S": "120",
    }

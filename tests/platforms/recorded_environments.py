"""Environments that platforms really made, and changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "recorded"


def recorded(platform: str, name: str, **changes: str | None) -> dict[str, str]:
    """Return a recorded environment. A change to None removes the variable."""
    lines = (FOLDER / platform / f"{name}.env").read_text(encoding="utf-8").splitlines()
    return changed(dict(line.partition("=")[::2] for line in lines if "=" in line), **changes)


def changed(environ: Mapping[str, str], **changes: str | None) -> dict[str, str]:
    """Return an environment with changes. None removes a variable."""
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}

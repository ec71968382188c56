"""Commands that end with the process that started them."""

from __future__ import annotations

import os

__all__ = ["bind_to_parent"]


def bind_to_parent() -> None:
    """End with the process that has this one started, if it asks for that; there may be others in between."""
    parent = os.environ.pop("HETERO_PARENT_PID", None)
    if parent is None:
        return
    from hetero.system.process import die_with, die_with_parent

    if os.getppid() == int(parent):
        die_with_parent(int(parent))
    else:
        die_with(int(parent))

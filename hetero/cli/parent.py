"""Binds the life of a command to the process that started it."""

from __future__ import annotations

import os

__all__ = ["bind_to_parent"]


def bind_to_parent() -> None:
    """End this process when the process that ``HETERO_PARENT_PID`` names ends.

    That process may be the parent or a more distant ancestor. Do nothing if the variable is not set.
    """
    parent = os.environ.pop("HETERO_PARENT_PID", None)
    if parent is None:
        return
    from hetero.system.process import die_with, die_with_parent

    if os.getppid() == int(parent):
        die_with_parent(int(parent))
    else:
        die_with(int(parent))

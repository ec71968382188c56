"""Distinguishes the script from tools that rebuild loaders, when code reads a loader's attributes."""

from __future__ import annotations

import sys
from typing import Any

from hetero.loaders.pipeline import is_remote

__all__ = ["fetches_for_rebuilt", "is_asked_by_tool"]

_TOOLS = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})


def is_asked_by_tool(depth: int = 2) -> bool:
    """Return whether the code that reads or sets an attribute belongs to a tool that rebuilds loaders.

    Args:
        depth: Number of calls between this function and that code, plus one.
    """
    module = sys._getframe(depth).f_globals.get("__name__", "")
    return module.partition(".")[0] in _TOOLS


def fetches_for_rebuilt() -> bool:
    """Return whether a plain loader rebuilt from a hetero loader must leave prefetching to the hetero loader.

    This is always so with endpoints. It is also so next to an Accelerator, which rebuilds every loader as torch's own.
    The workers of such a loader would fetch where the step timer and the stop callbacks cannot see it.
    """
    accelerate_state: Any = sys.modules.get("accelerate.state")
    return is_remote() or (accelerate_state is not None and bool(accelerate_state.PartialState._shared_state))

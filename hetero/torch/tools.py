"""Which code reads a loader: the script, or a tool that rebuilds loaders."""

from __future__ import annotations

import sys
from typing import Any

from hetero.loaders.pipeline import is_remote

__all__ = ["fetches_for_rebuilt", "is_asked_by_tool"]

_TOOLS = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"})


def is_asked_by_tool(depth: int = 2) -> bool:
    """Whether the code that reads or sets an attribute is that of a tool which rebuilds loaders.

    Args:
        depth: Calls between this function and that code, plus one.
    """
    module = sys._getframe(depth).f_globals.get("__name__", "")
    return module.partition(".")[0] in _TOOLS


def fetches_for_rebuilt() -> bool:
    """Whether a plain loader rebuilt from a hetero one is to leave prefetching to it.

    With endpoints always. Next to an Accelerator too: it rebuilds every loader as torch's own, whose
    workers would fetch where neither the step timer nor the stop callbacks see it.
    """
    accelerate_state: Any = sys.modules.get("accelerate.state")
    return is_remote() or (accelerate_state is not None and bool(accelerate_state.PartialState._shared_state))

"""Access to modules that are used only if the user's code has imported them.

It is a separate module because many modules of this package import it, and it imports none of them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__all__ = ["imported"]


def imported(name: str) -> Any:
    """Return a module if this process has imported it, else None.

    If another thread is importing the module, wait for it, because ``sys.modules`` already holds the incomplete module.

    Raises:
        ImportError: If the import in the other thread failed and a new attempt fails too.
    """
    module = sys.modules.get(name)
    # The import statement also checks this attribute.
    is_incomplete = module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False)
    return import_module(name) if is_incomplete else module  # allowed: it is imported already

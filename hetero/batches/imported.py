"""Modules that are used only where the user's code has imported them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__all__ = ["imported"]


def imported(name: str) -> Any:
    """Return a module if this process has imported it, else None.

    Waits while another thread is importing it: until then ``sys.modules`` has a module without its contents.

    Raises:
        ImportError: If that other import failed, and so does another attempt.
    """
    module = sys.modules.get(name)
    # The import statement looks at the same mark.
    is_incomplete = module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False)
    return import_module(name) if is_incomplete else module  # allowed: it is imported already

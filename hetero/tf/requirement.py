"""Checks that TensorFlow is installed, at the time when a script first needs it."""

from __future__ import annotations

__all__ = ["check_tensorflow"]


def check_tensorflow() -> None:
    """Import TensorFlow.

    Raises:
        ImportError: If TensorFlow is not installed. Names in one line the package to install.
    """
    try:
        import tensorflow as tf  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        missing = "hetero.tf needs TensorFlow, which is not installed: pip install 'tensorflow>=2.16'"
        raise ImportError(missing) from None

"""That TensorFlow is there: asked when a script calls for it, and not before."""

from __future__ import annotations

__all__ = ["check_tensorflow"]


def check_tensorflow() -> None:
    """Import TensorFlow.

    Raises:
        ImportError: There is none; says in one line what to install.
    """
    try:
        import tensorflow as tf  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        missing = "hetero.tf needs TensorFlow, which is not installed: pip install 'tensorflow>=2.16'"
        raise ImportError(missing) from None

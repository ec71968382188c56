"""Finds scripts that make a loader in each epoch. Each of those begins at epoch 0, with the same order and draws."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from hetero.spec import DatasetSpec

__all__ = ["MadeAnew"]

logger = logging.getLogger(__name__)

_finished: dict[tuple[object, ...], Callable[[Any], bool]] = {}
"""Kinds of loaders that have delivered a whole epoch in this process, and whether a data set is that of the last."""
_warned: set[tuple[object, ...]] = set()


class MadeAnew:
    """Knows whether a loader like this one has delivered a whole epoch before this one was made.

    Args:
        subject: The spec, or the data set object.
        kind: What else loaders have in common that deliver the same batches.
    """

    def __init__(self, subject: Any, *kind: object) -> None:
        self._kind = kind
        same = _finished.get(kind)
        self._is_made_anew = same is not None and same(subject)

    def note_finished(self, subject: Any) -> None:
        """Record that the loader has delivered a whole epoch."""
        _finished[self._kind] = _same_as(subject)

    def warn(self, name: str) -> None:
        """Log one warning for all loaders of this kind, if this one was made anew."""
        if not self._is_made_anew or self._kind in _warned:
            return
        _warned.add(self._kind)
        logger.warning(
            "loader %s: another loader of the same data set and seed has delivered epoch 0 before, and this one begins "
            "at epoch 0 too: the same order and the same random draws. Make the loader once, before the loop over "
            "epochs, or call set_epoch(epoch) of each one",
            name,
        )


def _same_as(subject: Any) -> Callable[[Any], bool]:
    """Return whether another subject is the same data set, as a function that keeps no data set object in memory."""
    if isinstance(subject, DatasetSpec):
        return lambda other: bool(other == subject)
    try:
        reference = weakref.ref(subject)
    except TypeError:  # a list, for example
        return lambda other: False
    return lambda other: reference() is other

"""Finds loaders that have the order of another loader, although the script did not ask for it.

Loaders without ``seed=`` share one seed. A loader that the script makes in each epoch begins at epoch 0 each time.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from hetero.spec import DatasetSpec

__all__ = ["MadeAnew", "warn_of_same_order"]

logger = logging.getLogger(__name__)

_finished: dict[tuple[object, ...], tuple[Callable[[Any], bool], bytes | None]] = {}
"""Kinds of loaders that have delivered a whole epoch in this process. For the last loader of each kind: a function that
returns whether a data set is the loader's, and the digest of its sampler's order."""
_warned: set[tuple[object, ...]] = set()
"""Kinds of loaders that `MadeAnew.warn` has warned of. After the warning of `warn_of_same_order`, also the tuple
``("side by side",)``."""
_begun: weakref.WeakValueDictionary[object, Any] = weakref.WeakValueDictionary()
"""Passes of loaders without ``seed=`` that have begun and not ended. The key is what decides their order."""


class MadeAnew:
    """Whether a loader of the same kind had delivered a whole epoch before this loader was made.

    Args:
        subject: The spec, or the data set object.
        kind: The other properties that loaders with the same batches have in common.
    """

    def __init__(self, subject: Any, *kind: object) -> None:
        self._kind = kind
        is_same, order = _finished.get(kind, (None, None))
        self._order: bytes | None = order
        """Digest of the order of the earlier loader's sampler. None for a loader in its own order."""
        self._is_made_anew = is_same is not None and is_same(subject)
        """Whether an earlier loader of this kind has delivered a whole epoch of the same data set in this process."""

    def note_finished(self, subject: Any, order: bytes | None) -> None:
        """Record that the loader has delivered a whole epoch. ``order``: digest of its sampler's order."""
        _finished[self._kind] = _same_as(subject), order

    def warn(self, name: str, order: bytes | None = None) -> None:
        """Log a warning if this loader was made anew and has the earlier loader's order. Log it once for each kind.

        Args:
            name: Name of the loader.
            order: Digest of the order of its sampler. None for a loader in its own order.
        """
        if not self._is_made_anew or self._order != order or self._kind in _warned:
            return
        _warned.add(self._kind)
        logger.warning(
            "loader %s: another loader of the same data set and seed has delivered epoch 0 before, and this one begins "
            "at epoch 0 too: the same order and the same random draws. Make the loader once, before the loop over "
            "epochs, or call set_epoch(epoch) of each one",
            name,
        )


def _same_as(subject: Any) -> Callable[[Any], bool]:
    """Return a function that returns whether another subject is the same data set as this one.

    The function keeps no data set object in memory, because a script may make a new object for every epoch.
    """
    if isinstance(subject, DatasetSpec):
        return lambda other: bool(other == subject)
    try:
        reference = weakref.ref(subject)
    except TypeError:  # a list, for example
        return lambda other: False
    return lambda other: reference() is other


def warn_of_same_order(owner: object, pipeline: Any, order: object) -> None:
    """Log one warning if another loader is in the same shuffled order at the same time, as with ``zip(a, b)``.

    Args:
        owner: The pass that begins.
        pipeline: The pipeline of the pass's loader.
        order: What decides the order. None for a pass that is not shuffled, or whose seed the script chose.
    """
    # If a script passes the same seed to both loaders, it wants the same order, for example for images and their masks.
    # Then ``order`` is None.
    if order is None:
        return
    other = _begun.get(order)
    # `_warned` contains tuples. This tuple stands for all pairs of loaders, so only the first pair causes a warning.
    if other is not None and other.pipeline is not pipeline and ("side by side",) not in _warned:
        _warned.add(("side by side",))
        logger.warning(
            "loaders %s and %s shuffle with the same seed, 0, so their orders are equal, and so are the random draws "
            "of equal samples. Pass each another seed=, or both the same one if this is meant",
            other.pipeline.name,
            pipeline.name,
        )
    _begun[order] = owner

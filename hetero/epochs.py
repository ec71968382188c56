"""The number of a pass: one integer that the order and the random draws of the pass depend on.

The number is the epoch. If the script takes several passes in an epoch that it chose with ``set_epoch``, each further
pass has a number that no epoch has.
"""

from __future__ import annotations

__all__ = ["MAX_EPOCHS", "epoch_text", "pass_number"]

_EPOCH_BITS = 32
"""Bits of the epoch in a number, half of the 64 that a request has for it (protos/hetero/v1/data.proto). Above them is
the count of earlier passes in the same epoch."""
MAX_EPOCHS = 1 << _EPOCH_BITS
"""Epochs must be smaller. A larger epoch would have the same number as a further pass of another epoch."""


def pass_number(epoch: int, again: int) -> int:
    """Return the number of a pass, which is one iteration over the samples.

    The first pass of an epoch has the number of the epoch. The count of earlier passes is added in the bits above those
    of an epoch, so a further pass never has the number of another epoch.

    Args:
        epoch: The epoch, at least 0 and less than `MAX_EPOCHS`.
        again: How many passes of this epoch have begun before.
    """
    return epoch + (again << _EPOCH_BITS)


def epoch_text(number: int) -> str:
    """Return the number of a pass for a message: ``3``, or ``3 (pass 2)`` for the second pass of epoch 3."""
    again, epoch = divmod(number, MAX_EPOCHS)
    return str(epoch) if not again else f"{epoch} (pass {again + 1})"

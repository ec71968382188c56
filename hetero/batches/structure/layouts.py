"""Strides that the tensors and arrays of a batch keep.

If the elements of a tensor or array fill its memory without gaps, it keeps the order of its dimensions in memory, for
example channels last or Fortran order. Other tensors and arrays get the strides of ``tensor.clone()`` or
``array.copy(order="K")``. Copies in this process and batches from a data host follow the same rule, so they have equal
strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["array_strides", "is_c_order", "is_dense", "tensor_strides"]


def array_strides(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return the strides of an array's ``copy(order="K")`` in elements, or an empty tuple for C order. Copies nothing.

    NumPy ignores the strides of dimensions with one element. The result has the strides that they get in a new array.
    """
    if array.flags.c_contiguous:
        return ()
    # Sort the dimensions as NumPy does. Without gaps or overlaps the result has the memory order of the array itself.
    order = sorted(range(array.ndim), key=lambda dim: -abs(array.strides[dim]))
    # In Fortran order, do not sort by strides, because the strides of dimensions with one element may be out of order.
    if array.flags.f_contiguous:
        order = list(range(array.ndim))[::-1]
    strides, stride = [0] * array.ndim, 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= array.shape[dim]
    return () if is_c_order(array.shape, strides) else tuple(strides)


def tensor_strides(torch: Any, tensor: Any) -> tuple[int, ...]:
    """Return the strides of a strided tensor's ``clone()`` in elements, or an empty tuple for C order. Copies nothing.

    A tensor without gaps and overlaps keeps its strides. Dimensions with one element keep their strides too, because
    torch uses these strides when it chooses a memory format.
    """
    shape, strides = tensor.shape, tensor.stride()
    # Torch's own check is five times as fast, but it ignores the strides of dimensions with fewer than two elements. So
    # use it only if there are none.
    if (tensor.is_contiguous() and 1 not in shape and 0 not in shape) or is_c_order(shape, strides):
        return ()
    # torch gives a new tensor like this one the strides of the clone. On the device meta, a tensor has no memory.
    if not is_dense(shape, strides):
        strides = torch.empty_like(tensor, device="meta").stride()
    return () if is_c_order(shape, strides) else tuple(strides)


def is_c_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides are in C order, as in a new tensor or array."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        # For the strides of an empty tensor, torch counts a size of 0 as 1.
        expected *= max(size, 1)
    return True


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements fill their memory, in any order of dimensions. True without elements."""
    if 0 in shape:
        return True
    # Sort the dimensions by stride. Each stride must be the number of elements in the dimensions before it.
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True

"""The order in which the elements of a tensor or array lie in memory: what a batch keeps of it.

A tensor or array whose elements fill its memory without gaps keeps the order of its dimensions in memory: channels
last, transposed, Fortran. Any other one gets the strides of ``tensor.clone()`` or ``array.copy(order="K")``. Copies in
this process and batches from a data host follow the same rule, so that their strides are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["array_strides", "is_c_order", "is_dense", "tensor_strides"]


def array_strides(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return the strides that an array's ``copy(order="K")`` has, in elements; empty for C order. Copies nothing.

    Those of dimensions of one element, which NumPy ignores, are what NumPy gives them in a new array.
    """
    if array.flags.c_contiguous:
        return ()
    # As NumPy orders them. Without gaps or overlaps the result has the memory order of the array itself.
    order = sorted(range(array.ndim), key=lambda dim: -abs(array.strides[dim]))
    if array.flags.f_contiguous:
        order = list(range(array.ndim))[::-1]
    strides, stride = [0] * array.ndim, 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= array.shape[dim]
    return () if is_c_order(array.shape, strides) else tuple(strides)


def tensor_strides(torch: Any, tensor: Any) -> tuple[int, ...]:
    """Return the strides that a strided tensor's ``clone()`` has, in elements; empty for C order. Copies nothing.

    Those of a tensor without gaps and overlaps are its own, also of dimensions of one element: torch takes them into
    account where it chooses a memory format.
    """
    shape, strides = tensor.shape, tensor.stride()
    # Of dimensions of at least two elements torch knows it, five times as fast.
    if (tensor.is_contiguous() and 1 not in shape and 0 not in shape) or is_c_order(shape, strides):
        return ()
    if not is_dense(shape, strides):
        strides = torch.empty_like(tensor, device="meta").stride()
    return () if is_c_order(shape, strides) else tuple(strides)


def is_c_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether these are the strides of a new tensor or array."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements fill their memory, in any order of dimensions; always if there are none."""
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True

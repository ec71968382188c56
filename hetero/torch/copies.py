"""Batches that share no memory with the data set that made them."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

__all__ = ["PLAIN_TYPES", "copy_leaves"]

PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})


def copy_leaves(value: Any) -> Any:
    """Return a batch whose tensors and arrays are copies.

    Args:
        value: Dictionaries (``UserDict`` too), lists, tuples, namedtuples and dataclasses, which come back as new
            ones of the same type, of tensors and arrays. Any other object is returned as it is, and so is a tensor
            that cannot be copied.
    """
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value)
    if isinstance(value, np.ndarray):
        return value.copy(order="K")  # as from a data host
    if isinstance(value, list):
        return _filled(value, enumerate(value))
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return tuple.__new__(type(value), [copy_leaves(item) for item in value])
    if isinstance(value, dict | UserDict):
        return _filled(value, value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for name in [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]:
            object.__setattr__(copied, name, copy_leaves(getattr(value, name)))
        return copied
    return value


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is no part of the tensor's graph if the tensor begins one: torch sends no other one."""
    try:
        if not (tensor.requires_grad and tensor.is_leaf):
            return tensor.clone()
        copied = tensor.detach().clone()
        return type(tensor)(copied) if type(tensor) is torch.nn.Parameter else copied.requires_grad_()
    except Exception:  # noqa: BLE001 - an uninitialised parameter, or a class whose code raises anything
        return tensor


def _filled(container: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a copy of a list or mapping with copies of its items."""
    copied = copy.copy(container)
    for key, item in items:
        if type(item) not in PLAIN_TYPES:
            copied[key] = copy_leaves(item)
    return copied

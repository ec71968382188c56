"""Finds the tensors of a batch, and copies a batch. The copy shares no memory with the data set that made it."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["copy_leaves", "leaves_of"]

_PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})
_CHANGEABLE = (list, dict, UserDict, UserList, deque)
"""Containers whose shallow copy can be changed without changing the original. Other classes may share their items."""
_TEXTS = (str, bytes, bytearray, memoryview, range)
"""Sequences without tensors."""
_WHOLE = (*_TEXTS, tuple)
"""Sequences that are not copied, because they hold no tensors. The tuples are classes such as torch.Size."""


def leaves_of(batch: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in nested mappings, sequences and dataclasses, each once."""
    waiting, seen = [batch], dict[int, Any]()
    while waiting:
        value = waiting.pop()
        # A child may refer to its parent.
        if id(value) in seen:
            continue
        # Keep the object, because the id of a freed object may be given to another one.
        seen[id(value)] = value
        items: Any = ()
        if isinstance(value, torch.Tensor | np.ndarray):
            yield value
        elif isinstance(value, Mapping):
            items = value.values()
        elif isinstance(value, Sequence) and not isinstance(value, _TEXTS):
            items = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        # Skip plain items. When each token was visited, a batch with ragged lists of thousands of tokens took
        # milliseconds.
        waiting += [item for item in items if type(item) not in _PLAIN_TYPES]


def copy_leaves(value: Any) -> Any:
    """Return a batch whose tensors and arrays are copies.

    Args:
        value: Nested mappings, sequences, namedtuples and dataclasses with tensors and arrays. The copy has new
            containers of the same types. All other objects are shared with the original. A tensor or a user's
            container that cannot be copied is shared too.
    """
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value)
    if isinstance(value, np.ndarray):
        return value.copy(order="K")  # keeps the memory layout, as a batch from a data host does
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        # A namedtuple's own constructor takes its items as separate arguments.
        return tuple.__new__(type(value), [copy_leaves(item) for item in value])
    if isinstance(value, list | Mapping) or (isinstance(value, Sequence) and not isinstance(value, _WHOLE)):
        return _copy_container(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for name in [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]:
            # This is the only way to set a field of a frozen dataclass.
            object.__setattr__(copied, name, copy_leaves(getattr(value, name)))
        return copied
    return value


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy. The copy of an autograd leaf is a leaf, because torch cannot send non-leaves that require grad."""
    try:
        if not (tensor.requires_grad and tensor.is_leaf):
            # clone and not copy.deepcopy, which copies the whole storage behind a view.
            return tensor.clone()
        copied = tensor.detach().clone()
        return type(tensor)(copied) if type(tensor) is torch.nn.Parameter else copied.requires_grad_()
    except Exception:  # noqa: BLE001 - an uninitialised parameter, or a class whose code raises anything
        return tensor


def _copy_container(container: Any) -> Any:
    """Return a copy of a mapping or sequence with copies of its items."""
    is_mapping = isinstance(container, Mapping)
    try:
        items = container.items() if is_mapping else enumerate(container)
        copies = [(key, copy_leaves(item)) for key, item in items if type(item) not in _PLAIN_TYPES]
        # Change a shallow copy only of these classes. Other classes may share their items with their shallow copy.
        if isinstance(container, _CHANGEABLE) and (copied := _changed_copy(container, copies)) is not None:
            return copied
        # All items are plain, for example numbers, so no memory has to be copied.
        if not copies:
            return container
        # Make the container from its items, as torch's own collation does for an unknown class.
        whole: Any = dict(container) if is_mapping else list(container)
        for key, item in copies:
            whole[key] = item
        # If the class's constructor takes something else than items, share the container.
        made = type(container)(whole)
        return made if type(made) is type(container) and len(made) == len(container) else container
    except Exception:  # noqa: BLE001 - a user's class, which may raise anything
        return container


def _changed_copy(container: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a shallow copy with these items replaced. Return None if the class does not allow changes."""
    try:
        copied = copy.copy(container)
        for key, item in items:
            copied[key] = item
    except Exception:  # noqa: BLE001 - a user's class, which may raise anything
        return None
    # A class may define copying as returning the object itself. Then the loop above has put the new items into the
    # original, and there is no copy.
    return copied if copied is not container else None

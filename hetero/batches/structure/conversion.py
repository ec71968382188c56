"""Conversion of a nested batch to a small tree and a list of flat leaves, and back.

The tree keeps the containers with their types and order. It holds None, numbers, and short str and bytes as
they are. Each tensor, array, NumPy scalar, long str or bytes, and long list of one plain type becomes a `Leaf`.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.structure.leaves import (
    NESTED_ADVICE,
    Leaf,
    TooLarge,
    UnknownTypeError,
    Unsendable,
    list_leaf,
    numpy_leaf,
    restore,
    tensor_leaf,
    text_leaf,
)
from hetero.batches.structure.limits import StructureLimits
from hetero.batches.structure.trees import (
    MAX_EQUAL_HASHES,
    LeafRef,
    ListTree,
    MappingTree,
    RecordTree,
    SetTree,
    Tree,
    TupleTree,
    collide,
    is_hashable,
)
from hetero.errors import ConfigError, ProtocolError

__all__ = [
    "StructureLimits",
    "UnsupportedBatchError",
    "find_type",
    "flatten",
    "module_name",
    "set_script_module",
    "type_name",
    "unflatten",
    "without_script_module",
]


class UnsupportedBatchError(ConfigError):
    """A batch holds a value that cannot be sent. The message starts with the path inside the batch."""


_MIN_LEAF_ITEMS = 8
"""Length of the shortest list of one plain type that becomes a leaf.

Shorter lists stay in the tree. As leaves, thousands of coordinate pairs would take more time, and exceed `max_leaves`.
"""
_PLAIN_TYPES = frozenset({str, bytes, int, float, bool})
_KEY_TYPES = _PLAIN_TYPES | {complex, tuple, frozenset, type(None)}
_SCRIPT_NAMES = ("__main__", "__mp_main__")

_script_module = "__main__"


def set_script_module(name: str) -> None:
    """Set the name of the user's script in ``sys.modules``, if this name is not ``__main__``."""
    global _script_module
    _script_module = name


def flatten(batch: Any, limits: StructureLimits | None = None) -> tuple[Tree, list[Leaf]]:
    """Split a batch into a tree and leaves.

    A leaf shares the batch's memory if that memory is contiguous. Encode the leaves before the batch changes.

    Args:
        batch: Dicts, lists, tuples, sets, namedtuples and dataclasses of tensors, arrays, numbers, str, bytes and None.
        limits: Limits on the batch. None selects the defaults.

    Returns:
        The tree, and the leaves in the order of the tree's references.

    Raises:
        UnsupportedBatchError: If the batch holds another type or exceeds a limit.
    """
    flattener = _Flattener(limits or StructureLimits())
    try:
        return flattener.tree(batch, depth=0), flattener.leaves
    except TooLarge as too_large:
        limit = flattener.limits.max_batch_bytes
        raise UnsupportedBatchError(
            f"{_format_path(flattener.path)}: {too_large} of the {limit} that a batch may have; use smaller batches or "
            "raise --max-batch-bytes"
        ) from None
    except Unsendable as unsendable:
        raise UnsupportedBatchError(f"{_format_path(flattener.path)}: {unsendable}") from None


class _Field(str):
    """A step of a path: the name of an attribute."""

    __slots__ = ()


class _Item:
    """A step of a path: an item of a set. Sets do not have indices."""

    def __repr__(self) -> str:
        return "..."


def _format_path(path: Iterable[object]) -> str:
    return "batch" + "".join(f".{step}" if isinstance(step, _Field) else f"[{step!r:.60}]" for step in path)


class _Flattener:
    """One walk over a batch."""

    def __init__(self, limits: StructureLimits) -> None:
        self.limits = limits
        self.leaves: list[Leaf] = []
        # Path to the current value. If an exception ends the walk, the path shows where it was raised.
        self.path: list[object] = []
        self.bytes_left = limits.max_batch_bytes
        self.nodes_left = limits.max_nodes
        self.list_items_left = limits.max_list_items

    def tree(self, value: Any, depth: int) -> Tree:
        """Return the tree of a value with ``depth`` containers around it, and add its leaves."""
        self.nodes_left -= 1
        if self.nodes_left < 0:
            raise Unsendable(f"the batch has more than {self.limits.max_nodes} parts; use tensors or arrays instead")
        kind = type(value)
        if value is None or kind is bool or kind is float or kind is complex:
            return value  # type: ignore[no-any-return]
        if kind is int:
            # One bit is for the sign.
            max_bits = 8 * self.limits.max_inline_bytes - 1
            if value.bit_length() > max_bits:
                raise Unsendable(f"an int of {value.bit_length()} bits cannot be sent, at most {max_bits}")
            return value  # type: ignore[no-any-return]
        if kind is str or kind is bytes:
            return self._text(value)
        if kind is np.ndarray or issubclass(kind, np.generic):
            return self._leaf(numpy_leaf(self._with_checked_ndim(value), self.bytes_left))
        torch = imported("torch")
        if torch is not None and kind is torch.Tensor:
            return self._leaf(tensor_leaf(torch, self._with_checked_ndim(value), self.bytes_left))
        return self._container(value, kind, depth)

    def _container(self, value: Any, kind: type, depth: int) -> Tree:
        """Return the tree of a container. Reject a value of a type that cannot be sent."""
        if depth >= self.limits.max_depth:
            raise Unsendable(f"the batch nests deeper than {self.limits.max_depth} levels")
        if kind is list:
            item_kinds = set(map(type, value)) if len(value) >= _MIN_LEAF_ITEMS else set()
            # A long list of one plain type becomes a leaf.
            if len(item_kinds) == 1 and item_kinds <= _PLAIN_TYPES:
                # A list with an integer of more than 64 bits stays in the tree.
                with suppress(OverflowError):
                    return self._plain_list(value, item_kinds.pop())
            return ListTree(self._children(enumerate(value), depth))
        if kind is tuple:
            return TupleTree(self._children(enumerate(value), depth))
        if kind is dict or kind is collections.OrderedDict:
            return self._mapping(value, depth)
        # A read-only view of a dictionary. Its copy has the type of the dictionary.
        if kind is types.MappingProxyType and type(inner := value.copy()) in (dict, collections.OrderedDict):
            return dataclasses.replace(self._mapping(inner, depth), read_only=True)
        if kind is set or kind is frozenset:
            items = self._children(((_Item(), item) for item in value), depth)
            if not all(map(is_hashable, items)):
                raise Unsendable(
                    f"a {kind.__name__} can be sent of numbers, short str and bytes, and tuples of these only"
                )
            return SetTree(self._without_collisions(items, kind), is_frozen=kind is frozenset)
        return self._record(value, kind, depth)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> MappingTree:
        keys = self._without_collisions(tuple([self._key(key, depth) for key in value]), type(value))
        return MappingTree(keys, self._children(value.items(), depth), type(value) is collections.OrderedDict)

    def _record(self, value: Any, kind: type, depth: int) -> RecordTree:
        """Return the tree of a namedtuple or dataclass. Reject it if the receiver could not rebuild it."""
        names = _field_names(kind)
        if names is None:
            raise Unsendable(_advice(kind))
        for name in (kind.__module__, kind.__qualname__, *names):
            self._check_name(name)
        module = module_name(kind)
        if find_type(module, kind.__qualname__) is not kind:
            raise Unsendable(
                f"{type_name(kind)} is not at the top level of its module, so the trainer could not find it"
            )
        missing = [name for name in names if not hasattr(value, name)]
        if missing:
            raise Unsendable(f"{type_name(kind)} has no value in field {missing[0]!r}")
        values = self._children(((_Field(name), getattr(value, name)) for name in names), depth)
        return RecordTree(module, kind.__qualname__, names, values)

    def _children(self, items: Iterable[tuple[object, Any]], depth: int) -> tuple[Tree, ...]:
        """Return the trees of the values in a container. Each value comes with its step of the path."""
        children = []
        for step, item in items:
            self.path.append(step)
            children.append(self.tree(item, depth + 1))
            self.path.pop()
        return tuple(children)

    def _key(self, key: object, depth: int) -> Tree:
        """Return the tree of a mapping's key. Reject a key that cannot be sent."""
        # Nearly all keys are text, which needs no walk.
        if type(key) is str:
            self._check_name(key)
            return key
        # Use an empty list as the tree of a key that cannot be sent. It is not hashable, so the check below rejects it.
        tree = self.tree(key, depth + 1) if type(key) in _KEY_TYPES else ListTree(())
        if not is_hashable(tree):
            raise Unsendable(
                f"the key {key!r:.60} is {type_name(type(key))}; keys must be short str or bytes, numbers, None, "
                "or tuples of these"
            )
        return tree

    def _without_collisions(self, items: tuple[Tree, ...], kind: type) -> tuple[Tree, ...]:
        """Return keys or items of a set unchanged. Reject them if too many have the same hash.

        The receiver would reject them, because the time to build a dict or set of them grows with their number squared.
        """
        if collide(items):
            raise Unsendable(
                f"more than {MAX_EQUAL_HASHES} keys or items of a {kind.__name__} have the same hash, as integers of "
                "over 64 bits and complex numbers may; a data host does not send that: use str instead"
            )
        return items

    def _check_name(self, name: str) -> None:
        """Count a key, or the name of a field or type. Reject it if the tree cannot hold it."""
        self.nodes_left -= 1
        # Measure a name with lone surrogates too. `_is_utf8` rejects it below.
        size = len(name.encode(errors="replace"))
        if size > self.limits.max_inline_bytes or not _is_utf8(name):
            raise Unsendable(f"the key {name!r:.60} is not UTF-8 of at most {self.limits.max_inline_bytes} bytes")

    def _text(self, value: str | bytes) -> Tree:
        """Return a short text unchanged. Make a long text, or a text that is not UTF-8, a leaf."""
        limit = self.limits.max_inline_bytes
        if len(value) <= limit and (isinstance(value, bytes) or (_is_utf8(value) and len(value.encode()) <= limit)):
            return value
        return self._leaf(text_leaf("scalar", (value,), self.bytes_left))

    def _plain_list(self, items: list[Any], kind: type) -> Tree:
        """Make a long list of one plain type a leaf. Raise `OverflowError` if an integer has more than 64 bits."""
        self.list_items_left -= len(items)
        if self.list_items_left < 0:
            raise Unsendable(
                f"the lists hold more than {self.limits.max_list_items} items; use arrays or tensors instead"
            )
        return self._leaf(list_leaf(items, kind, self.bytes_left))

    def _leaf(self, leaf: Leaf) -> LeafRef:
        """Add a leaf, and return a reference to it."""
        if len(self.leaves) >= self.limits.max_leaves:
            raise Unsendable(f"the batch has more than {self.limits.max_leaves} tensors and arrays; stack some of them")
        self.bytes_left -= leaf.nbytes
        self.leaves.append(leaf)
        return LeafRef(len(self.leaves) - 1)

    def _with_checked_ndim(self, value: Any) -> Any:
        if value.ndim > self.limits.max_ndim:
            raise Unsendable(f"{value.ndim} dimensions, at most {self.limits.max_ndim} can be sent; reshape it")
        return value


def _is_utf8(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8, which is not possible with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def without_script_module(text: str) -> str:
    """Return a text without the module name of the user's script, as if the script were ``__main__``."""
    return text if _script_module == "__main__" else text.replace(f"{_script_module}.", "")


def type_name(kind: type) -> str:
    """Return a type's name for messages. The module is left out if it is ``builtins`` or the user's script."""
    is_plain = kind.__module__ in ("builtins", *_SCRIPT_NAMES, _script_module)
    return kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}"


def _advice(kind: type) -> str:
    """Return advice about a type that cannot be sent."""
    for base in kind.__mro__[1:]:
        # The class of torch's jagged tensors.
        if kind.__name__ == "NestedTensor" and base.__module__ == "torch":
            return NESTED_ADVICE
        if base.__module__ == "torch" and base.__name__ == "Tensor":
            return f"{type_name(kind)} cannot be sent; convert it with .detach().as_subclass(torch.Tensor)"
        if base is np.ndarray:
            return f"{type_name(kind)} cannot be sent; convert it with numpy.asarray"
        if base in (dict, list, tuple, int, float, str, bytes):
            return f"{type_name(kind)} cannot be sent; convert it to {base.__name__}"
    if issubclass(kind, Mapping | Sequence):
        return f"{type_name(kind)} cannot be sent; convert it to {'dict' if issubclass(kind, Mapping) else 'list'}"
    return (
        f"{type_name(kind)} cannot be sent; return tensors, arrays, numbers, str, bytes or None, "
        "or dicts, lists, tuples, sets, namedtuples or dataclasses of these"
    )


def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a namedtuple or dataclass type, or None for other types."""
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        return names if isinstance(names, tuple) and all(isinstance(name, str) for name in names) else None
    if not dataclasses.is_dataclass(kind):
        return None
    try:
        # `object.__new__` raises for subclasses of built-in types. They are rejected, because their fields are not
        # their whole value.
        object.__new__(kind)
    except TypeError:
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def module_name(kind: type) -> str:
    """Return the module of a type in the form that `find_type` takes. It is empty for the user's script."""
    return "" if kind.__module__ in (*_SCRIPT_NAMES, _script_module) else kind.__module__


def find_type(module: str, qualified_name: str) -> type | None:
    """Return a type of an imported module, or None if it is not found. Runs no code of the module."""
    found: Any = sys.modules.get(module or _script_module)
    for name in qualified_name.split("."):
        # Do not use getattr, because a module's __getattr__ or a descriptor may run code.
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) else None


def _find_record_type(tree: RecordTree) -> type:
    """Return the type of a record.

    Raises:
        UnknownTypeError: If this process lacks a type of that name, or its type has other fields.
    """
    kind = find_type(tree.module, tree.qualified_name)
    name = f"a {tree.qualified_name!r:.60} of {f'the module {tree.module!r:.60}' if tree.module else 'the script'}"
    if kind is None and tree.module and tree.module not in sys.modules:
        raise UnknownTypeError(
            f"a batch holds {name}, which this process has not imported\n"
            f"  Write {f'import {tree.module}'!r:.80} at the top level of the script."
        )
    if kind is None:
        raise UnknownTypeError(
            f"a batch holds {name}, where this process finds none\n"
            "  Define it at the top level, in every process, and have the same code on all hosts."
        )
    if _field_names(kind) != tree.fields:
        raise UnknownTypeError(
            f"a batch holds {name} with other fields than here\n"
            f"  It came with {tree.fields!r:.300}. Have the same code on all hosts."
        )
    return kind


def unflatten(tree: Tree, leaves: Sequence[Leaf]) -> Any:
    """Rebuild a batch from its tree and leaves.

    Tensors and arrays are writable. They share the leaves' memory if that is writable. None of the
    user's code runs, because the fields of dataclasses are set without ``__init__``, as in unpickling.

    Args:
        tree: Tree that `flatten` returned.
        leaves: One leaf for each `LeafRef`, in order.

    Raises:
        ProtocolError: If the tree does not refer to each leaf once and in order, or a leaf's data does not fit its
            dtype.
        UnknownTypeError: If a record's type is not imported here or has other fields, or torch lacks a dtype.
    """
    builder = _Builder(leaves)
    batch = builder.build(tree)
    if builder.num_used != len(leaves):
        raise ProtocolError(f"a batch mentions {builder.num_used} of its {len(leaves)} leaves")
    return batch


class _Builder:
    """One walk over a tree."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self.num_used = 0

    def build(self, tree: Tree) -> Any:
        """Return the value of a tree. Leaves must be mentioned in order, each of them once."""
        if isinstance(tree, LeafRef):
            if tree.index != self.num_used or tree.index >= len(self.leaves):
                raise ProtocolError(f"a batch mentions leaf {tree.index}, expected {self.num_used}")
            self.num_used += 1
            return restore(self.leaves[tree.index])
        if isinstance(tree, ListTree):
            return [self.build(item) for item in tree.items]
        if isinstance(tree, TupleTree):
            return tuple([self.build(item) for item in tree.items])
        if isinstance(tree, MappingTree):
            keys = [self.build(key) for key in tree.keys]
            pairs = zip(keys, [self.build(value) for value in tree.values], strict=True)
            mapping = collections.OrderedDict(pairs) if tree.ordered else dict(pairs)
            return types.MappingProxyType(mapping) if tree.read_only else mapping
        if isinstance(tree, SetTree):
            return (frozenset if tree.is_frozen else set)([self.build(item) for item in tree.items])
        return self._record(tree) if isinstance(tree, RecordTree) else tree

    def _record(self, tree: RecordTree) -> Any:
        """Rebuild a namedtuple or dataclass without running its code."""
        kind = _find_record_type(tree)
        values = [self.build(value) for value in tree.values]
        if issubclass(kind, tuple):
            return tuple.__new__(kind, values)
        record = object.__new__(kind)
        try:
            for name, value in zip(tree.fields, values, strict=True):
                object.__setattr__(record, name, value)
        except AttributeError as exc:
            raise UnknownTypeError(
                f"a batch holds a {tree.qualified_name!r:.80}, whose fields cannot be set here: {exc}"
            ) from None
        return record

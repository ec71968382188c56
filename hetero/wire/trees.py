"""Converts the structure of a batch to a protobuf message, and back. A received message is checked before its use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

from hetero.batches.indices import fits_int64
from hetero.batches.structure.leaves import Container, Leaf, LeafShape
from hetero.batches.structure.trees import (
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
from hetero.errors import ProtocolError
from hetero.wire.limits import MAX_PARSED_BYTES, Limits
from hetero.wire.messages import parse, parse_bounded
from hetero.wire.proto import data_pb2 as pb

__all__ = ["decode_items", "decode_structure", "encode_items", "encode_structure"]

_DTYPE_CODES = {name.lower(): cast(pb.DType, code) for name, code in pb.DType.items()[1:]}
_DTYPE_NAMES = {code: name for name, code in _DTYPE_CODES.items()}
_CONTAINER_CODES = {name.lower(): cast(pb.Container, code) for name, code in pb.Container.items()[1:]}
_CONTAINER_NAMES = {code: name for name, code in _CONTAINER_CODES.items()}
_CONTAINER_KINDS = ("list", "tuple", "set", "frozen_set", "mapping", "record")
_MAX_KEPT_BYTES = 4096
"""Largest structure whose decoded form is kept."""
_VALUE_KINDS = {bool: "boolean", int: "integer", float: "real", str: "text", bytes: "binary"}


def encode_structure(tree: Tree, leaves: Sequence[Leaf]) -> bytes:
    """Serialise the result of `hetero.batches.structure.conversion.flatten`, without data, as a ``Structure``."""
    message = pb.Structure()
    _fill(message.root, tree)
    for leaf in leaves:
        dtype = _DTYPE_CODES.get(leaf.dtype)
        made = message.leaves.add(
            dtype=pb.TEXT_OR_DATE if dtype is None else dtype,
            container=_CONTAINER_CODES[leaf.container],
            shape=leaf.shape,
            nbytes=leaf.nbytes,
        )
        if dtype is None:
            made.numpy_dtype = leaf.dtype
        # A leaf in C order has no strides, which saves bytes.
        if leaf.strides:
            made.strides.extend(leaf.strides)
    return message.SerializeToString()


def _fill(node: pb.Node, tree: Tree) -> None:
    """Write a tree into an empty message."""
    if isinstance(tree, LeafRef):
        node.leaf = tree.index
    elif tree is None:
        node.none = True
    elif isinstance(tree, (ListTree, TupleTree, SetTree)):  # a tuple, because `|` would make a new union for every node
        children = _children(node, tree)
        # An empty container would not be sent without this, because no field of it is set.
        children.SetInParent()
        for item in tree.items:
            _fill(children.items.add(), item)
    elif isinstance(tree, MappingTree):
        _fill_mapping(node.mapping, tree)
    elif isinstance(tree, RecordTree):
        record = node.record
        record.module, record.qualified_name = tree.module, tree.qualified_name
        record.fields.extend(tree.fields)
        for value in tree.values:
            _fill(record.values.add(), value)
    elif isinstance(tree, complex):
        node.complex.real, node.complex.imaginary = tree.real, tree.imag
    elif type(tree) is int and not fits_int64(tree):
        node.big_integer = tree.to_bytes(tree.bit_length() // 8 + 1, "little", signed=True)
    else:
        setattr(node, _VALUE_KINDS[type(tree)], tree)


def _fill_mapping(mapping: pb.Mapping, tree: MappingTree) -> None:
    """Write a mapping into an empty message."""
    # Always assign this field, because the assignment creates the message.
    mapping.ordered = tree.ordered
    # Set this field only for read-only mappings, because a field that is not set takes no bytes.
    if tree.read_only:
        mapping.read_only = True
    keys, values = mapping.keys, mapping.values
    for key in tree.keys:
        _fill(keys.add(), key)
    for value in tree.values:
        _fill(values.add(), value)


def _children(node: pb.Node, tree: ListTree | TupleTree | SetTree) -> pb.Children:
    """Return the field of a node that holds the items of this kind of container."""
    if isinstance(tree, SetTree):
        return node.frozen_set if tree.is_frozen else node.set
    return node.list if isinstance(tree, ListTree) else node.tuple


def decode_structure(data: bytes, limits: Limits) -> tuple[Tree, tuple[LeafShape, ...]]:
    """Return a tree and the shapes of its leaves from a serialised ``Structure``.

    The results for the latest short structures are kept, because batches and kept samples often have the same one.

    Args:
        data: The untrusted bytes.
        limits: Larger structures are rejected.

    Raises:
        ProtocolError: If `encode_structure` could not have made the bytes.
    """
    return _decode_kept(data, limits) if len(data) <= _MAX_KEPT_BYTES else _decode(data, limits)


def encode_items(items: Sequence[Tree]) -> bytes:
    """Serialise trees without leaves as ``Children``."""
    children = pb.Children()
    for item in items:
        _fill(children.items.add(), item)
    return children.SerializeToString()


def decode_items(data: bytes) -> tuple[Tree, ...]:
    """Return the trees in a serialised ``Children``. Unlike the trees of `encode_items`, they may have leaves.

    Raises:
        ProtocolError: If the bytes are not such a message, or too many.
    """
    # Each part, and each byte of a text, takes at least one byte of ``data``. So the size of ``data`` bounds both.
    limits = Limits(max_nodes=MAX_PARSED_BYTES, max_inline_bytes=MAX_PARSED_BYTES)
    return _TreeReader(limits).trees(parse_bounded(pb.Children, data).items, depth=0)


def _decode(data: bytes, limits: Limits) -> tuple[Tree, tuple[LeafShape, ...]]:
    """Parse and check a ``Structure``, see `decode_structure`."""
    message = parse(pb.Structure, data)
    if len(message.leaves) > limits.max_leaves:
        raise ProtocolError(f"a batch has {len(message.leaves)} leaves, at most {limits.max_leaves} are allowed")
    leaves = tuple([_leaf_shape(leaf) for leaf in message.leaves])
    for leaf in leaves:
        leaf.check(max_bytes=limits.max_batch_bytes, max_ndim=limits.max_ndim, max_list_items=limits.max_list_items)
    list_items = sum(leaf.shape[0] for leaf in leaves if leaf.container == "list")
    if list_items > limits.max_list_items:
        raise ProtocolError(f"the lists have {list_items} items, at most {limits.max_list_items} are allowed")
    reader = _TreeReader(limits)
    tree = reader.tree(message.root, depth=0)
    if reader.num_leaves != len(leaves):
        raise ProtocolError(f"a batch mentions {reader.num_leaves} of its {len(leaves)} leaves")
    return tree, leaves


_decode_kept = functools.lru_cache(maxsize=256)(_decode)


def _leaf_shape(message: pb.Leaf) -> LeafShape:
    """Return the shape in a message. Check only the number of dimensions. `LeafShape.check` does the other checks."""
    shape, strides = tuple(message.shape), tuple(message.strides) if message.strides else ()
    # Bound the numbers before anything is computed from them. NumPy and torch have 64 dimensions at most.
    if (ndim := max(len(shape), len(strides))) > 64:
        raise ProtocolError(f"a leaf has {ndim} dimensions")
    dtype = _DTYPE_NAMES.get(message.dtype, "an unknown dtype")
    # For text and dates, the message has NumPy's name of the dtype, which is short and begins with the byte order.
    if message.dtype == pb.TEXT_OR_DATE:
        dtype = message.numpy_dtype[:32] if message.numpy_dtype[:1] in ("<", "|") else "an unknown dtype"
    return LeafShape(
        container=cast(Container, _CONTAINER_NAMES.get(message.container, "unknown container")),
        dtype=dtype,
        shape=shape,
        nbytes=message.nbytes,
        strides=strides,
    )


class _TreeReader:
    """Converts the tree of one message, and counts its nodes and leaves."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_leaves = 0
        self.num_nodes = 0

    def tree(self, node: pb.Node, depth: int) -> Tree:
        """Return the tree in a node, which has ``depth`` containers around it."""
        # A node is a leaf, a container, or a plain value. The header holds the plain values.
        self.num_nodes += 1
        if self.num_nodes > self.limits.max_nodes:
            raise ProtocolError(f"a batch has more than {self.limits.max_nodes} parts")
        kind: str | None = node.WhichOneof("kind")
        if kind == "leaf":
            if node.leaf != self.num_leaves:
                raise ProtocolError(f"a batch mentions leaf {node.leaf}, expected {self.num_leaves}")
            self.num_leaves += 1
            return LeafRef(node.leaf)
        if kind in _CONTAINER_KINDS:
            if depth >= self.limits.max_depth:
                raise ProtocolError(f"a batch nests deeper than {self.limits.max_depth} levels")
            return self._container(node, kind, depth + 1)
        if kind == "none":
            if not node.none:
                raise ProtocolError("a None has the value false")
            return None
        if kind is None:
            raise ProtocolError("a part of a batch has an unknown kind")
        if kind == "complex":
            return complex(node.complex.real, node.complex.imaginary)
        # An integer of more than 64 bits is sent as bytes.
        value: bool | int | float | str | bytes = getattr(node, kind)
        if isinstance(value, str | bytes) and _num_bytes(value) > self.limits.max_inline_bytes:
            raise ProtocolError(f"a string inside the header exceeds {self.limits.max_inline_bytes} bytes")
        return int.from_bytes(node.big_integer, "little", signed=True) if kind == "big_integer" else value

    def _container(self, node: pb.Node, kind: str, depth: int) -> Tree:
        """Return the tree in a node of a container."""
        if kind == "list":
            return ListTree(tuple([self.tree(item, depth) for item in node.list.items]))
        if kind == "tuple":
            return TupleTree(tuple([self.tree(item, depth) for item in node.tuple.items]))
        if kind in ("set", "frozen_set"):
            children = node.set if kind == "set" else node.frozen_set
            items = self.trees(children.items, depth)
            # Check for equal hashes before the set is built. A sender can choose n numbers with the same hash, and
            # building a set of them takes n squared steps.
            if not all(map(is_hashable, items)) or collide(items) or len(set(items)) != len(items):
                raise ProtocolError("the items of a set repeat, have the same hash or cannot be in one")
            return SetTree(items, is_frozen=kind == "frozen_set")
        if kind == "mapping":
            mapping = node.mapping
            keys = tuple([self._key(key, depth) for key in mapping.keys])
            if len(keys) != len(mapping.values) or collide(keys) or len(set(keys)) != len(keys):
                raise ProtocolError("the keys of a mapping repeat, have the same hash or do not match its values")
            return MappingTree(keys, self.trees(mapping.values, depth), mapping.ordered, mapping.read_only)
        record = node.record
        names = tuple(record.fields)
        for name in (record.module, record.qualified_name, *names):
            self._check_name(name)
        if len(names) != len(record.values) or len(set(names)) != len(names):
            raise ProtocolError("the fields of a record repeat or do not match its values")
        return RecordTree(record.module, record.qualified_name, names, self.trees(record.values, depth))

    def trees(self, nodes: Any, depth: int) -> tuple[Tree, ...]:
        """Return the trees in several nodes, which have ``depth`` containers around them."""
        return tuple([self.tree(node, depth) for node in nodes])

    def _key(self, node: pb.Node, depth: int) -> Tree:
        """Return a key of a mapping."""
        # Nearly every key is text. `tree` would take twice as long for it, because it looks for other kinds first.
        if node.WhichOneof("kind") == "text":
            self.num_nodes += 1
            if self.num_nodes > self.limits.max_nodes:
                raise ProtocolError(f"a batch has more than {self.limits.max_nodes} parts")
            text = node.text
            self._check_name(text)
            return text
        key = self.tree(node, depth)
        if not is_hashable(key):
            raise ProtocolError(f"the key of a mapping is of kind {node.WhichOneof('kind')}")
        return key

    def _check_name(self, name: str) -> None:
        """Reject a key, or the name of a record's type or field, that is too long."""
        if _num_bytes(name) > self.limits.max_inline_bytes:
            raise ProtocolError(f"a key or name exceeds {self.limits.max_inline_bytes} bytes")


def _num_bytes(value: str | bytes) -> int:
    return len(value.encode()) if isinstance(value, str) else len(value)

"""Conversion of the large parts of a batch to contiguous bytes with a dtype, a shape and strides, and back.

Bytes are little-endian, because PyTorch has Linux wheels only for little-endian machines.
torch is imported only to restore a tensor.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np

from hetero.batches.structure.layouts import array_strides, is_dense, tensor_strides
from hetero.errors import ConfigError, ProtocolError

__all__ = [
    "DTYPES",
    "NESTED_ADVICE",
    "Container",
    "Leaf",
    "LeafShape",
    "Text",
    "TooLarge",
    "UnknownTypeError",
    "Unsendable",
    "list_leaf",
    "numpy_leaf",
    "restore",
    "tensor_leaf",
    "text_leaf",
]

Container: TypeAlias = Literal["tensor", "array", "scalar", "list"]
"""Kind of value that a leaf was made from.

``tensor`` is a torch.Tensor, and ``array`` a numpy.ndarray. ``scalar`` is a NumPy scalar, or a long str or bytes.
``list`` is a list of one plain type.
"""

Text: TypeAlias = str | bytes

_ITEM_BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
_ITEM_BYTES |= {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "bool": 1, "c64": 8, "c128": 16}
_TORCH_ONLY = {"bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
_TORCH_ONLY |= {"f8e4m3fnuz": "float8_e4m3fnuz", "f8e5m2fnuz": "float8_e5m2fnuz"}
"""Names in torch of the dtypes that NumPy does not have."""
_ITEM_BYTES |= {name: 1 for name in _TORCH_ONLY if name.startswith("f8")}
_TEXT_OR_DATE = re.compile(r"(<U|\|S)[1-9]\d{0,6}|<[Mm]8(\[([1-9]\d{0,5})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
"""Pattern of NumPy's names for dtypes of text and dates, which contain a size or a unit."""

_NUMPY = {name: np.dtype(f"{name[0]}{size}") for name, size in _ITEM_BYTES.items() if name not in _TORCH_ONLY}
_NUMPY["bool"] = np.dtype(np.bool_)
_NUMPY_NAMES = {dtype: name for name, dtype in _NUMPY.items()}

_LIST_DTYPES: dict[type, str] = {int: "i64", float: "f64", bool: "bool"}

DTYPES: dict[Container, frozenset[str]] = {
    "tensor": frozenset(_ITEM_BYTES),
    "array": frozenset(_NUMPY),
    "scalar": frozenset(_NUMPY) | {"bytes", "utf8"},
    "list": frozenset(_LIST_DTYPES.values()) | {"bytes", "utf8"},
}
"""Dtypes that each container can hold. The elements of ``bytes`` and ``utf8`` vary in length.

Arrays and NumPy scalars can also hold dates and text of fixed length. These dtypes have NumPy's own names, for example
``<U12`` or ``<M8[ns]``.
"""

NESTED_ADVICE = "a sparse or nested tensor cannot be sent; convert it with .to_dense() or to a list of tensors"
"""Message about sparse and nested tensors. It is also used for jagged tensors, which have a separate class."""

_LENGTH = np.dtype("<u4")
_ANY_BYTES = frozenset(_ITEM_BYTES) - {"bool"}
"""Dtypes whose elements may have any bits."""
_MAX_STRIDE = 2**36
"""Limit on a stride, in elements. It is needed because a dimension with one element may have any stride.

NumPy and torch count bytes in 63 bits, and one element of text may have up to 2**26 bytes.
"""


class Unsendable(Exception):
    """A value cannot become a leaf. The message gives the reason and advice."""


class TooLarge(Unsendable):
    """A leaf needs more bytes than remain of the limit on the batch."""


class UnknownTypeError(ConfigError):
    """A batch arrived intact but holds a type that this process does not have. The message gives advice."""


# Not frozen, because a frozen class calls object.__setattr__ for each field. No code changes an instance.
@dataclass(slots=True, unsafe_hash=True)
class LeafShape:
    """All properties of a leaf except its bytes."""

    container: Container
    """Kind of value that the leaf was made from."""
    dtype: str
    """One of `DTYPES` of the container, or NumPy's name of a dtype for text or dates."""
    shape: tuple[int, ...]
    """Shape in elements, with one dimension for a list and zero dimensions for a scalar."""
    nbytes: int
    """Bytes of the data. If elements vary in length, this includes the bytes of their lengths."""
    strides: tuple[int, ...] = ()
    """Strides of a tensor or array in elements. Empty for C order."""

    def filled(self, data: memoryview) -> Leaf:
        """Return a leaf of this shape. An empty leaf ignores the data."""
        data = data if self.nbytes else memoryview(b"")
        return Leaf(self.container, self.dtype, self.shape, self.nbytes, self.strides, data=data)

    def check(self, *, max_bytes: int, max_ndim: int, max_list_items: int) -> None:
        """Reject a leaf that no encoder produces, or that needs more memory than allowed. Allocates nothing.

        Raises:
            ProtocolError: If the fields are invalid or exceed a limit.
        """
        text_or_date = None if self.dtype in _ITEM_BYTES else _text_or_date(self.dtype)
        if self.dtype not in DTYPES.get(self.container, ()) and (
            text_or_date is None or self.container not in ("array", "scalar")
        ):
            raise ProtocolError(f"a leaf is a {self.container} of {self.dtype}, which no batch contains")
        ndim = len(self.shape)
        # The shape of a scalar is empty, and that of a list has one dimension. Tensors and arrays may have any number.
        if ndim > max_ndim or ndim != {"scalar": 0, "list": 1}.get(self.container, ndim):
            raise ProtocolError(f"a {self.container} leaf has {ndim} dimensions, at most {max_ndim} are allowed")
        # Limit the size. Integers of Python cannot overflow. Ignore zeros in the shape, because a size of 0 would leave
        # the other dimensions of an empty array without a limit.
        item_bytes = text_or_date.itemsize if text_or_date else _ITEM_BYTES.get(self.dtype, _LENGTH.itemsize)
        size = math.prod(dim for dim in self.shape if dim) * item_bytes
        if size > max_bytes or self.nbytes > max_bytes:
            raise ProtocolError(f"a leaf of shape {self.shape} and {self.nbytes} bytes exceeds {max_bytes} bytes")
        if self.container == "list" and self.shape[0] > max_list_items:
            raise ProtocolError(f"a list leaf has {self.shape[0]} items, at most {max_list_items} are allowed")
        # Elements of the dtypes bytes and utf8 vary in length. For them, ``size`` has only the bytes of their lengths.
        size = 0 if 0 in self.shape else size
        if self.nbytes < size or (self.dtype not in ("bytes", "utf8") and self.nbytes != size):
            raise ProtocolError(f"a {self.dtype} leaf of shape {self.shape} has {self.nbytes} bytes, expected {size}")
        if self.strides:
            self._check_strides()

    def _check_strides(self) -> None:
        """Reject strides that no encoder produces."""
        if self.container not in ("tensor", "array") or len(self.strides) != len(self.shape):
            raise ProtocolError(
                f"a {self.container} leaf of {len(self.shape)} dimensions has {len(self.strides)} strides"
            )
        if not all(0 <= stride <= _MAX_STRIDE for stride in self.strides) or not is_dense(self.shape, self.strides):
            raise ProtocolError(
                f"a leaf of shape {self.shape} has the strides {self.strides}, which leave gaps or overlap"
            )


# Not frozen, for the same reason as LeafShape.
@dataclass(slots=True, kw_only=True, eq=False)
class Leaf(LeafShape):
    """One large part of a batch.

    If the leaf is made from a contiguous array or CPU tensor, its data is the memory of that array or tensor.
    """

    data: memoryview
    """Data in memory order, as a view of format ``B`` with one dimension.

    Only writable data is restored without a copy.
    """

    # Compare by identity, because leaves of equal shape may have different data.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def numpy_leaf(value: Any, max_bytes: int) -> Leaf:
    """Return an array or NumPy scalar as a leaf.

    Args:
        value: A numpy.ndarray (no subclass) or a numpy.generic.
        max_bytes: Limit on the size of the leaf.

    Raises:
        Unsendable: If the dtype cannot be sent, or the value is too large.
    """
    name = _NUMPY_NAMES.get(value.dtype)
    if name is None and value.dtype.kind in "USMm" and _text_or_date(value.dtype.str):
        name = value.dtype.str
    if name is None:
        raise Unsendable(f"{type(value).__name__} of {value.dtype.str!r} cannot be sent; {_dtype_advice(value.dtype)}")
    if type(value) is not np.ndarray:
        array = np.asarray(value)
        # NumPy cuts zeros off the end of a text.
        if array.dtype.kind in "US" and array[()] != value:
            raise Unsendable(f"a {type(value).__name__} that ends in zeros cannot be sent; convert it to str or bytes")
        return _fixed("scalar", name, array, max_bytes)
    # Send the elements in the order that a copy has in memory. Sort the dimensions by their strides in the copy. Then
    # the C order of the transposed array is this order.
    strides = array_strides(value)
    in_order = value.transpose(sorted(range(value.ndim), key=lambda dim: -strides[dim])) if strides else value
    return _fixed("array", name, in_order, max_bytes, shape=value.shape, strides=strides)


def _dtype_advice(dtype: np.dtype[Any]) -> str:
    """Return advice about a NumPy dtype that cannot be sent."""
    # Return before `newbyteorder` is called, because some of these dtypes lack a byte order.
    if dtype.kind in "OT":
        return "return a list of str, bytes or numbers, or an array of numbers"
    native = dtype.newbyteorder("=")
    if native in _NUMPY_NAMES or _text_or_date(native.str):
        return "it is big-endian: convert it with .astype(a.dtype.newbyteorder('='))"
    return f"convert it to one of {', '.join(_NUMPY)}"


@lru_cache(maxsize=256)
def _text_or_date(name: str) -> np.dtype[Any] | None:
    """Return the dtype for NumPy's name of a date or of text of fixed length, or None for any other name."""
    return np.dtype(name) if _TEXT_OR_DATE.fullmatch(name) else None


def tensor_leaf(torch: Any, tensor: Any, max_bytes: int) -> Leaf:
    """Return a tensor as a leaf.

    Args:
        torch: The torch module.
        tensor: A torch.Tensor (no subclass).
        max_bytes: Limit on the size of the leaf.

    Raises:
        Unsendable: If the tensor is sparse or nested, is on an accelerator, requires a gradient, has a dtype that
            cannot be sent, or is too large.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Unsendable(NESTED_ADVICE)
    if not tensor.is_cpu:
        raise Unsendable(f"a tensor on {tensor.device} cannot be sent; data sets run on CPUs: convert it with .cpu()")
    if tensor.requires_grad:
        raise Unsendable("a tensor that requires a gradient cannot be sent; convert it with .detach()")
    name = _torch_names().get(tensor.dtype)
    if name is None:
        raise Unsendable(f"a tensor of {tensor.dtype} cannot be sent; convert it to one of {', '.join(_ITEM_BYTES)}")
    # Torch negates or conjugates some tensors only when they are read. Their memory holds other values, so compute the
    # values first. Only complex tensors (dtypes c64 and c128) are conjugated.
    if tensor.is_neg() or (name[0] == "c" and tensor.is_conj()):
        _check_size(tensor, max_bytes)
        tensor = tensor.resolve_conj().resolve_neg()
    # Find the strides to send, and bring the elements into one dimension in memory order.
    shape = tuple(tensor.shape)
    # Handle ordinary tensors in few steps. When all tensors went through `tensor_strides`, flatten took 40 to 50 %
    # longer.
    strides = () if tensor.is_contiguous() and 1 not in shape and 0 not in shape else tensor_strides(torch, tensor)
    if strides:
        if max(strides) > _MAX_STRIDE:
            raise Unsendable(f"a tensor with the strides {strides} cannot be sent; convert it with .contiguous()")
        _check_size(tensor, max_bytes)
        dense = tensor if strides == tensor.stride() else tensor.clone()
        tensor = dense.as_strided((dense.numel(),), (1,))
    # View the bytes as a dtype that NumPy has.
    if name in _TORCH_ONLY:
        tensor = tensor.view(torch.int16 if name == "bf16" else torch.uint8)
    array = tensor.numpy()
    return _fixed("tensor", name, array, max_bytes, shape=shape, strides=strides)


def _check_size(value: Any, max_bytes: int) -> None:
    """Raise if a tensor or array is too large.

    Call this before any copy, because an expanded tensor has more elements than its memory holds. For an empty tensor
    or array, multiply the dimensions that are not 0, because the receiver limits their product too
    (`LeafShape.check`).
    """
    if (size := value.nbytes or math.prod(dim for dim in value.shape if dim) * value.itemsize) > max_bytes:
        raise _too_large(size, max_bytes)


def _fixed(
    container: Container,
    name: str,
    array: np.ndarray[Any, Any],
    max_bytes: int,
    *,
    shape: tuple[int, ...] | None = None,
    strides: tuple[int, ...] = (),
) -> Leaf:
    """Return an array of fixed-size elements as a leaf. Copies the array only if it is not contiguous.

    Args:
        container: Container of the leaf.
        name: Name of the dtype.
        array: Elements in the order of sending.
        max_bytes: Limit on the size of the leaf.
        shape: Shape of the leaf. None selects the array's shape.
        strides: Strides of the leaf in elements. Empty for C order.
    """
    nbytes = array.nbytes
    # An empty array has 0 bytes, and `_check_size` limits its dimensions that are not 0.
    if not 0 < nbytes <= max_bytes:
        _check_size(array, max_bytes)
    # memoryview cannot cast empty data.
    if not nbytes:
        data = memoryview(b"")
    else:
        # A scalar gets one dimension here, which does not change the data.
        whole = np.ascontiguousarray(array)
        # NumPy makes no memoryview of dates, so view them as bytes first.
        data = whole.data.cast("B") if array.dtype.kind in "biuf" else whole.reshape(-1).view(np.uint8).data
    # Only a view of other data has invalid elements, for example of bytes as booleans.
    if name not in _ANY_BYTES and (problem := _invalid(name, data)):
        raise Unsendable(f"an array has {problem}; it is a view of something else")
    shape = tuple(array.shape) if shape is None else shape
    return Leaf(container=container, dtype=name, shape=shape, nbytes=nbytes, data=data, strides=strides)


def list_leaf(items: list[Any], kind: type, max_bytes: int) -> Leaf:
    """Return a list of one plain type as a leaf.

    Args:
        items: Items, all of exactly the type ``kind``.
        kind: str, bytes, int, float or bool.
        max_bytes: Limit on the size of the leaf.

    Raises:
        OverflowError: If an int exceeds 64 bits.
        Unsendable: If a str cannot be encoded as UTF-8, or the list is too large.
    """
    if kind is str or kind is bytes:
        return text_leaf("list", items, max_bytes)
    name = _LIST_DTYPES[kind]
    # Check the size before NumPy makes the array.
    nbytes = _NUMPY[name].itemsize * len(items)
    if nbytes > max_bytes:
        raise _too_large(nbytes, max_bytes)
    return _fixed("list", name, np.array(items, dtype=_NUMPY[name]), max_bytes)


def text_leaf(container: Container, items: Sequence[Text], max_bytes: int) -> Leaf:
    """Return items that are all str or all bytes as a leaf. A ``scalar`` has one item. A ``list`` may have several.

    Raises:
        Unsendable: If a str cannot be encoded as UTF-8, or the leaf is too large.
    """
    is_text = isinstance(items[0], str)
    try:
        encoded = [item.encode() if isinstance(item, str) else item for item in items]
    except UnicodeEncodeError as exc:
        raise Unsendable(f"a str has no UTF-8 form: {exc.reason} at {exc.start}; send it as bytes") from None
    lengths = [len(item) for item in encoded]
    nbytes = sum(lengths) + _LENGTH.itemsize * len(lengths)
    if nbytes > max_bytes:
        raise _too_large(nbytes, max_bytes)
    data = memoryview(b"".join((np.array(lengths, _LENGTH).tobytes(), *encoded)))
    shape = (len(items),) if container == "list" else ()
    return Leaf(container=container, dtype="utf8" if is_text else "bytes", shape=shape, nbytes=nbytes, data=data)


def _too_large(nbytes: int, max_bytes: int) -> TooLarge:
    return TooLarge(f"{nbytes} bytes, but only {max_bytes} are left")


def restore(leaf: Leaf) -> Any:
    """Return the value that a checked leaf was made from. Tensors and arrays share the leaf's memory if it is writable.

    Raises:
        ProtocolError: If the data does not fit the dtype.
        UnknownTypeError: If the leaf is a tensor, and torch is not installed here or lacks its dtype.
    """
    if leaf.dtype in ("bytes", "utf8"):
        items = _split(leaf)
        return items if leaf.container == "list" else items[0]
    data = leaf.data
    if problem := _invalid(leaf.dtype, data):
        raise ProtocolError(f"a leaf has {problem}")
    if leaf.container == "tensor":
        return _restore_tensor(leaf)
    # Dates and text of fixed length have NumPy's own names.
    dtype = _NUMPY.get(leaf.dtype) or np.dtype(leaf.dtype)
    # `frombuffer` rejects empty data.
    if not leaf.nbytes:
        return [] if leaf.container == "list" else np.empty(leaf.shape, dtype)
    # Copy read-only data, because the user's code may write to the array.
    array = np.frombuffer(bytearray(data) if data.readonly else data, dtype)
    if leaf.container == "list":
        return array.tolist()
    if leaf.strides:
        return np.ndarray(leaf.shape, dtype, array, strides=[stride * dtype.itemsize for stride in leaf.strides])
    return array[0] if leaf.container == "scalar" else array.reshape(leaf.shape)


def _restore_tensor(leaf: Leaf) -> Any:
    """Return a tensor that uses the leaf's memory if it is writable."""
    dtypes = _torch_dtypes()
    dtype = dtypes.get(leaf.dtype)
    if dtype is None:
        lack = "a torch that has no such dtype" if dtypes else "no torch"
        raise UnknownTypeError(
            f"a batch holds a tensor of {leaf.dtype}, and this process has {lack}\n"
            "  Install the data hosts' version of torch on the trainer hosts, or return arrays: "
            "@hetero.dataset(collate_fn=hetero.collate_arrays) makes some."
        )
    import torch

    # `frombuffer` rejects empty data.
    if not leaf.nbytes:
        return (
            torch.empty_strided(leaf.shape, leaf.strides, dtype=dtype)
            if leaf.strides
            else torch.empty(leaf.shape, dtype=dtype)
        )
    # Copy read-only data, because the user's code may write to the tensor.
    data = bytearray(leaf.data) if leaf.data.readonly else leaf.data
    # Use torch's own tensor of this memory if there is one, see `_owner`. Otherwise the next batch could overwrite
    # memory that is still being copied to an accelerator.
    owner = _owner(torch, data)
    flat = torch.frombuffer(data, dtype=dtype) if owner is None else owner[: leaf.nbytes].view(dtype)
    return flat.as_strided(leaf.shape, leaf.strides) if leaf.strides else flat.view(leaf.shape)


def _owner(torch: Any, data: Any) -> Any:
    """Return the tensor of bytes that begins at the data's address, or None if the memory is not torch's.

    Before torch's allocator reuses pinned memory, it waits until copies of this memory to an accelerator are done. The
    allocator knows a copy by the storage of the copied tensor, or by the address where the copy starts. A tensor that
    is made from a buffer has another storage. If only a part of it is copied, the copy starts at another address too.
    Then the allocator does not wait, and the next batch could overwrite the part during the copy.
    """
    # A memoryview of a tensor's memory has the tensor's NumPy array as `obj`. The `base` of this array is the tensor.
    owner: Any = getattr(getattr(data, "obj", None), "base", None)
    if type(owner) is not torch.Tensor or owner.dtype is not torch.uint8 or owner.ndim != 1:
        return None
    begins_there = owner.is_contiguous() and owner.data_ptr() == np.frombuffer(data, np.uint8).ctypes.data
    return owner if begins_there else None


def _split(leaf: Leaf) -> list[Any]:
    """Return the elements of a leaf of str or bytes, which vary in length."""
    # The data has the lengths of all elements first, and then the elements.
    num_items = leaf.shape[0] if leaf.shape else 1
    start = num_items * _LENGTH.itemsize
    # `frombuffer` rejects empty data.
    lengths = np.frombuffer(leaf.data[:start], _LENGTH) if num_items else np.empty(0, _LENGTH)
    if start + int(lengths.sum(dtype=np.uint64)) != leaf.nbytes:
        raise ProtocolError(f"the elements of a {leaf.dtype} leaf do not add up to its {leaf.nbytes} bytes")
    items: list[Any] = []
    for length in lengths.tolist():
        items.append(bytes(leaf.data[start : start + length]))
        start += length
    if leaf.dtype == "utf8":
        try:
            return [item.decode() for item in items]
        except UnicodeDecodeError as exc:
            raise ProtocolError(f"a utf8 leaf is not UTF-8: {exc.reason}") from None
    return items


def _invalid(dtype: str, data: memoryview) -> str:
    """Return which elements are invalid for the dtype, or an empty string if all are valid.

    Invalid elements must be rejected, because different operations would give them different values.
    """
    if dtype == "bool" and len(data) and int(np.frombuffer(data, np.uint8).max()) > 1:
        return "boolean elements that are neither 0 nor 1"
    if dtype.startswith("<U") and len(data) and int(np.frombuffer(data, "<u4").max()) > sys.maxunicode:
        return "characters beyond Unicode"
    return ""


@cache
def _torch_dtypes() -> dict[str, Any]:
    """Return torch's dtypes by name. Empty without torch. Unsigned dtypes of more than 8 bits require torch 2.3."""
    try:
        import torch
    except ImportError:
        return {}
    # hetero's ``u8`` is torch's ``uint8``. The other dtypes have names of their own.
    special_names = {"bool": "bool", "c64": "complex64", "c128": "complex128", **_TORCH_ONLY}
    kinds = {"u": "uint", "i": "int", "f": "float"}
    torch_names = {name: special_names.get(name, kinds.get(name[0], "") + name[1:]) for name in _ITEM_BYTES}
    return {name: getattr(torch, attribute) for name, attribute in torch_names.items() if hasattr(torch, attribute)}


@cache
def _torch_names() -> dict[Any, str]:
    """Return the names of torch's dtypes, by dtype."""
    return {dtype: name for name, dtype in _torch_dtypes().items()}

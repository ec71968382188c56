"""Comparison of nested samples and batches, bit for bit in one process and by digest across hosts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.structure.layouts import array_strides, is_c_order, tensor_strides

__all__ = ["IMPURITY_ADVICE", "MAX_NESTING", "Difference", "Frozen", "compare", "digest", "freeze", "outline", "sketch"]

IMPURITY_ADVICE = (
    "A sample may depend on its index and on the global generators of random, NumPy and torch only. Typical causes: "
    "a generator of the data set's own (seed it in a method on_seed(self, key)), os.urandom or uuid4, the time, "
    "the order of a set, a counter or cache that changes what a sample is, threads that share a generator, a file that "
    "processes share because one opened it before it forked the others."
)
"""Advice for a batch that differs when it is computed twice."""

MAX_NESTING = 64
"""Number of levels of a nested value that are inspected."""
_LEVELS_OF_OBJECT = MAX_NESTING // 4
"""Levels that an object of unknown type counts as. So the walk ends after four such objects inside each other."""
_BLOCK = 2**16
"""Number of elements that are converted or copied at a time. A copy of a whole volume or video could exceed the host's
memory: with whole copies, describing samples of 100 MB took 3.8 GB. All hosts sum the same blocks, so they round in the
same way."""

_Part: TypeAlias = "tuple[str, str, bytes | np.ndarray[Any, Any]]"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two nested values."""

    path: str
    """Path inside the value, for example ``['image'][0]``. Empty for the value itself."""
    what: str
    """Short description of the two parts at this path."""

    def __str__(self) -> str:
        return self.within("batch")

    def within(self, name: str) -> str:
        """Return the difference with the name of the values, for example ``sample['image']: ...``."""
        return f"{name}{self.path}: {self.what}"


@dataclass(frozen=True, slots=True)
class Frozen:
    """Copy of a nested value. Later changes of the value do not change it."""

    parts: tuple[_Part, ...]
    """Parts that `_walk` yielded for the value, with copied contents."""


class _Unreadable(bytes):
    """Empty content of an object that cannot be inspected."""

    def __new__(cls, error: Exception) -> _Unreadable:
        """Make empty bytes that carry the exception that the object raised."""
        made = super().__new__(cls)
        made.error = error
        return made

    error: Exception


def freeze(value: object) -> Frozen:
    """Copy everything that `compare` compares. The memory of the value may then be reused."""
    return Frozen(tuple((path, head, _content(body)) for path, head, body in _walk(value, path="", depth=0)))


def compare(first: object, second: object) -> Difference | None:
    """Return where two nested values differ, or None if they are the same bit for bit.

    Types, dtypes, shapes, strides, the order of dictionary keys, NaN payloads and the
    sign of zero all count. The strides of copies are compared, because a loader delivers copies
    (`hetero.batches.structure.layouts`). Objects of unknown types are compared as arrays if NumPy can
    view them, else by their attributes or their ``repr``. Nested, sparse and quantized
    tensors are compared by their components. Content that cannot be inspected, such as that
    of a meta tensor, is ignored.

    Args:
        first: A value, or a frozen value.
        second: A value.
    """
    parts = first.parts if isinstance(first, Frozen) else _walk(first, path="", depth=0)
    other_parts = _walk(second, path="", depth=0)
    # strict=False is safe. The head of a container contains its length and comes before its items. Containers of
    # different lengths therefore differ before one of the walks ends.
    for (path, head, body), (_, other_head, other_body) in zip(parts, other_parts, strict=False):
        if head != other_head:
            return Difference(path, f"{head} against {other_head}")
        one, other = _content(body), _content(other_body)
        if one != other:
            dtype = None if isinstance(other_body, bytes) else other_body.dtype
            return Difference(path, f"{head}, {_describe_change(one, other, head, dtype)}")
    return None


def digest(value: object, *, skip_unreadable: bool = False) -> bytes:
    """Return a 16-byte hash of everything that `compare` compares. Only equal values have equal hashes.

    Args:
        value: The value. It is not copied as a whole.
        skip_unreadable: Whether to ignore objects that raise when they are inspected, as `compare` does.

    Raises:
        Exception: The exception that an object raised when it was inspected. A digest without the object's content
            would be equal for different values.
    """
    hasher = blake2b(digest_size=16, person=b"hetero.content")
    for _path, head, body in _walk(value, path="", depth=0):
        if isinstance(body, _Unreadable) and not skip_unreadable:
            raise body.error
        name = head.encode("utf-8", "surrogatepass")
        # Hash the lengths first. Otherwise different parts could give the same bytes.
        hasher.update(b"%d %d " % (len(name), len(body) if isinstance(body, bytes) else body.nbytes))
        hasher.update(name)
        _update(hasher, body)
    return hasher.digest()


def sketch(value: object) -> bytes:
    """Return a 16-byte hash that differs between samples, but ignores rounding.

    Structure, dtypes, shapes, str, bytes and integers of 32 bits and more count exactly. For arrays
    of floating point numbers and of smaller integers, such as pixels, only coarse statistics count.
    Their last bits depend on the CPU that computed them, because NumPy, OpenCV and torch choose code
    for the CPU. Hosts of different types must nevertheless agree that they have the same data.
    """
    hasher = blake2b(digest_size=16)
    for _path, head, body in _walk(value, path="", depth=0):
        # Only arrays that rounding can affect are replaced by coarse statistics.
        content = body if isinstance(body, bytes) or not _is_rounded(body) else _coarse(body)
        # Hash the length of the head before the head, and of the content before the content. Otherwise different parts
        # could give the same bytes.
        for part in (head.encode("utf-8", "surrogatepass"), content):
            hasher.update((len(part) if isinstance(part, bytes) else part.nbytes).to_bytes(8, "little"))
            _update(hasher, part)
    return hasher.digest()


def outline(value: Any, depth: int = 0) -> str:
    """Return types and shapes of a sample in brief, for messages. If it cannot be inspected, return only the type."""
    name = type(value).__name__
    try:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{name} {value.dtype}{_shape(value)}"
        if depth < 3 and isinstance(value, Mapping):
            parts = [f"{key!r:.30}: {outline(item, depth + 1)}" for key, item in list(value.items())[:8]]
            return f"{name} of {len(value)} {{{', '.join(parts)}}}"
        if depth < 3 and isinstance(value, list | tuple):
            return f"{name} of {len(value)} ({', '.join(outline(item, depth + 1) for item in value[:8])})"
    except Exception:  # noqa: BLE001 - nested tensors, and the user's objects
        return name
    return name


def _shape(value: Any) -> str:
    """Return a shape in brackets, with stars for jagged dimensions, because their symbols differ between tensors."""
    return f"[{', '.join(str(size) if type(size) is int else '*' for size in value.shape)}]"


def _walk(value: Any, path: str, depth: int) -> Iterator[_Part]:
    """Yield path, head (type and shape) and content of every part. If reading a part raises, its content is empty."""
    try:
        yield from _walk_inside(value, path, depth)
    except Exception as error:  # noqa: BLE001 - one of the user's objects, or a tensor without content
        yield path, f"{outline(value)} that cannot be looked at", _Unreadable(error)


def _walk_inside(value: Any, path: str, depth: int) -> Iterator[_Part]:
    """Yield the parts of a value as `_walk` does. May raise what the value's own code raises."""
    name = type(value).__name__
    if depth > MAX_NESTING:
        yield path, "nested too deep", b""
    elif isinstance(value, np.generic | np.ndarray):
        yield from _walk_array(value, path, depth)
    elif isinstance(value, str):
        yield path, name, value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | bytearray | memoryview):
        yield path, name, bytes(value)
    elif isinstance(value, float):
        # Make an array, because `sketch` ignores rounding only in arrays.
        yield path, name, np.array([value])
    elif value is None or isinstance(value, int | complex):
        yield path, name, repr(value).encode()
    elif isinstance(value, Mapping):
        yield path, f"{name} of {len(value)}", b""
        for key in value:
            yield from _walk(key, f"{path}.keys()", depth + 1)
            yield from _walk(value[key], f"{path}[{key!r:.60}]", depth + 1)
    elif isinstance(value, list | tuple):
        yield path, f"{name} of {len(value)}", b""
        for position, item in enumerate(value):
            yield from _walk(item, f"{path}[{position}]", depth + 1)
    else:
        yield from _walk_object(value, path, depth)


def _walk_array(value: Any, path: str, depth: int) -> Iterator[_Part]:
    """Yield the part of a NumPy array or scalar. If its elements are objects, also yield the parts of each object."""
    # Use numpy.ma only if it is already imported. Importing it here would take 6 MB in each endpoint.
    masked = imported("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        yield path, type(value).__name__, b""
        yield from _walk((np.asarray(value), masked.getmaskarray(value)), path, depth + 1)
        return
    array = np.asarray(value)
    head = f"{type(value).__name__} {array.dtype.str}{list(array.shape)}{_in_words(_layout(array))}"
    # Objects and texts of variable length (kind T) lie outside of the array's memory.
    if array.dtype.hasobject or array.dtype.kind == "T":
        yield path, head, b""
        yield from _walk(array.tolist(), path, depth + 1)
    else:
        yield path, head, array


def _walk_object(value: Any, path: str, depth: int) -> Iterator[_Part]:
    """Yield the parts of an object whose type is not a basic type of Python or NumPy, as `_walk` does.

    Dataclasses and objects of unknown types are walked by their attributes, with ``depth`` containers around them.
    """
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    torch = imported("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        yield from _walk_tensor(torch, value, path, depth)
    elif dataclasses.is_dataclass(kind):
        yield path, name, b""
        for field in dataclasses.fields(kind):
            yield from _walk(getattr(value, field.name, None), f"{path}.{field.name}", depth + 1)
    elif isinstance(value, set | frozenset):
        yield path, f"{name} of {len(value)}", b"".join(sorted(digest(item) for item in value))
    elif hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        # The object can be viewed as an array, for example a PIL image.
        yield path, name, b""
        yield from _walk_array(np.asarray(value), path, depth)
    elif hasattr(value, "__dict__"):
        yield path, name, b""
        # An unknown object may lead to all objects of the program. Each of them counts as several levels, so the walk
        # ends soon.
        for attribute, item in vars(value).items():
            yield from _walk(item, f"{path}.{attribute}", depth + _LEVELS_OF_OBJECT)
    else:
        # Python's default text, "<module.Kind object at 0x7f3a...>", has the object's address, which differs in each
        # process. Such an object counts by its type alone.
        text = repr(value)
        yield path, name, b"" if " at 0x" in text else text.encode("utf-8", "surrogatepass")


def _walk_tensor(torch: Any, value: Any, path: str, depth: int) -> Iterator[_Part]:
    """Yield the parts of a tensor. Nested, sparse and quantized tensors are split into their components."""
    name = f"{type(value).__name__} {value.dtype}".replace("torch.", "")
    if value.is_nested:
        parts = (value.values(), value.offsets()) if value.layout is torch.jagged else value.unbind()
        yield path, f"{name} nested of {len(parts)}", b""
    elif value.layout is not torch.strided:
        parts = _sparse_components(torch, value)
        yield path, f"{name}{_shape(value)} {value.layout}{_coalesced(torch, value)}", b""
    elif value.is_quantized:
        yield path, f"{name}{_shape(value)} {value.qscheme()}", b""
        parts = (value.int_repr(), *_quantizers(torch, value))
    else:
        parts = ()
        head = f"{name}{_shape(value)}{_in_words(tensor_strides(torch, value))}"
        yield path, head, _elements(torch, value)
    for position, part in enumerate(parts):
        yield from _walk(part, f"{path}<{position}>", depth + 1)


def _elements(torch: Any, value: Any) -> bytes | np.ndarray[Any, Any]:
    """Return the elements of a tensor as an array with the tensor's strides.

    The elements are not copied into C order. The functions that compare or hash the array read it in C order.

    If NumPy lacks the dtype, return an array of the elements' bytes in C order. If the elements cannot be read, return
    empty bytes that carry the exception.
    """
    # A meta tensor lacks elements.
    if value.is_meta:
        return b""
    try:
        readable = value.detach().cpu().resolve_conj().resolve_neg()
        return readable.numpy()  # type: ignore[no-any-return]
    except TypeError:
        # NumPy has no bfloat16.
        flat = readable.contiguous().reshape(-1)
        # An empty tensor may have any stride, which can make a view with another element size impossible.
        return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    except (RuntimeError, NotImplementedError) as error:
        # This class of tensors keeps its elements elsewhere.
        return _Unreadable(error)


def _sparse_components(torch: Any, value: Any) -> tuple[Any, ...]:
    """Return the components of a sparse tensor, because in dense form it may be larger than memory."""
    if value.layout is torch.sparse_coo:
        return value._indices(), value._values()
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return value.ccol_indices(), value.row_indices(), value.values()
    return (value.to_dense(),)


def _coalesced(torch: Any, value: Any) -> str:
    return " coalesced" if value.layout is torch.sparse_coo and value.is_coalesced() else ""


def _quantizers(torch: Any, value: Any) -> tuple[Any, ...]:
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return value.q_scale(), value.q_zero_point()
    return value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis()


def _layout(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return the strides that a copy of the array has, or an empty tuple for C order.

    Dimensions with one element, whose strides NumPy ignores, have a stride of 0.
    """
    strides = array_strides(array)
    # `array_strides` returns no strides for C order.
    if not strides:
        return ()
    # It may return strides only because those of dimensions with one element differ from C order. The elements are then
    # in C order too. So check the order again without these dimensions.
    longer_dims = [(size, stride) for size, stride in zip(array.shape, strides, strict=True) if size != 1]
    if is_c_order([size for size, _ in longer_dims], [stride for _, stride in longer_dims]):
        return ()
    return tuple(stride if size != 1 else 0 for size, stride in zip(array.shape, strides, strict=True))


def _in_words(strides: tuple[int, ...]) -> str:
    """Return strides as a text for a part's head. Empty for C order, to keep the digests of most batches."""
    return f" strides {list(strides)}" if strides else ""


def _content(body: bytes | np.ndarray[Any, Any]) -> bytes:
    return body if isinstance(body, bytes) else body.tobytes()


def _blocks(array: np.ndarray[Any, Any], begin: int, end: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield elements in C order, up to `_BLOCK` at a time. The next block may reuse the memory of the last one."""
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        yield from (flat[start : min(start + _BLOCK, end)] for start in range(begin, end, _BLOCK))
        return
    # Other arrays are copied block by block in C order.
    flags: Any = ["external_loop", "buffered", "ranged"]
    access: Any = ["readonly", "contig"]
    elements: Any = np.nditer([array], flags, [access], order="C", buffersize=_BLOCK)
    elements.iterrange = begin, end
    yield from elements


def _update(hasher: blake2b, body: Any) -> None:
    """Hash bytes, or the elements of an array in C order."""
    if isinstance(body, bytes):
        hasher.update(body)
    elif body.nbytes:
        # Hash a contiguous array in one call, because each call may wait for the interpreter's lock. The view as uint8
        # is needed because NumPy gives no buffer of an array of dates.
        blocks: Iterable[Any] = (body.reshape(-1),) if body.flags.c_contiguous else _blocks(body, 0, body.size)
        for block in blocks:
            hasher.update(block.view(np.uint8))


def _describe_change(first: bytes, second: bytes, head: str, dtype: np.dtype[Any] | None) -> str:
    """Return a description of how two parts of one type differ.

    Args:
        first: The content of one part.
        second: The content of the other, not equal to ``first``.
        head: Type of both parts.
        dtype: Element type of both parts. None if they are not arrays.
    """
    is_numeric = dtype is not None and dtype.kind in "biufc"
    # Show both contents if they differ in length, or if they are short and not numbers.
    if len(first) != len(second) or (len(first) <= 16 and not is_numeric):
        return " against ".join(_shown(part[:40], head) for part in (first, second))
    if dtype is None or not is_numeric:
        dtype = np.dtype(np.uint8)
    # Bytes are compared, because NaN is not equal to itself, and 0.0 is equal to -0.0.
    is_other_byte = np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8)
    is_other_element = is_other_byte.reshape(-1, dtype.itemsize).any(axis=1)
    position = int(is_other_element.argmax())
    one, other = (np.frombuffer(part, dtype)[position].item() for part in (first, second))
    if is_other_element.size == 1:
        return f"{one!r} against {other!r}"
    unit = "bytes" if dtype.itemsize == 1 else "elements"
    where = f"the first at {position}: {one!r} against {other!r}"
    return f"{np.count_nonzero(is_other_element)} of {is_other_element.size} {unit} differ, {where}"


def _shown(content: bytes, head: str) -> str:
    """Return the content of a short part as Python shows it."""
    if head in ("int", "bool", "complex"):
        return content.decode(errors="replace")
    return repr(content.decode(errors="replace") if head == "str" else content)


def _is_rounded(array: np.ndarray[Any, Any]) -> bool:
    """Return whether rounding can affect an array: floating point and complex numbers, and integers below 32 bits."""
    return bool(array.size) and (array.dtype.kind in "fc" or (array.dtype.kind in "iu" and array.dtype.itemsize < 4))


def _coarse(array: np.ndarray[Any, Any]) -> bytes:
    """Return an array's magnitude and the means of its quarters. Integers are summed without rounding.

    The array has at least one element, because `_is_rounded` is false for an empty array.
    """
    # The quarters differ by one element at most.
    num_parts = min(4, array.size)
    quotient, remainder = divmod(array.size, num_parts)
    sizes = [quotient + (part < remainder) for part in range(num_parts)]
    absolute_sum: float = 0
    sums: list[float] = [0] * num_parts
    with np.errstate(all="ignore"):
        for part, size in enumerate(sizes):
            begin = sum(sizes[:part])
            for block in map(_summable, _blocks(array, begin, begin + size)):
                absolute_sum += np.abs(block).sum().item()
                sums[part] += block.sum().item()
    magnitude = absolute_sum / array.size
    # All elements are 0, or the sum has overflowed.
    if not 0 < magnitude < math.inf:
        return str(magnitude).encode()
    # Round the magnitude to eighths of a power of two, and the means to sixteenths of the magnitude. These steps are
    # much larger than the differences between CPUs.
    means = [round(part_sum / size / magnitude * 16) for part_sum, size in zip(sums, sizes, strict=True)]
    return repr((round(math.log2(magnitude) * 8), means)).encode()


def _summable(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a block of an array for the sums of `_coarse`: integers as 64-bit integers, other numbers as doubles.

    A complex number becomes its magnitude, because `_coarse` can round only real sums. Numbers that are not finite
    become 0, because a single NaN would make the sums NaN and hide all other elements.
    """
    if block.dtype.kind in "iu":
        return block.astype(np.int64)
    doubles = (np.abs(block) if block.dtype.kind == "c" else block).astype(np.float64)
    return doubles if np.isfinite(doubles).all() else np.where(np.isfinite(doubles), doubles, 0.0)

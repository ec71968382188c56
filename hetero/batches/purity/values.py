"""Digests of values that functions, globals and data sets hold. Equal values have equal digests in every process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import re
import uuid
from collections import deque
from collections.abc import Collection, Mapping
from hashlib import blake2b
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.purity.comparison import MAX_NESTING, digest
from hetero.batches.purity.reach import SCRIPT_NAMES, is_user_class
from hetero.batches.structure.conversion import module_name

__all__ = ["code_digest", "plain_digest", "value_digest"]

_MAX_PLAIN_BYTES = 2**22
"""Largest size of plain data that is hashed, because each pass hashes it anew. At this size an array takes 10 ms, and a
text 90 ms."""
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_BY_TEXT = (
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    PurePath,
    range,
    slice,
    type(...),
    decimal.Decimal,
    fractions.Fraction,
    dt.date,
    dt.time,
    dt.timedelta,
    uuid.UUID,
    re.Pattern,
    np.dtype,
)


class _TooLargeError(Exception):
    """A value is too large to be hashed before every pass."""


def value_digest(value: Any) -> bytes:
    """Return a digest of a value and of everything that it holds, 16 bytes.

    Functions count by their code, and objects by their type and attributes. Objects without attributes, such as locks
    and open files, count by their type alone.
    """
    return _Digest(is_plain=False).of(value)


def plain_digest(value: Any) -> str | None:
    """Return a hexadecimal digest of plain data.

    These values are plain: None, numbers, str, bytes, paths, enums, dates, tuples, lists, dictionaries and sets of
    them, NumPy arrays, tensors in ordinary memory, dataclasses, ``argparse.Namespace``, and instances of the user's
    classes with plain attributes.

    Returns:
        The digest. Empty if the value is too large to be hashed before every pass. None if it is not plain.
    """
    try:
        return _Digest(is_plain=True).of(value).hex()
    except _TooLargeError:
        return ""
    except Exception:  # noqa: BLE001 - also the user's objects, which may raise when they are inspected
        return None


def code_digest(code: CodeType) -> bytes:
    """Return a digest of compiled code, 16 bytes.

    The file and the first line are left out, because the same script may lie elsewhere on another host.
    """
    constants = [code_digest(each).hex() if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    text = repr((code.co_name, code.co_code, code.co_names, code.co_varnames, constants))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _constant(constant: Any) -> str:
    """Return a constant of compiled code as text. The order of a frozenset differs between processes."""
    return f"frozenset({sorted(map(repr, constant))})" if isinstance(constant, frozenset) else repr(constant)


class _Digest:
    """One walk over a value.

    Args:
        is_plain: Whether to raise an error for a value that is not plain, or too large.
    """

    def __init__(self, *, is_plain: bool) -> None:
        self._must_be_plain = is_plain
        self._num_bytes = 0
        """Bytes that were hashed so far."""
        self._depth = 0
        """Number of objects around the present one."""
        self._known: dict[int, tuple[bytes, Any]] = {}
        """For each visited object, by its id: its digest and itself. A new object could get the id of a freed one."""

    def of(self, value: Any) -> bytes:
        """Return the digest of a value inside the walk."""
        kind = type(value)
        if kind in _SCALARS:
            self._count(len(value) if kind in (str, bytes) else 1)
            return self._hash(kind.__name__, _encoded(repr(value)))
        known = self._known.get(id(value))
        if known is not None:
            return known[0]
        # Set a placeholder, because the value may hold itself. The placeholder is the number of visited objects, which
        # is the same in every process. Keep the value too, because a new object could get the id of a freed one.
        self._known[id(value)] = b"%d" % len(self._known), value
        self._depth += 1
        try:
            found = self._of_object(value, kind) if self._depth <= MAX_NESTING else self._hash(kind.__qualname__, b"")
        except Exception:
            # The user's objects may raise when they are inspected.
            if self._must_be_plain:
                raise
            found = self._hash(kind.__qualname__, b"")
        self._depth -= 1
        self._known[id(value)] = found, value
        return found

    def _of_object(self, value: Any, kind: type) -> bytes:
        """Return the digest of a value that is not a plain scalar, by its type."""
        # Use a type name without the script's module, because this module has another name on data hosts. With the
        # module's name, data hosts did not use a cache folder that `python train.py` had filled.
        name = _type_name(kind)
        torch = imported("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            if self._must_be_plain and not (value.is_cpu and value.layout is torch.strided):
                raise TypeError("not plain")
            return self._of_array(name, value)
        if isinstance(value, np.ndarray | np.generic):
            has_objects = value.dtype.hasobject
            return self._of_items(name, value.ravel().tolist()) if has_objects else self._of_array(name, value)
        if isinstance(value, _BY_TEXT):
            return self._hash(name, _encoded(repr(value)))
        if isinstance(value, enum.Enum):
            return self._hash(name, self.of(value.value))
        if isinstance(value, list | tuple | deque):
            return self._of_items(name, value)
        if isinstance(value, set | frozenset):
            # Sort the digests, because the order of a set of text differs between processes.
            return self._hash(name, b"".join(sorted(map(self.of, value))))
        if isinstance(value, Mapping):
            # The order counts, because a data set may number its classes in the order of a dictionary.
            parts = self._of_items("keys", list(value)), self._of_items("values", list(value.values()))
            return self._hash(name, b"".join(parts))
        return self._of_items(name, _plain_parts(value) if self._must_be_plain else _parts(value))

    def _of_array(self, name: str, value: Any) -> bytes:
        # Count bytes only for plain data, because a sparse tensor, which is not plain, has no number of bytes.
        if self._must_be_plain:
            self._count(value.nbytes)
        return self._hash(name, digest(value))

    def _of_items(self, name: str, items: Collection[Any]) -> bytes:
        """Return the digest of a container of this type name with these items, in order."""
        # Each item takes at least one byte, so reject too many items before they are encoded.
        self._count(len(items))
        # Hash scalars all at once, because a list of files may have millions of items.
        if _SCALARS.issuperset(map(type, items)):
            return self._hash(f"{name} of scalars", _encoded(repr(list(items))))
        return self._hash(name, b"".join(map(self.of, items)))

    def _hash(self, name: str, data: bytes) -> bytes:
        self._count(len(data))
        # The length comes first. Otherwise ("ab", b"c") and ("a", b"bc") would be equal.
        return blake2b(b"%d %s" % (len(name), _encoded(name)) + data, digest_size=16).digest()

    def _count(self, num_bytes: int) -> None:
        """Count bytes that are hashed. Raise `_TooLargeError` if a plain value has too many."""
        self._num_bytes += num_bytes
        if self._must_be_plain and self._num_bytes > _MAX_PLAIN_BYTES:
            raise _TooLargeError


def _type_name(kind: type) -> str:
    module = "" if kind.__module__ in SCRIPT_NAMES else module_name(kind)
    return f"{module}.{kind.__qualname__}"


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _parts(value: Any) -> list[Any]:
    """Return the code and values of a function, the name of a class or module, or the attributes of an object."""
    if isinstance(value, FunctionType):
        cells = []
        for cell in value.__closure__ or ():
            # A cell may still be empty.
            with contextlib.suppress(ValueError):
                cells.append(cell.cell_contents)
        return [code_digest(value.__code__), value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, type):
        return [_type_name(value)]
    if isinstance(value, ModuleType | BuiltinFunctionType):
        return [value.__name__]
    slots: list[str] = []
    for kind in type(value).__mro__:
        # A class may state its only slot as a text.
        own = vars(kind).get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    # Attributes in slots are not in ``__dict__``, so read them by name.
    held = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
    return sorted({**held, **getattr(value, "__dict__", {})}.items())


def _plain_parts(value: Any) -> list[Any]:
    """Return the attributes of an object that is plain if all its attributes are plain.

    Raises:
        TypeError: If the object has another type. Such an object is never plain.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    # A module of torch is not plain, because training changes its parameters in the rank alone.
    torch = imported("torch")
    is_module = torch is not None and isinstance(value, torch.nn.Module)
    if isinstance(value, argparse.Namespace | SimpleNamespace) or (is_user_class(type(value)) and not is_module):
        return sorted(vars(value).items())
    raise TypeError("not plain")

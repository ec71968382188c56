"""Comparison between processes of the globals that a data set's code reads.

A data host imports the script and does not run ``main()``. If ``main()`` changes a global, the data host does not have
the new value, and the data set would silently make other samples. Every process therefore computes digests of the
globals that the data set's code reads and that hold plain values. The rank compares the digests with its own.

A difference is an error if the source shows which code changes the global after the import. Other differences are
logged, because they may be right: ``ROOT = os.environ["SM_CHANNEL_TRAINING"]`` may differ between hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import logging
import math
import os
import re
import struct
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.purity.reach import SCRIPT_NAMES, Key, Place, Reach, is_user_class, reach, user_modules
from hetero.batches.purity.writes import Write, changed_objects, writes_in
from hetero.errors import DatasetMismatchError

__all__ = ["GlobalValue", "GlobalsReader", "check_globals", "digest_of"]

MAX_GLOBALS = 256
"""Limit on the number of globals of one data set that are compared."""

_MAX_BYTES = 2**20  # in a str, bytes or array. Only parts of a longer one are hashed.
_MAX_ITEMS = 50_000  # in a container. Only some items of a longer list are hashed.
_MAX_PARTS = 200_000
_MAX_DEPTH = 20
_NUM_SAMPLES = 1_000
_MAX_NAMED = 5
_MAX_SHOWN_CHARS = 60
_SECRET = re.compile(r"key|token|secret|passw|pwd|credential|auth", re.IGNORECASE)
_BY_TEXT = (
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
_IMMUTABLE = (bool, bytes, complex, enum.Enum, float, int, str, PurePath, tuple, type(None), *_BY_TEXT)

logger = logging.getLogger(__name__)


class _NotPlainError(Exception):
    """A value is not plain data."""


@dataclass(frozen=True, slots=True)
class GlobalValue:
    """Value of one global in this process."""

    digest: str
    """Hexadecimal digest. Empty for a callable: two callables count as equal, a callable and None as different."""
    shown: str
    """Text for messages: the value, or its type if the value is long or looks like a secret."""
    is_mutable: bool
    """Whether code that does not name the global can change it, for example a function that gets it as an argument."""


class GlobalsReader:
    """Finds and reads the globals that the code of one data set reads. The code is searched only once.

    Args:
        roots: The registered factory, or the user's data set object and functions.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._found: Reach | None = None
        self._own: set[Key] | None = None
        self.warned: set[str] = set()
        """Names of the globals whose difference was logged."""
        self._first: dict[str, str] = {}
        """Digests of the first reading, by name."""
        self._seen_own: set[str] = set()
        """Names of what the data set's code has changed when it ran here."""

    def read(self) -> dict[str, GlobalValue]:
        """Return plain values and callables in globals, by name. Skip globals that the data set's code changes."""
        try:
            found = self._read()
            self._first = self._first or {name: value.digest for name, value in found.items()}
            return found
        except Exception as error:  # noqa: BLE001 - the user's objects may raise when they are inspected
            logger.info("globals that data sets read are not compared: %s: %s", type(error).__name__, error)
            return {}

    def _read(self) -> dict[str, GlobalValue]:
        found: dict[str, GlobalValue] = {}
        for place, value in self._places():
            digest = None if place.label in self._seen_own else digest_of(value)
            if digest is not None or (callable(value) and place.label not in self._seen_own):
                found[place.label] = GlobalValue(digest or "", _show(place.label, value), not _is_immutable(value))
        return found

    def digests(self) -> dict[str, str]:
        """Return the digests of plain values by name, for the first `MAX_GLOBALS` names in sorted order."""
        found = {name: value.digest for name, value in self.read().items() if value.digest}
        return dict(sorted(found.items())[:MAX_GLOBALS])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context for the data set's code. Leave out what it changes from now on, as a cache or counter."""
        before = self.digests()
        try:
            yield
        finally:
            after = self.digests()
            self._seen_own.update(name for name in before if before[name] != after.get(name))

    def changes(self, names: Iterable[str]) -> dict[str, str]:
        """Return the code that changes each global after the import, for example ``main() in train.py:31``.

        The result lacks a global if the source shows no such code.
        """
        wanted = set(names)
        places = [(place, value) for place, value in self._places() if place.label in wanted]
        found: dict[str, str] = {}
        for module in user_modules():
            file = getattr(module, "__file__", None)
            for write in writes_in(file) if isinstance(file, str) else ():
                if write.is_store and len(write.path) > 1 and write.path[-1] not in self._reach.attributes:
                    continue  # the data set does not read it: for example args.rank, if it reads only args.root
                keys = set(changed_objects(write, vars(module)))
                for place, value in places:
                    by_name = place.key in keys or (place.key[0], "*") in keys
                    if by_name or (not _is_immutable(value) and (id(value), "") in keys):
                        found.setdefault(place.label, _describe(write, str(file)))
        return found

    def is_of_function(self, name: str) -> bool:
        """Return whether this is a value in a registered function, and not a global or an attribute of a class."""
        return any(place.label == name and place.codes is not None for place in self._reach.places.values())

    def has_changed(self, name: str, value: GlobalValue) -> bool:
        """Return whether a value in a registered function has changed since the first reading, in this process."""
        return self.is_of_function(name) and self._first.get(name) != value.digest

    @property
    def _reach(self) -> Reach:
        if self._found is None:
            self._found = reach(self._roots)
        return self._found

    def _places(self) -> list[tuple[Place, Any]]:
        """Return the existing globals that the data set's own code does not change, with their values."""
        own = self._own_changes()
        found = []
        for place in list(self._reach.places.values()):
            if place.key not in own:
                with contextlib.suppress(KeyError):
                    found.append((place, place.value()))
        return found

    def _own_changes(self) -> set[Key]:
        """Return the globals that the data set's own code changes. These are caches and counters, which may differ."""
        if self._own is None:
            changed: set[Key] = set(self._reach.stored)
            attributes: dict[tuple[str, int], set[str]] = {}
            for namespace in self._reach.namespaces.values():
                file = os.path.realpath(namespace.get("__file__") or "")
                for write in writes_in(file):
                    if (file, write.first_line) in self._reach.codes:
                        changed.update(changed_objects(write, namespace))
                        attributes.setdefault((file, write.first_line), set()).update(write.path[1:])
            for file, first_line in set().union(*(place.codes or () for place in self._reach.places.values())):
                names = (name for write in writes_in(file) if write.first_line == first_line for name in write.path[1:])
                attributes.setdefault((file, first_line), set()).update(names)
            self._own = {place.key for place in self._reach.places.values() if _is_own(place, changed, attributes)}
        return self._own


def _is_own(place: Place, changed: set[Key], attributes: Mapping[tuple[str, int], set[str]]) -> bool:
    """Return whether the data set's own code changes a global, an attribute, or a value in a function."""
    if not isinstance(place.owner, dict):
        # self._cache[index] = ... may change this attribute, because the class of self is not known
        codes = attributes if place.codes is None else place.codes
        if any(place.name in attributes.get(code, ()) for code in codes):
            return True
    with contextlib.suppress(KeyError):
        value = place.value()
        return place.key in changed or (not _is_immutable(value) and (id(value), "") in changed)
    return False


def check_globals(
    reader: GlobalsReader,
    own: Mapping[str, GlobalValue],
    others: Mapping[str, str],
    *,
    dataset: str,
    there: str,
) -> None:
    """Compare the globals of the rank with those of another process.

    A difference that the source does not explain is logged once. The log level is warning if the value is mutable,
    because code that does not name the global may then have changed the value. Otherwise it is info.

    Args:
        reader: Reader for the same data set, in this process.
        own: Globals of the rank.
        others: Digests from the other process.
        dataset: Name of the data set.
        there: Name of the other process in messages, for example ``algo-2/0``.

    Raises:
        DatasetMismatchError: If code that is not part of the data set changes a global that differs.
    """
    nothing = digest_of(None)
    differing = [
        name
        for name, value in own.items()
        if name in others
        and others[name] != value.digest
        and (value.digest or others[name] == nothing)
        and name not in reader.warned
    ]
    if not differing:
        return
    changes = reader.changes(differing)
    for name in differing:
        if name not in changes and reader.has_changed(name, own[name]):
            changes[name] = "the script, after its first batches"
    changed = [name for name in differing if name in changes]
    if changed:
        raise DatasetMismatchError(_complaint(reader, changed, changes, own, dataset=dataset, there=there))
    for name in differing:
        reader.warned.add(name)
        logger.log(
            logging.WARNING if own[name].is_mutable else logging.INFO,
            "%s%s has another value on %s than in the rank (%s), and data set %r reads it. The source does not "
            "say what changes it after the import, so it may depend on the host. If samples depend on it, make it an "
            "argument of the factory.",
            "" if reader.is_of_function(name) else "global ",
            name,
            there,
            own[name].shown,
            dataset,
        )


def _complaint(
    reader: GlobalsReader,
    names: Sequence[str],
    changes: Mapping[str, str],
    own: Mapping[str, GlobalValue],
    *,
    dataset: str,
    there: str,
) -> str:
    first = names[0]
    kind = "" if reader.is_of_function(first) else "global "
    lines = [f"{kind}{first:.60} has another value on {there} than in the rank, and data set {dataset!r:.40} reads it"]
    lines += [f"{name}: {own[name].shown} in the rank; changed by {changes[name]}" for name in names[:_MAX_NAMED]]
    if len(names) > _MAX_NAMED:
        lines.append(f"and {len(names) - _MAX_NAMED} more")
    lines.append(
        "Data hosts and loader processes only import the script. They do not run main(), so they keep the value of the "
        "import, and samples would differ."
    )
    argument = first.rpartition(".")[2].lower()
    if not kind:
        lines.append(
            "The data set that a factory returns may have the collate_fn as an attribute or method, and its options."
        )
    lines.append(
        f"Make it an argument of the factory, {dataset:.40}(..., {argument}=...), or set it where the script is "
        "imported: at the top level, from an environment variable or the command line. --purity-checks 0 switches this "
        "comparison off."
    )
    return "\n  ".join(lines)


def _describe(write: Write, file: str) -> str:
    who = f"{write.function}() in " if write.function else ""
    return f"{who}{Path(file).name}:{write.line}"


def _show(name: str, value: Any) -> str:
    """Return a short plain value as text. For others return the type, because a log should not show their content."""
    kind = type(value).__name__
    if _SECRET.search(name):
        return f"a {kind} (not shown)"
    if isinstance(value, enum.Enum | PurePath):
        text = str(value)
    elif isinstance(value, str) and ("://" in value or _SECRET.search(value)):
        text = ""
    elif value is None or type(value) in (bool, int, float, complex, str):
        text = ascii(value) if not isinstance(value, int) or abs(value) < 10**_MAX_SHOWN_CHARS else ""
    elif isinstance(value, tuple) and all(type(item) in (bool, int, float) for item in value):
        text = repr(value)
    else:
        text = ""
    if text and len(text) <= _MAX_SHOWN_CHARS:
        return text
    return f"a {kind}" + (f" of {len(value)}" if hasattr(type(value), "__len__") and not callable(value) else "")


def _is_immutable(value: Any) -> bool:
    return isinstance(value, _IMMUTABLE)


# Digests of plain values


def digest_of(value: Any) -> str | None:
    """Return a hexadecimal digest of plain data, or None for other values. It is the same in every process.

    Plain data are None, numbers, str, bytes, paths, enums, dates, tuples, lists, dictionaries and sets of them, NumPy
    arrays, tensors in ordinary memory, dataclasses, ``argparse.Namespace``, and instances of the user's classes whose
    attributes are plain. For large values the digest covers the size and only samples of the content. For large sets
    and dictionaries it covers only the size.
    """
    try:
        return blake2b(_Encoder().encode(value, 0), digest_size=16).hexdigest()
    except Exception:  # noqa: BLE001 - the user's objects may raise when they are inspected
        return None


class _Encoder:
    def __init__(self) -> None:
        self._num_parts = 0

    def encode(self, value: Any, depth: int) -> bytes:
        """Return bytes that differ if values differ. Their length is fixed except for scalars."""
        self._num_parts += 1
        if depth > _MAX_DEPTH or self._num_parts > _MAX_PARTS:
            raise _NotPlainError
        if isinstance(value, enum.Enum):
            return self._join(b"enum", [_type_name(type(value)), self.encode(value.value, depth + 1)])
        if value is None or isinstance(value, bool):
            return repr(value).encode()
        if isinstance(value, int):
            return b"int " + hex(value).encode()
        if isinstance(value, float) and not isinstance(value, np.generic):
            return b"float nan" if math.isnan(value) else b"float " + struct.pack("<d", value)
        if isinstance(value, complex) and not isinstance(value, np.generic):
            return b"complex " + struct.pack("<dd", value.real, value.imag)
        if isinstance(value, str):
            return self._join(b"str", _part_of(value))
        if isinstance(value, bytes | bytearray):
            return self._join(type(value).__name__.encode(), _part_of(bytes(value)))
        if isinstance(value, PurePath):
            return self._join(b"path", [str(value).encode("utf-8", "surrogatepass")])
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value))
        if isinstance(value, _BY_TEXT):
            return self._join(type(value).__name__.encode(), [repr(value).encode("utf-8", "surrogatepass")])
        return self._container(value, depth + 1)

    def _container(self, value: Any, depth: int) -> bytes:
        kind = type(value)
        if isinstance(value, list | tuple | deque):
            size = len(value)
            step = 1 if size <= _MAX_ITEMS else size // _NUM_SAMPLES
            items = [self.encode(value[position], depth) for position in range(0, size, step)]
            name = b"tuple" if isinstance(value, tuple) else b"list"
            return self._join(name, [str(size).encode(), *items])
        if isinstance(value, set | frozenset):
            items = [] if len(value) > _MAX_ITEMS else [_hash(self.encode(item, depth)) for item in value]
            return self._join(b"set", [str(len(value)).encode(), *sorted(items)])
        if isinstance(value, Mapping):
            return self._mapping(b"dict", value, depth)
        torch = imported("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(torch, value)
        if dataclasses.is_dataclass(value):
            values = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return self._mapping(_type_name(kind), values, depth)
        is_module = torch is not None and isinstance(value, torch.nn.Module)
        if isinstance(value, argparse.Namespace | SimpleNamespace) or (is_user_class(kind) and not is_module):
            return self._mapping(_type_name(kind), vars(value), depth)
        raise _NotPlainError

    def _mapping(self, name: bytes, value: Mapping[Any, Any], depth: int) -> bytes:
        pairs = []
        if len(value) <= _MAX_ITEMS:
            pairs = [_hash(self.encode(key, depth)) + _hash(self.encode(item, depth)) for key, item in value.items()]
        return self._join(name, [str(len(value)).encode(), *sorted(pairs)])

    def _array(self, array: np.ndarray[Any, Any]) -> bytes:
        if array.dtype.hasobject:
            raise _NotPlainError
        parts = [array.dtype.str.encode(), repr(array.shape).encode()]
        if array.nbytes > _MAX_BYTES:
            array = array.flat[np.linspace(0, array.size - 1, _NUM_SAMPLES).astype(np.int64)]
        return self._join(b"array", [*parts, array.tobytes()])

    def _tensor(self, torch: Any, tensor: Any) -> bytes:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise _NotPlainError
        flat = tensor.detach().resolve_conj().resolve_neg()
        if flat.numel() * flat.element_size() > _MAX_BYTES:
            last = flat.numel() - 1
            flat = flat[
                torch.unravel_index(torch.linspace(0, last, _NUM_SAMPLES, dtype=torch.float64).long(), flat.shape)
            ]
        content = flat.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return self._join(b"tensor", [str(tensor.dtype).encode(), repr(tuple(tensor.shape)).encode(), content])

    @staticmethod
    def _join(name: bytes, parts: Iterable[bytes]) -> bytes:
        hasher = blake2b(name, digest_size=16)
        for part in parts:
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        return hasher.digest()


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _part_of(value: str | bytes) -> list[bytes]:
    """Return the length and the content of a value, or the beginning, middle and end of a long one."""
    size, third = len(value), _MAX_BYTES // 3
    parts = [value]
    if size > _MAX_BYTES:
        parts = [value[:third], value[size // 2 : size // 2 + third], value[-third:]]
    encoded = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts]
    return [str(size).encode(), *encoded]


def _type_name(kind: type) -> bytes:
    module = "" if kind.__module__ in SCRIPT_NAMES else kind.__module__
    return f"{module}.{kind.__qualname__}".encode()

"""A digest of everything that the result of a data set's ``load`` depends on.

It covers the registered name and its arguments, the code that ``load`` uses, the globals that this code reads, the
attributes of the data set, the versions of all installed packages, the kind of CPU, and a few loaded samples. A file
that changes under the same path is not seen, unless it is one of these samples. `DatasetFactory.fingerprint` then has
to change, which is part of the digest too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
import struct
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from hetero.batches.build import BuiltDataset
from hetero.batches.imported import imported
from hetero.batches.purity.reach import Reach, reach
from hetero.batches.seeds import seed_generators
from hetero.batches.split import SplitDataset
from hetero.batches.structure.conversion import module_name
from hetero.cache.entries import EncodedSample
from hetero.spec import DatasetFactory, DatasetSpec

__all__ = ["Fingerprint", "value_digest"]

_FORMAT = 3
"""Changes whenever what the digest covers changes."""
_NUM_PROBES = 4
_MAX_DEPTH = 24


class Fingerprint:
    """The digest of one data set. What needs no sample is computed at once, before a process forks endpoints.

    Args:
        built: The built data set, with a `SplitDataset`.
        factory: Its factory.
        spec: Its spec.
    """

    def __init__(self, built: BuiltDataset, factory: DatasetFactory, spec: DatasetSpec) -> None:
        assert built.split is not None
        self._built = built
        self._split = built.split
        self._stated = factory.fingerprint
        inner = built.split.inner
        kind = type(inner)
        # `augment` runs after a kept sample is read, so its code may change.
        found = reach((factory.function, kind), without=[vars(each).get("augment") for each in kind.__mro__])
        facts = {
            "format": _FORMAT,
            "name": spec.name,
            "arguments": spec.arguments_json,
            "code": _code_digest(found),
            "globals": _globals_digest(found),
            "attributes": value_digest(inner).hex(),
            "packages": _packages(),
            "machine": [platform.python_version(), platform.machine(), _cpu()],
        }
        self._facts = json.dumps(facts, sort_keys=True).encode()

    def key(self) -> bytes:
        """Return the digest, 20 bytes. Loads a few samples, and seeds the global generators."""
        hasher = blake2b(self._facts, digest_size=20, person=b"hetero.loads")
        stated = self._stated
        if callable(stated):
            # The function may draw samples, and must draw the same ones in all processes.
            seed_generators(0)
            stated = stated(self._split.dataset)
        hasher.update(json.dumps(None if stated is None else str(stated)).encode())
        num_samples = len(self._split.inner)
        hasher.update(str(num_samples).encode())
        with self._built.worker_info():
            for probe in _probes(num_samples):
                hasher.update(_probe(self._split, probe))
        return hasher.digest()


def value_digest(value: Any) -> bytes:
    """Return a digest of a value and of everything that it holds, 16 bytes.

    Functions count by their code, and objects by their type and attributes. Objects without attributes, such as locks
    and open files, count by their type alone.
    """
    return _Digest().of(value)


class _Digest:
    """One walk over a value. An object that was met before counts by the order of its first meeting."""

    def __init__(self) -> None:
        # It keeps the objects alive, because a new one could get the id of one that was freed.
        self._met: dict[int, tuple[int, Any]] = {}
        self._depth = 0

    def of(self, value: Any) -> bytes:
        hasher = blake2b(digest_size=16)
        self._add(hasher, value)
        return hasher.digest()

    def _add(self, hasher: Any, value: Any) -> None:
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            _add_part(hasher, kind.__name__, value if kind is bytes else repr(value).encode("utf-8", "surrogatepass"))
            return
        if id(value) in self._met:
            _add_part(hasher, "met", str(self._met[id(value)][0]).encode())
            return
        self._met[id(value)] = len(self._met), value
        self._depth += 1
        if self._depth <= _MAX_DEPTH:
            with contextlib.suppress(Exception):  # the user's objects may raise when they are inspected
                self._add_object(hasher, value, kind)
        self._depth -= 1

    def _add_object(self, hasher: Any, value: Any, kind: type) -> None:
        # The script's module has another name on data hosts. A folder that `python train.py` had filled was not used
        # there.
        name = f"{module_name(kind)}.{kind.__qualname__}"
        torch = imported("torch")
        if isinstance(value, np.ndarray) and value.dtype != object:
            _add_part(hasher, f"{name} {value.dtype.str} {value.shape}", np.ascontiguousarray(value).tobytes())
        elif isinstance(value, np.ndarray):
            self._add_items(hasher, name, value.ravel().tolist())
        elif torch is not None and isinstance(value, torch.Tensor):
            dense = value.detach().cpu().contiguous()
            _add_part(hasher, f"{name} {value.dtype} {tuple(value.shape)}", dense.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, list | tuple):
            self._add_items(hasher, name, value)
        elif isinstance(value, set | frozenset):
            # The order of a set of text differs between processes. A digest of its own for each item does not depend on
            # it.
            _add_part(hasher, name, b"".join(sorted(_Digest().of(item) for item in value)))
        elif isinstance(value, dict):
            self._add_items(hasher, name, list(value))
            self._add_items(hasher, "values", list(value.values()))
        elif isinstance(value, FunctionType):
            self._add_items(hasher, "function", [_digest_of(value.__code__), *_held_by(value)])
        elif isinstance(value, MethodType):
            self._add_items(hasher, "method", [value.__func__, value.__self__])
        elif isinstance(value, functools.partial):
            self._add_items(hasher, "partial", [value.func, value.args, value.keywords])
        elif isinstance(value, type):
            _add_part(hasher, "type", f"{module_name(value)}.{value.__qualname__}".encode())
        elif isinstance(value, ModuleType):
            _add_part(hasher, "module", value.__name__.encode())
        else:
            _add_part(hasher, "object", name.encode())
            slots = [slot for each in kind.__mro__ for slot in getattr(each, "__slots__", ())]
            # An object with slots has no __dict__ for them.
            held = {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}
            self._add_items(hasher, "attributes", sorted({**held, **getattr(value, "__dict__", {})}.items()))

    def _add_items(self, hasher: Any, name: str, items: Any) -> None:
        """Add items in order. Long lists of one plain type are added at once."""
        kinds = set(map(type, items))
        if kinds <= {str}:
            lengths = ",".join([str(len(item)) for item in items])
            _add_part(hasher, f"{name} str", f"{lengths};{''.join(items)}".encode("utf-8", "surrogatepass"))
        elif kinds <= {int, float, bool}:
            _add_part(hasher, f"{name} numbers", repr(list(items)).encode())
        else:
            _add_part(hasher, f"{name} {len(items)}", b"")
            for item in items:
                self._add(hasher, item)


def _add_part(hasher: Any, name: str, data: bytes) -> None:
    # The lengths come first, so that ("ab", "c") and ("a", "bc") differ.
    hasher.update(struct.pack("<qq", len(name), len(data)))
    hasher.update(name.encode())
    hasher.update(data)


def _held_by(function: FunctionType) -> list[Any]:
    """Return the values that a function holds besides its code: defaults and variables of enclosing functions."""
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is still empty
            cells.append(cell.cell_contents)
    return [function.__defaults__, function.__kwdefaults__, cells]


def _probes(num_samples: int) -> list[int]:
    if not num_samples:
        return []
    return sorted({step * (num_samples - 1) // (_NUM_PROBES - 1) for step in range(_NUM_PROBES)})


def _probe(split: SplitDataset, index: int) -> bytes:
    """Return a digest of one loaded sample."""
    hasher = blake2b(str(index).encode(), digest_size=16)
    with contextlib.suppress(Exception):  # the batch that has this sample reports the error
        for piece in EncodedSample(split.load_anew(index), index, b"").pieces:
            hasher.update(piece)
    return hasher.digest()


def _code_digest(found: Reach) -> str:
    """Return a digest of code. The file and the line where the code is do not change it."""
    return blake2b(b"".join(sorted(_digest_of(code) for code in found.functions)), digest_size=16).hexdigest()


def _globals_digest(found: Reach) -> str:
    """Return a digest of the globals that code reads, except of those that it assigns."""
    hasher = blake2b(digest_size=16)
    for place in sorted(found.places.values(), key=lambda place: place.label):
        is_augment = place.name == "augment" and isinstance(place.owner, type)
        if place.label not in found.stored and not is_augment:
            with contextlib.suppress(KeyError):
                _add_part(hasher, place.label, value_digest(place.value()))
    return hasher.hexdigest()


def _digest_of(code: CodeType) -> bytes:
    hasher = blake2b(digest_size=16)
    constants = [_digest_of(each).hex() if isinstance(each, CodeType) else _text(each) for each in code.co_consts]
    # The file and the first line are left out, because the same script may lie elsewhere on another host.
    _add_part(hasher, code.co_name, code.co_code)
    _add_part(hasher, "names", repr((code.co_names, code.co_varnames, constants)).encode("utf-8", "surrogatepass"))
    return hasher.digest()


def _text(constant: Any) -> str:
    """Return a constant of compiled code as text. The order of a frozenset differs between processes."""
    if isinstance(constant, frozenset):
        return f"frozenset({sorted(map(repr, constant))})"
    return repr(constant)


@functools.cache
def _packages() -> list[tuple[str, str]]:
    """Return the installed packages with their versions. Takes about 100 ms."""
    found = {(str(each.metadata["Name"]), each.version) for each in importlib.metadata.distributions()}
    return sorted(found)


@functools.cache
def _cpu() -> str:
    """Return the model of the CPU, because the bits of a sum may depend on it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""

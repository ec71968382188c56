"""Data set factories registered by name, and the specs that name what they build.

Calling a registered factory builds nothing. It returns a `DatasetSpec`, a name
and JSON arguments, which any process that imported the same script can turn
into the data set. Nothing else about a data set ever crosses the wire.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias, overload

from hetero.errors import ConfigError

__all__ = [
    "MAX_ARGUMENTS_BYTES",
    "DatasetFactory",
    "DatasetSpec",
    "Index",
    "Seeding",
    "dataset",
    "get_factory",
    "note_length",
    "registered",
    "set_describer",
]

Index: TypeAlias = "int | float | str | bytes | bool | tuple[Index, ...] | list[Index] | None"
"""What a sampler yields: a position, the key of a data set that takes keys, or a list for one that takes lists."""

Seeding: TypeAlias = Literal["sample", "batch"]
"""How often the random generators are seeded."""

MAX_ARGUMENTS_BYTES = 64 * 1024
"""Bound on a spec's arguments: every request carries them."""

_MAX_DEPTH = 32
_NAME = re.compile(r"[\w.\-]{1,128}")

_lock = threading.Lock()
_factories: dict[str, DatasetFactory] = {}
_lengths: dict[tuple[DatasetFactory, DatasetSpec], int] = {}
_MAX_LENGTHS = 256
_describer: Callable[[DatasetSpec], int] | None = None


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Which registered data set, with which arguments; hashable and cheap to send.

    ``len(spec)`` makes it a valid ``data_source`` of torch's samplers.
    """

    name: str
    """The registered name."""
    arguments_json: str = "{}"
    """JSON object: sorted names of arguments, no white space, at most 64 KiB; dicts inside of it keep their order."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"data set name {self.name[:140]!r} is not 1 to 128 letters, digits, dots, dashes or underscores"
            )
        if (size := len(self.arguments_json.encode(errors="replace"))) > MAX_ARGUMENTS_BYTES:
            raise ConfigError(
                f"arguments of data set {self.name!r} take {size} bytes, at most {MAX_ARGUMENTS_BYTES} are allowed\n"
                "  Pass the path of a file that holds them instead."
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments, decoded; a new dictionary each time.

        Raises:
            ConfigError: If ``arguments_json`` is no JSON object.
        """
        try:
            decoded = json.loads(self.arguments_json)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"arguments of data set {self.name!r} are not valid JSON: {exc}") from exc
        if not isinstance(decoded, dict):
            raise ConfigError(f"arguments of data set {self.name!r} are a {type(decoded).__name__}, not a JSON object")
        return decoded

    def __len__(self) -> int:
        """Return the number of samples; the first call may build or ask for the data set.

        Raises:
            TypeError: If the data set has no length.
            DatasetError: If the factory raises.
        """
        describer = _describer
        return _local_length(get_factory(self.name), self) if describer is None else describer(self)

    def __getitem__(self, index: object) -> Any:
        raise ConfigError(
            f"{self} only names a data set, which is built where it is needed: it has no samples here\n"
            "  Get batches of it through a DataLoader, and one of the samples with "
            f"hetero.datasets.get_factory({self.name!r}).function(...)[{index!r:.40}]."
        )

    def __iter__(self) -> NoReturn:
        self[0]
        raise AssertionError("unreachable")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self.name}(...) only names a data set, which is built where it is needed: it has no attribute {name!r}. "
            "What the script needs to know of the data set it can ask a function of its own",
            name=name,
            obj=self,
        )

    def __str__(self) -> str:
        text = self.arguments_json[1:-1]
        return f"{self.name}({text if len(text) <= 60 else text[:57] + '...'})"


def _refuse_attribute(spec: DatasetSpec, name: str, value: object) -> NoReturn:
    raise ConfigError(
        f"{spec} only names a data set: {name} cannot be set on it, and no host would see it\n"
        f"  Make it an argument of the function {spec.name}, which builds the data set: "
        f"def {spec.name}(..., {name}), and make another loader for another value."
    )


# Afterwards: a frozen dataclass brings its own, whose error does not say what to do.
DatasetSpec.__setattr__ = _refuse_attribute  # type: ignore[assignment,method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFactory:
    """A registered function that builds a data set; calling it returns a `DatasetSpec`."""

    name: str
    """The registered name."""
    function: Callable[..., Any]
    """Builds the map-style data set; runs where the data is needed."""
    seeding: Seeding | None = None
    """Seed the generators for every sample, or once per batch; None: see `dataset`."""
    collate_fn: Callable[[Any], Any] | None = None
    """Makes a batch of a list of samples; None is torch's ``default_collate``."""
    worker_init_fn: Callable[[int], object] | None = None
    """Called with the worker's index, once per process, after the data set was built."""
    fingerprint: Callable[[Any], str] | str | None = None
    """Identity of the data instead of probed samples: a text, or a function of the data set."""
    place: str = field(default="", compare=False)
    """File and line of the function, for messages."""

    def __call__(self, *args: Any, **kwargs: Any) -> DatasetSpec:
        """Bind the arguments, defaults included, and return the spec; build nothing.

        Raises:
            ConfigError: If the arguments do not fit the signature or are not JSON values.
        """
        signature = inspect.signature(self.function)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as exc:
            raise ConfigError(f"data set {self.name!r}: {exc}; its signature is {self.name}{signature}") from exc
        bound.apply_defaults()
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            else:
                arguments[name] = value
        checked = {name: _to_json(value, f"{self.name}({name})", 0) for name, value in arguments.items()}
        # Only the names are sorted: a data set may number its classes by the order of a dict.
        return DatasetSpec(self.name, json.dumps(dict(sorted(checked.items())), separators=(",", ":"), allow_nan=False))


@overload
def dataset(function: Callable[..., Any], /) -> DatasetFactory: ...


@overload
def dataset(
    *,
    name: str | None = None,
    seeding: Seeding | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    fingerprint: Callable[[Any], str] | str | None = None,
) -> Callable[[Callable[..., Any]], DatasetFactory]: ...


def dataset(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    seeding: Seeding | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    fingerprint: Callable[[Any], str] | str | None = None,
) -> DatasetFactory | Callable[[Callable[..., Any]], DatasetFactory]:
    """Register a function that builds a map-style data set.

    Use it at the top level of the training script, so that data hosts, which
    import the script without running its ``main``, register it too.

    A sample must be a function of its index and of the global generators of `random`, NumPy
    and torch, which are seeded from (seed, epoch, index, occurrence) before it is computed.
    A data set with a generator of its own gets the same key, an unsigned 64-bit integer,
    through a method ``on_seed(self, key)``, if it has one.

    Args:
        function: The factory. Its arguments must be JSON values; tuples arrive as lists.
        name: Registered name; the function's own by default.
        seeding: ``"sample"`` seeds `random`, NumPy's and torch's global generators for
            every sample; ``"batch"`` once per batch, for samples cheaper than that (7 us)
            and for data sets with torch's ``__getitems__``. None: ``"batch"`` if the data set
            has ``__getitems__`` and its samples draw nothing, which a few probes show, else ``"sample"``.
        collate_fn: As torch's; None is ``default_collate``.
        worker_init_fn: As torch's.
        fingerprint: A text, or a function of the data set, that identifies the data on
            a host. By default a few samples are fetched and hashed.

    Returns:
        The registered factory; calling it returns a `DatasetSpec`.

    Raises:
        ConfigError: If the name is taken, or the function cannot be called by JSON arguments.
    """
    if function is None:
        return functools.partial(
            _register,
            name=name,
            seeding=seeding,
            collate_fn=collate_fn,
            worker_init_fn=worker_init_fn,
            fingerprint=fingerprint,
        )
    return _register(function, name=name)


def get_factory(name: str) -> DatasetFactory:
    """Return the factory registered as ``name``.

    Raises:
        ConfigError: If there is none; the message lists the known names.
    """
    factory = _factories.get(name)
    if factory is not None:
        return factory
    close = difflib.get_close_matches(name, _factories, n=1)
    known = ", ".join(registered()) or "none"
    raise ConfigError(
        f"no data set named {name[:60]!r} is registered"
        + (f"; did you mean {close[0]!r}?" if close else "")
        + f"\n  Registered: {known}.\n  Register it with @hetero.dataset at the top level of the training script."
    )


def registered() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_factories))


def set_describer(describer: Callable[[DatasetSpec], int] | None) -> None:
    """Choose what answers ``len(spec)``; None: build the data set in this process.

    The describer should cache: samplers ask often.
    """
    global _describer
    _describer = describer


def _register(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    seeding: Seeding | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    fingerprint: Callable[[Any], str] | str | None = None,
) -> DatasetFactory:
    """Check the function and put it into the registry."""
    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"@hetero.dataset decorates a function that returns the data set, not {function!r:.80}\n"
            "  Write a function next to it: def photos(root: str): return PhotoDataset(root)"
        )
    if seeding not in (None, "sample", "batch"):
        raise ConfigError(f"seeding is {seeding!r}, expected 'sample' or 'batch'")
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{os.path.realpath(code.co_filename)}:{code.co_firstlineno}" if code else repr(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"data set factory at {place}: parameter {parameter} cannot be passed by name; make it a keyword"
            )
    factory = DatasetFactory(
        name=getattr(function, "__name__", "") if name is None else name,
        function=function,
        seeding=seeding,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        fingerprint=fingerprint,
        place=place,
    )
    DatasetSpec(factory.name)  # checks the name
    with _lock:
        other = _factories.get(factory.name)
        # One file may be imported twice, as __main__ and by its name; a notebook runs a cell again.
        interactive = not hasattr(sys.modules.get("__main__"), "__file__") and function.__module__ == "__main__"
        if other is not None and other.place != place and not interactive:
            raise ConfigError(
                f"two data sets are named {factory.name!r}\n"
                f"  First:  {other.place}\n  Second: {place}\n"
                "  Give one of them another name: @hetero.dataset(name=...)."
            )
        _factories[factory.name] = factory
    return factory


def note_length(spec: DatasetSpec, num_samples: int) -> None:
    """Note the length of a data set that this process has built: ``len(spec)`` need not build it once more."""
    if len(_lengths) >= _MAX_LENGTHS:
        _lengths.clear()
    _lengths[get_factory(spec.name), spec] = num_samples


def _local_length(factory: DatasetFactory, spec: DatasetSpec) -> int:
    """Return the length of the data set; build it here, as every process that fetches from it does, if need be."""
    known = _lengths.get((factory, spec))
    if known is not None:
        return known
    # By its name: that package is built on this module.
    build: Any = importlib.import_module("hetero.batches.build")
    built = build.BuiltDataset.prebuild(spec)
    built.log_warnings()
    note_length(spec, len(built))
    return len(built)


def _to_json(value: object, path: str, depth: int) -> object:
    """Return ``value`` in JSON's types, or raise a `ConfigError` that names the path."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"argument {path} is nested deeper than {_MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # the value of a str enum, not its name
    if isinstance(value, int | float):
        return _number_to_json(value, path)
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{path}[{position}]", depth + 1) for position, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"argument {path} has the key {key!r:.40} of type {type(key).__name__}, expected str")
        return {str.__str__(key): _to_json(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    if hasattr(value, "__fspath__"):
        advice = "pass str(path)"
    elif hasattr(value, "item"):
        advice = "pass .item() or .tolist()"
    else:
        advice = "build it inside the data set's function"
    kind = type(value)
    raise ConfigError(
        f"argument {path} is a {kind.__module__}.{kind.__qualname__}, not a JSON value\n"
        f"  A data set's arguments travel to other hosts as JSON: {advice}."
    )


def _number_to_json(value: float, path: str) -> float:
    """Return an int or float of exactly that type."""
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ConfigError(f"argument {path} is an integer of {value.bit_length()} bits, expected at most 64")
        return int(value)
    if not math.isfinite(value):
        raise ConfigError(f"argument {path} is {value}, which JSON cannot express; pass a finite number or None")
    return float(value)

"""Specs of data sets, which are sent between processes instead of the data sets.

A `DatasetSpec` holds the name and arguments of a data set. Calling a `DatasetFactory` returns a spec.
`hetero.datasets` registers the factories.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

from hetero.documents.files import MAX_DEPTH
from hetero.errors import ConfigError

__all__ = [
    "MAX_ARGUMENTS_BYTES",
    "Cache",
    "DatasetFactory",
    "DatasetSpec",
    "Index",
    "Seeding",
    "set_builder",
    "set_describer",
]

Index: TypeAlias = "int | float | str | bytes | bool | tuple[Index, ...] | list[Index] | None"
"""Index that a sampler yields. Depending on the data set it is a position, a key, or a list of these."""

Seeding: TypeAlias = Literal["sample", "batch"]
"""How often the random generators are seeded: for every sample, or once per batch."""

MAX_ARGUMENTS_BYTES = 64 * 1024
"""Limit on the size of a spec's arguments, because every request for a batch carries them."""

_NAME = re.compile(r"[\w.\-]{1,128}")

_describer: Callable[[DatasetSpec], int] | None = None
_builder: Callable[[DatasetSpec], int] | None = None


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Name and arguments of a registered data set. It is hashable and cheap to send.

    A spec is a valid ``data_source`` for torch's samplers, because it supports ``len(spec)``.
    """

    name: str
    """Registered name of the data set."""
    arguments_json: str = "{}"
    """Arguments as a JSON object of at most 64 KiB, without white space.

    The names of the arguments are sorted. Dicts inside the arguments keep their order.
    """

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
        """Decoded arguments, as a new dictionary for each access.

        Raises:
            ConfigError: If ``arguments_json`` is not a JSON object.
        """
        try:
            decoded = json.loads(self.arguments_json)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"arguments of data set {self.name!r} are not valid JSON: {exc}") from exc
        if not isinstance(decoded, dict):
            raise ConfigError(f"arguments of data set {self.name!r} are a {type(decoded).__name__}, not a JSON object")
        return decoded

    def __len__(self) -> int:
        """Return the number of samples.

        The first call may build the data set, or ask another process for its length.

        Raises:
            TypeError: If the data set lacks a length.
            DatasetError: If the factory raises.
        """
        # If a describer is set, it asks other processes. The builder builds the data set here.
        describer = _describer or _builder
        if describer is None:
            raise TypeError(f"the length of {self} is known where its factory is registered")
        return describer(self)

    def __getitem__(self, index: object) -> Any:
        raise ConfigError(
            f"{self} only names a data set, which is built where it is needed: it has no samples here\n"
            "  Get batches of it through a DataLoader, and one of the samples with "
            f"hetero.datasets.get_factory({self.name!r}).function(...)[{index!r:.40}]."
        )

    def __iter__(self) -> NoReturn:
        self[0]  # raises the error with advice
        raise AssertionError("unreachable")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self.name}(...) only names a data set, which is built where it is needed. It has no attribute {name!r}\n"
            "  Compute what the script needs to know in another function of the script. What changes the samples is an "
            "argument of the factory.",
            name=name,
            obj=self,
        )

    def __str__(self) -> str:
        text = self.arguments_json[1:-1]
        return f"{self.name}({text if len(text) <= 60 else text[:57] + '...'})"


def _refuse_attribute(spec: DatasetSpec, name: str, value: object) -> NoReturn:
    """Raise a `ConfigError` with advice, because an attribute of a spec cannot be set."""
    raise ConfigError(
        f"{spec} only names a data set. {name} cannot be set on it, because no host would see it\n"
        f"  Make it an argument of the function that builds the data set: def {spec.name}(..., {name}). Make another "
        "loader for another value."
    )


# Replace the __setattr__ that `dataclass` generates for a frozen class, because its error gives no advice.
DatasetSpec.__setattr__ = _refuse_attribute  # type: ignore[assignment,method-assign]


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Where each host keeps the loaded samples of a data set, and how many bytes of them.

    ``Cache(memory="8 GB", disk="200 GB", folder="/scratch")``: sizes are numbers of bytes or texts such as ``"8 GB"``
    and ``"512 MiB"``. Both bounds are for all processes of a host together.

    Raises:
        ConfigError: If a size is malformed, both are 0, or ``folder`` is missing.
    """

    memory: int | str = 0
    """Bytes in ``/dev/shm``. They are free again when the job has ended."""
    disk: int | str = 0
    """Bytes of files in ``folder``, for samples that do not fit into memory. Later jobs find them there."""
    folder: str | None = None
    """Folder on a disk of the host. Variables such as ``$TMPDIR`` are expanded there."""
    owner_hosts: bool = True
    """Whether each sample is kept and computed by one of several data hosts. False if all hosts share the folder."""

    def __post_init__(self) -> None:
        for name in ("memory", "disk"):
            # The usual assignment is not possible in a frozen dataclass.
            object.__setattr__(self, name, _bytes_of(getattr(self, name), name))
        if not self.memory and not self.disk:
            raise ConfigError("a cache has neither memory nor disk\n  Say how much: hetero.Cache(memory='8 GB').")
        if bool(self.disk) != bool(self.folder):
            raise ConfigError(
                f"a cache has disk={self.disk!r} and folder={self.folder!r}\n"
                "  Give both: hetero.Cache(disk='200 GB', folder='/scratch')."
            )


def _bytes_of(value: object, name: str) -> int:
    """Return a size in bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{name} of a cache is {value!r:.60}, expected bytes such as 8_000_000_000 or '8 GB'")
    number, prefix, is_binary = match.groups()
    # The place of the prefix in this text is the power: none is 0, k is 1, M is 2.
    power = " kMGT".index(prefix.replace("K", "k") or " ")
    return int(float(number) * (1024 if is_binary else 1000) ** power)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFactory:
    """A registered function that builds a data set. Calling the factory returns a `DatasetSpec`."""

    name: str
    """Registered name."""
    function: Callable[..., Any]
    """Function that builds the map-style data set. It runs in the processes that need the data."""
    seeding: Seeding | None = None
    """How often to seed the generators. For None see `hetero.datasets.dataset`."""
    collate_fn: Callable[[Any], Any] | None = None
    """Function that makes a batch from a list of samples. None selects torch's ``default_collate``."""
    worker_init_fn: Callable[[int], object] | None = None
    """Function that each process calls once with its worker index, after it has built the data set."""
    fingerprint: Callable[[Any], str] | str | None = None
    """Text that identifies the data, or a function that returns this text for a data set. None: samples are hashed."""
    fork_built: bool = True
    """Whether one process may build the data set, and then fork endpoints or torch's workers with it."""
    cache: Cache | None = None
    """Where the results of the data set's ``load`` are kept. None: nowhere."""
    place: str = field(default="", compare=False)
    """File and line of the function, for messages."""

    def __call__(self, *args: Any, **kwargs: Any) -> DatasetSpec:
        """Return the spec for these arguments and the function's defaults. Does not build the data set.

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
            # The arguments that the parameter ``**kwargs`` collects are arguments of the data set too.
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            else:
                arguments[name] = value
        checked = {name: _to_json(value, f"{self.name}({name})", depth=0) for name, value in arguments.items()}
        # Sort the arguments but not the dicts inside them, because a data set may number its classes in a dict's order.
        return DatasetSpec(self.name, json.dumps(dict(sorted(checked.items())), separators=(",", ":"), allow_nan=False))


def set_describer(describer: Callable[[DatasetSpec], int] | None) -> None:
    """Set the function that returns ``len(spec)``. With None, the function of `set_builder` is used.

    The describer should cache its results, because samplers call ``len`` often.
    """
    global _describer
    _describer = describer


def set_builder(builder: Callable[[DatasetSpec], int]) -> None:
    """Set the function that returns ``len(spec)`` if no describer is set.

    The registry sets a function that builds the data set in this process.
    """
    global _builder
    _builder = builder


def _to_json(value: object, path: str, depth: int) -> object:
    """Return ``value`` converted to JSON's types, or raise a `ConfigError` that names ``path``."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"argument {path} is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # For a member of a str enum, this returns the value and not the name.
        return str.__str__(value)
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
    """Return a number as a plain int or float, even if its type is a subclass."""
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ConfigError(f"argument {path} is an integer of {value.bit_length()} bits, expected at most 64")
        return int(value)
    if not math.isfinite(value):
        raise ConfigError(f"argument {path} is {value}, which JSON cannot express; pass a finite number or None")
    return float(value)

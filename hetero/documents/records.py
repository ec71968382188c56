"""Converts frozen dataclasses to JSON values and back, and checks untrusted JSON against their annotations.

Hosts send each other records as JSON. They also read reports, ledgers and descriptions of clusters and jobs from files.
Therefore every value is checked for type, range and size before it is used. Numbers must be finite. They must not be
negative, unless the field allows it. An error names the path of the wrong value, what was found and what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hetero.documents.files import read_bounded
from hetero.documents.text import MAX_TEXT_CHARS, printable, shortened
from hetero.errors import ConfigError

__all__ = ["MAX_ITEMS", "JsonRecord", "Mismatch", "camel_case", "decode", "encode", "json_text", "limits", "load"]

MAX_ITEMS = 10_000
"""Limit of entries in one list or object."""
_MAX_NUMBER = 2.0**63
_MAX_FILE_BYTES = 64 << 20
"""Limit of a file that `load` reads. The report of 1,000 hosts with histories is the longest."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """What `decode` found wrong. It is the ``record`` of the `ConfigError`."""

    path: str
    """Path of the wrong value. Empty for the whole document."""
    problem: str
    """What is wrong, for example ``found 'x'``, ``missing`` or ``unknown key``."""
    expected: str
    guess: str = ""
    """The key of the document that is probably meant, if a key is missing."""

    def __str__(self) -> str:
        guess = f"; {self.guess!r} is an unknown key" if self.guess else ""
        return f"{self.path or 'value'}: {self.problem}, expected {self.expected}{guess}"


class JsonRecord:
    """Base of a dataclass that hosts and ranks send as JSON."""

    __slots__ = ()

    def to_json(self) -> bytes:
        """Return the record as JSON."""
        return json.dumps(encode(self), allow_nan=False, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls: type[T], content: bytes) -> T:
        """Return the record that a JSON document contains.

        Raises:
            ConfigError: If it is malformed.
        """
        try:
            return decode(cls, json.loads(content))
        # Deeply nested JSON raises RecursionError.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the JSON of {cls.__name__} is malformed: {error}") from error


def limits(
    *,
    minimum: float = 0.0,
    maximum: float = _MAX_NUMBER,
    choices: tuple[str, ...] = (),
    min_items: int = 0,
    max_items: int = MAX_ITEMS,
    max_length: int = MAX_TEXT_CHARS,
    accepts: Callable[[str], object] | None = None,
    expected: str = "",
) -> dict[str, Any]:
    """Return field metadata that narrows what `decode` accepts.

    Args:
        minimum: Smallest number.
        maximum: Largest number.
        choices: The allowed strings. Empty allows any string.
        min_items: Shortest list or object.
        max_items: Longest list or object.
        max_length: Longest string.
        accepts: Returns whether a string is allowed, for example ``re.compile(...).fullmatch``. None allows any string.
        expected: Description of the strings that ``accepts`` allows, for messages.
    """
    return {
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "min_items": min_items,
        "max_items": max_items,
        "max_length": max_length,
        "accepts": accepts,
        "expected": expected,
    }


def camel_case(name: str) -> str:
    """Return the key of a field in an API whose keys are written ``LikeThis``."""
    return "".join(part.capitalize() for part in name.split("_"))


def encode(value: object) -> Any:
    """Return ``value`` as plain JSON values. Dataclasses become objects, tuples become lists.

    Text longer than `MAX_TEXT_CHARS` (a long command line, for example) is cut, because `decode` would reject it.
    """
    if isinstance(value, str):
        return shortened(value, MAX_TEXT_CHARS)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {encode(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(
    cls: type[T],
    value: object,
    *,
    path: str = "",
    spelling: Callable[[str], str] = str,
    is_foreign: bool = False,
) -> T:
    """Build a dataclass from parsed JSON.

    Args:
        cls: A dataclass of strings, numbers, booleans, tuples, dicts with string keys, optional values and further
            dataclasses.
        value: The parsed JSON value.
        path: Position of ``value`` in the document, for messages.
        spelling: Returns the key in the document for the name of a field.
        is_foreign: Whether another program defines the document. Unknown keys are then ignored, and a null counts as
            a missing value.

    Returns:
        The instance. Fields with a default may be absent in ``value``.

    Raises:
        ConfigError: If a key is unknown or missing, or a value has the wrong type, range or size. Its ``record``
            is a `Mismatch`.
    """
    built: T = _Decoder(spelling, is_foreign).record(cls, value, path)
    return built


def json_text(record: object) -> str:
    """Return a dataclass as the text of a JSON file that `load` reads. JSON has no NaN, so a NaN is a `ValueError`."""
    return json.dumps(encode(record), indent=2, allow_nan=False) + "\n"


def load(cls: type[T], path: str | Path, file_name: str, *, to_do: str) -> T:
    """Read a dataclass from a JSON file that contains what `json_text` returned.

    Args:
        cls: See `decode`.
        path: The file, or the directory that contains it.
        file_name: Name of the file in a directory, for example ``report.json``. Messages omit ``.json``.
        to_do: Advice for the messages.

    Raises:
        ConfigError: If the file is missing or malformed. The message names the file and the key path.
    """
    path = Path(path)
    if path.is_dir():
        path /= file_name
    source = f"{file_name.removesuffix('.json')} {path}"
    content = read_bounded(path, source, max_bytes=_MAX_FILE_BYTES, to_do=to_do)
    try:
        return decode(cls, json.loads(content))
    # Deeply nested JSON raises RecursionError.
    except (ValueError, RecursionError) as error:
        problem = error if isinstance(error, ConfigError) else f"not valid JSON: {error}"
        raise ConfigError(f"{source}: {problem}; {to_do}") from error


class _Decoder:
    """Checks the values of one document."""

    def __init__(self, spelling: Callable[[str], str], is_foreign: bool) -> None:
        self._spelling = spelling
        self._is_foreign = is_foreign

    def record(self, cls: type[Any], value: object, path: str) -> Any:
        """Return a dataclass made from a JSON object."""
        if not isinstance(value, dict):
            _wrong(path, value, "an object")
        hints = typing.get_type_hints(cls)
        fields = {self._spelling(field.name): field for field in dataclasses.fields(cls)}
        unknown = [key for key in value if key not in fields]
        arguments: dict[str, Any] = {}
        for key, field in fields.items():
            hint, bounds = hints[field.name], field.metadata or limits()
            # In the document of another program, a null counts as a missing value.
            if key in value and not (self._is_foreign and value[key] is None):
                arguments[field.name] = self._value(hint, value[key], _join(path, key), bounds)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                # A misspelled key is both missing and unknown.
                guess = next(iter(difflib.get_close_matches(key, map(str, unknown), n=1)), "")
                expected = _expected(hint, bounds)
                raise ConfigError(Mismatch(path=_join(path, key), problem="missing", expected=expected, guess=guess))
        # Check unknown keys last. A document of another version must be rejected for its version, which is its first
        # field.
        if unknown and not self._is_foreign:
            known = f"one of {', '.join(fields)}"
            raise ConfigError(Mismatch(path=_join(path, unknown[0]), problem="unknown key", expected=known))
        return cls(**arguments)

    def _value(self, hint: Any, value: object, path: str, bounds: Mapping[str, Any]) -> Any:
        """Return a value converted to the type of its field.

        Args:
            hint: Annotation of the field.
            value: The parsed JSON value.
            path: Position of the value in the document, for messages.
            bounds: What `limits` returned for the field. The entries of a list or an object have the same bounds.
        """
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return None if value is None else self._value(_non_null(arguments), value, path, bounds)
        if origin is tuple:
            items = _sized(value, list, path, hint, bounds)
            return tuple(self._value(arguments[0], item, f"{path}[{i}]", bounds) for i, item in enumerate(items))
        if origin is dict:
            entries = _sized(value, dict, path, hint, bounds)
            return {
                _text(key, path, limits()): self._value(arguments[1], item, _join(path, key), bounds)
                for key, item in entries.items()
            }
        if dataclasses.is_dataclass(hint):
            return self.record(typing.cast("type[Any]", hint), value, path)
        if hint is str:
            return _text(value, path, bounds)
        if hint is bool:
            return value if isinstance(value, bool) else _wrong(path, value, "true or false")
        return _number(hint, value, path, bounds)


def _expected(hint: Any, bounds: Mapping[str, Any]) -> str:
    """Return the description of a field's values, for messages."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return f"{_expected(_non_null(typing.get_args(hint)), bounds)} or null"
    if origin is tuple:
        least, most = bounds["min_items"], bounds["max_items"]
        return "a list" if (least, most) == (0, MAX_ITEMS) else f"a list of {least} to {most} entries"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "an object"
    if hint is str:
        return bounds["expected"] or (f"one of {', '.join(bounds['choices'])}" if bounds["choices"] else "a string")
    return {int: "an integer", bool: "true or false"}.get(hint, "a number")


def _non_null(arguments: tuple[Any, ...]) -> Any:
    """Return the type of an optional value: ``int`` of ``int | None``."""
    (hint,) = (argument for argument in arguments if argument is not type(None))
    return hint


def _text(value: object, path: str, bounds: Mapping[str, Any]) -> str:
    """Return a string that is within its bounds."""
    if not isinstance(value, str):
        _wrong(path, value, "a string")
    if len(value) > bounds["max_length"]:
        problem, expected = f"string of {len(value)} characters", f"at most {bounds['max_length']}"
        raise ConfigError(Mismatch(path=path, problem=problem, expected=expected))
    choices, accepts = bounds["choices"], bounds["accepts"]
    if (choices and value not in choices) or (accepts is not None and not accepts(value)):
        _wrong(path, value, _expected(str, bounds))
    return value


def _number(hint: Any, value: object, path: str, bounds: Mapping[str, Any]) -> int | float:
    """Return a finite number that is within its bounds."""
    wanted = (int,) if hint is int else (int, float)
    # Reject bool first, because True is an int in Python.
    if isinstance(value, bool) or not isinstance(value, wanted):
        _wrong(path, value, _expected(hint, bounds))
    if isinstance(value, float) and not math.isfinite(value):
        _wrong(path, value, "a finite number")
    if not bounds["minimum"] <= value <= bounds["maximum"]:
        least, most = (f"{bounds[end]:g}" for end in ("minimum", "maximum"))
        # The version of a schema has equal bounds, so the message names one number.
        _wrong(path, value, least if least == most else f"a number from {least} to {most}")
    return value if hint is int else float(value)


def _sized(value: object, kind: type, path: str, hint: Any, bounds: Mapping[str, Any]) -> Any:
    """Return a list or an object whose number of entries is within its bounds."""
    if not isinstance(value, kind):
        _wrong(path, value, _expected(hint, bounds))
    number = len(value)  # type: ignore[arg-type]
    if not bounds["min_items"] <= number <= bounds["max_items"]:
        bound = f"at least {bounds['min_items']}" if number < bounds["min_items"] else f"at most {bounds['max_items']}"
        raise ConfigError(Mismatch(path=path, problem=f"{number} entries", expected=bound))
    return value


def _join(path: str, key: object) -> str:
    shown = printable(str(key), max_chars=60)
    return f"{path}.{shown}" if path else shown


def _wrong(path: str, value: object, expected: str) -> NoReturn:
    shown = printable(value if isinstance(value, str) else repr(value), max_chars=60)
    quoted = f"'{shown}'" if isinstance(value, str) else shown
    raise ConfigError(Mismatch(path=path, problem=f"found {quoted}", expected=expected))

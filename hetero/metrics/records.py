"""Converts frozen dataclasses to JSON values and back, and checks them against their annotations.

Summaries travel between hosts, and reports are read from untrusted files. Therefore every value is checked for type,
range and size before it is used. Numbers are finite and, unless the field allows it, not negative.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar

from hetero.errors import ConfigError

__all__ = ["MAX_ITEMS", "MAX_TEXT_LENGTH", "decode", "encode", "limits"]

MAX_TEXT_LENGTH = 4096
"""Limit of characters in one string."""
MAX_ITEMS = 10_000
"""Limit of entries in one list or object."""
_MAX_NUMBER = 2.0**63

T = TypeVar("T")


def limits(
    *, minimum: float = 0.0, maximum: float = _MAX_NUMBER, choices: tuple[str, ...] = (), max_items: int = MAX_ITEMS
) -> dict[str, object]:
    """Return field metadata that narrows what `decode` accepts.

    Args:
        minimum: Smallest number.
        maximum: Largest number.
        choices: The allowed strings. Empty allows any string.
        max_items: Longest list or object.
    """
    return {"minimum": minimum, "maximum": maximum, "choices": choices, "max_items": max_items}


def encode(value: object) -> Any:
    """Return ``value`` as plain JSON values. Dataclasses become objects, tuples become lists.

    Text beyond `MAX_TEXT_LENGTH` (a long command line, for example) is cut, because `decode` would reject it.
    """
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT_LENGTH else value[: MAX_TEXT_LENGTH - 3] + "..."
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {encode(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(cls: type[T], value: object, *, path: str = "") -> T:
    """Build a dataclass from parsed JSON.

    Args:
        cls: A dataclass of strings, numbers, booleans, tuples, dicts with string keys, optional values and further
            dataclasses.
        value: The parsed JSON value.
        path: Position of ``value`` in the document, for messages.

    Returns:
        The instance. Fields with a default may be absent in ``value``.

    Raises:
        ConfigError: If a key is unknown or missing, or a value has the wrong type, range or size. The message names
            the key path.
    """
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = next((key for key in value if key not in fields), None)
    if unknown is not None:
        raise ConfigError(f"{_join(path, _show(unknown))}: unknown key; expected one of {', '.join(fields)}")
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            bounds = field.metadata or limits()
            arguments[name] = _decode_value(hints[name], value[name], _join(path, name), bounds)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(path, name)}: missing; every {cls.__name__} needs it")
    return cls(**arguments)


def _decode_value(hint: Any, value: object, path: str, bounds: typing.Mapping[str, Any]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _decode_value(hint, value, path, bounds)
    if origin is tuple:
        items = _sized(value, list, path, "a list", bounds)
        return tuple(_decode_value(arguments[0], item, f"{path}[{i}]", bounds) for i, item in enumerate(items))
    if origin is dict:
        entries = _sized(value, dict, path, "an object", bounds)
        return {
            _decode_text(key, path, {}): _decode_value(arguments[1], item, _join(path, _show(key)), bounds)
            for key, item in entries.items()
        }
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value, path=path)
    if hint is str:
        return _decode_text(value, path, bounds)
    if hint is bool:
        if not isinstance(value, bool):
            raise _wrong(path, value, "true or false")
        return value
    return _decode_number(hint, value, path, bounds)


def _decode_text(value: object, path: str, bounds: typing.Mapping[str, Any]) -> str:
    if not isinstance(value, str):
        raise _wrong(path, value, "a string")
    if len(value) > MAX_TEXT_LENGTH:
        raise ConfigError(f"{path}: string of {len(value)} characters; at most {MAX_TEXT_LENGTH} are allowed")
    if bounds.get("choices") and value not in bounds["choices"]:
        raise _wrong(path, value, f"one of {', '.join(bounds['choices'])}")
    return value


def _decode_number(hint: Any, value: object, path: str, bounds: typing.Mapping[str, Any]) -> int | float:
    wanted = (int,) if hint is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise _wrong(path, value, "an integer" if hint is int else "a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(path, value, "a finite number")
    if not bounds["minimum"] <= value <= bounds["maximum"]:
        raise _wrong(path, value, f"a number from {bounds['minimum']:g} to {bounds['maximum']:g}")
    return value if hint is int else float(value)


def _sized(value: object, kind: type, path: str, name: str, bounds: typing.Mapping[str, Any]) -> Any:
    if not isinstance(value, kind):
        raise _wrong(path, value, name)
    if len(value) > bounds["max_items"]:  # type: ignore[arg-type]
        raise ConfigError(f"{path}: {len(value)} entries; at most {bounds['max_items']} are allowed")  # type: ignore[arg-type]
    return value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _show(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else value
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(path: str, value: object, expected: str) -> ConfigError:
    shown = f"'{_show(value)}'" if isinstance(value, str) else _show(value)
    return ConfigError(f"{path or 'value'}: found {shown}, expected {expected}")

"""Reads values of a parsed STUDY.yaml. Each function raises `ConfigError`, which names the key, for a wrong value."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.decide.studies.placeholders import level_text
from hetero.decide.studies.runs import Level
from hetero.documents.text import printable
from hetero.errors import ConfigError

__all__ = [
    "check_keys",
    "choice_of",
    "level_of",
    "mapping",
    "plain_of",
    "scalar_text",
    "sequence",
    "text_of",
    "texts_of",
    "whole_of",
]


def mapping(value: object, path: str, *, expected: str = "an object") -> Mapping[str, Any]:
    """Return an object of the file."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: found {_shown(value)}, expected {expected}")
    return value


def sequence(value: object, path: str) -> Sequence[Any]:
    """Return a list of the file."""
    if not isinstance(value, list):
        raise ConfigError(f"{path}: found {_shown(value)}, expected a list")
    return value


def check_keys(found: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    """Raise if an object has an unknown key."""
    for key in found:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"{path}{printable(str(key), max_chars=60)}: unknown key, expected one of {', '.join(known)}{hint}"
            )


def level_of(value: object, path: str) -> Level:
    """Return a level of a factor, or another single value: a text that is not empty, a finite number or a boolean."""
    value = _number_in(value)
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, (str, int, float, bool)) or not is_finite or value == "":
        raise ConfigError(f"{path}: found {_shown(value)}, expected a text, number or boolean")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(
            f"{path}: found {_shown(value)}, expected a text without the character 0, which no argument can hold"
        )
    return value


def text_of(value: object, path: str) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{path}: found {_shown(value)}, expected a text")
    return value


def scalar_text(value: object, path: str) -> str:
    """Return a single value as a text, which may be empty."""
    if value == "":
        return ""
    return level_text(level_of(value, path))


def texts_of(value: object, path: str) -> Mapping[str, str]:
    """Return an object of texts."""
    return {str(key): scalar_text(each, f"{path}.{key}") for key, each in mapping(value, path).items()}


def choice_of(value: object, path: str, choices: Sequence[str]) -> str:
    """Return one of the choices."""
    if value not in choices:
        raise ConfigError(f"{path}: found {_shown(value)}, expected one of {', '.join(choices)}")
    return str(value)


def whole_of(value: object, path: str, least: int, most: int) -> int:
    """Return a whole number within its bounds."""
    # Reject bool first, because True is a whole number in Python.
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{path}: found {_shown(value)}, expected a whole number from {least} to {most}")
    return value


def plain_of(value: object) -> object:
    """Return a value of the file with numbers for texts such as ``5e-5``, which YAML does not read as numbers."""
    if isinstance(value, Mapping):
        return {key: plain_of(each) for key, each in value.items()}
    return [_number_in(each) for each in value] if isinstance(value, list) else _number_in(value)


def _number_in(value: object) -> object:
    """Return the number in a text such as ``1e6``. Any other value is returned as it is.

    YAML 1.1 reads such a text as a number only if it has a dot and a sign in the exponent.
    """
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}", value):
        number = float(value)
        # Up to 2^53, a float has every whole number exactly.
        return int(number) if number.is_integer() and abs(number) < 2**53 else number
    return value


def _shown(value: object) -> str:
    return printable(repr(value), max_chars=60)

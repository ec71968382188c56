"""Helpers for command-line arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero.errors import ConfigError

__all__ = ["Subparsers", "pairs", "positive"]

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = object  # argparse's class is private and cannot be subscripted at run time


def pairs(flag: str, texts: Sequence[str], form: str) -> list[tuple[str, str]]:
    """Return the names and values of ``NAME=VALUE`` texts.

    Raises:
        ConfigError: If a text has another form, or a name is given twice.
    """
    found: list[tuple[str, str]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{flag} {text!r}: expected {form}")
        if any(name == other for other, _ in found):
            raise ConfigError(f"{flag} {text!r}: {name} was given before; expected each name once")
        found.append((name, value))
    return found


def positive(flag: str, text: str) -> int:
    """Return the whole number in a text. It must be at least 1.

    Raises:
        ConfigError: If the text is not such a number.
    """
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{flag} {text!r}: expected a whole number of at least 1")
    return int(text)

"""Helpers for command-line arguments that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero.errors import ConfigError

__all__ = ["Subparsers", "add_list", "number", "numbers", "pairs", "whole_number"]

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


def add_list(parser: argparse.ArgumentParser, flag: str, metavar: str, help_text: str) -> None:
    """Add an option that may be given several times. Its value is a list, which is empty without the option."""
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=help_text)


def whole_number(flag: str, text: str, *, least: int = 1) -> int:
    """Return the whole number in a text.

    Raises:
        ConfigError: If the text is not such a number, or if it is less than ``least``.
    """
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag} {text!r:.40}: expected a whole number of at least {least}")
    return int(text)


def number(flag: str, text: str, expected: str, *, above: float = 0.0, most: float = math.inf) -> float:
    """Return the number in a text.

    Args:
        flag: The option, for the message.
        text: Its value.
        expected: What is expected, for the message.
        above: The number must be above this bound.
        most: Largest number that is allowed.

    Raises:
        ConfigError: If the text is not such a number.
    """
    # A text that is not a number becomes NaN. The check below rejects NaN, because it is within no bounds.
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not above < value <= most or math.isinf(value):
        raise ConfigError(f"{flag} {text!r:.80}: expected {expected}")
    return value


def numbers(flag: str, texts: Sequence[str], unit: str, *, above: float, most: float) -> dict[str, float]:
    """Return the numbers in texts such as ``TYPE=USD``, by name.

    Args:
        flag: The option, for messages.
        texts: Its values.
        unit: What the number is, for messages, for example ``USD``.
        above: Each number must be above this bound.
        most: Largest number that is allowed.

    Raises:
        ConfigError: If a text has another form, or a name is given twice.
    """
    expected = f"TYPE={unit} with a number above {above:g} and at most {most:g}"
    found = pairs(flag, texts, expected)
    return {name: number(flag, text, expected, above=above, most=most) for name, text in found}

"""Read a JSON document of any size member by member, with one small value in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from hetero.errors import ConfigError

__all__ = ["JsonStream"]

_SPACE = re.compile(r"[ \t\r\n]*")
_AFTER_A_VALUE = set(" \t\r\n,:]}")
_CHUNK_CHARS = 1 << 16
_MAX_VALUE_CHARS = 1 << 20
_MAX_DEPTH = 16
"""Maximum nesting depth of objects with more than `_MAX_VALUE_CHARS` characters."""


class JsonStream:
    """Reader of one document, from its start to its end.

    After each name that `members` yields, the caller must read or skip its value before the next name::

        for name in stream.members():
            if name == "products":
                for sku in stream.members():
                    product = stream.value()
            else:
                stream.skip()

    Args:
        file: Untrusted text.
        source: Origin of the text, for messages.
    """

    def __init__(self, file: TextIO, source: str) -> None:
        self._file = file
        self._source = source
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._num_before = 0

    def members(self) -> Iterator[str]:
        """Yield the names of the members of the next value, which must be an object.

        Raises:
            ConfigError: If the next value is not an object, is not valid JSON, or is cut off. The message states the
                position.
        """
        self._expect("{")
        if self._next() == "}":
            self._at += 1
            return
        while True:
            name = self.value()
            if not isinstance(name, str):
                raise self._broken("a name in quotes")
            self._expect(":")
            yield name
            if self._next() == "}":
                self._at += 1
                return
            self._expect(",")

    def value(self) -> Any:
        """Return the next value, of at most 2^20 characters.

        Raises:
            ConfigError: If the value is longer, is not valid JSON, or is cut off. The message states the position.
        """
        self._next()
        while True:
            is_last = len(self._text) - self._at > _MAX_VALUE_CHARS
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                if is_last or not self._read():
                    raise self._broken(f"a value of at most {_MAX_VALUE_CHARS} characters") from None
            except (ValueError, RecursionError) as error:  # thousands of digits, or deep nesting
                raise self._broken("fewer digits or less nesting") from error
            else:
                # A number at the end of the buffer may continue in the next chunk, such as 10 in 10.5.
                if self._text[end : end + 1] in _AFTER_A_VALUE or is_last or not self._read():
                    self._at = end
                    return value

    def skip(self) -> None:
        """Skip the next value. An object may have any size, but lists and texts may not.

        Raises:
            ConfigError: If the value is not valid JSON, is cut off, or has, at any depth, a list or text of more than
                2^20 characters. The message states the position.
        """
        self._skip(0)

    def _skip(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise self._broken(f"objects nested at most {_MAX_DEPTH} deep")
        # Read until the buffer has the whole object. If it is too large for that, skip its members one by one.
        while self._next() == "{" and not self._holds_all():
            if len(self._text) - self._at > _MAX_VALUE_CHARS or not self._read():
                for _ in self.members():
                    self._skip(depth + 1)
                return
        self.value()

    def _holds_all(self) -> bool:
        """Return whether the buffer has the whole next value."""
        try:
            self._decoder.raw_decode(self._text, self._at)
        except (ValueError, RecursionError):
            return False
        return True

    def _expect(self, char: str) -> None:
        if self._next() != char:
            raise self._broken(repr(char))
        self._at += 1

    def _next(self) -> str:
        """Skip white space. Return the next character without consuming it, or an empty text at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _read(self) -> bool:
        try:
            chunk = self._file.read(_CHUNK_CHARS)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._source} is not UTF-8: {error.reason}") from error
        self._num_before += self._at
        self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)

    def _broken(self, expected: str) -> ConfigError:
        found = self._text[self._at : self._at + 40]
        at = self._num_before + self._at
        return ConfigError(f"{self._source}: character {at}: found {found!r}, expected {expected}")

"""Parses protobuf messages of other processes.

This module is separate from `hetero.wire.trees` because launchers use it without importing NumPy.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from hetero.errors import ProtocolError
from hetero.wire.limits import MAX_PARSED_BYTES

__all__ = ["parse", "parse_bounded"]

_Message = TypeVar("_Message", bound=Message)


def parse(kind: type[_Message], data: bytes) -> _Message:
    """Return the message in these bytes.

    Raises:
        ProtocolError: If the bytes are not a message of this kind.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    # protobuf's pure-Python implementation raises ValueError for text that is not UTF-8, and RecursionError for deep
    # nesting.
    except (DecodeError, ValueError, RecursionError) as exc:
        raise ProtocolError(
            f"{len(data)} bytes are not a valid {kind.DESCRIPTOR.name} message: {type(exc).__name__}"
        ) from None
    return message


def parse_bounded(kind: type[_Message], data: bytes) -> _Message:
    """Return the message in these bytes. The message may hold many small messages.

    Raises:
        ProtocolError: As in `parse`, and if there are more than `MAX_PARSED_BYTES`.
    """
    # Check the size before parsing. A value without content has two bytes, and takes about a hundred after parsing.
    if len(data) > MAX_PARSED_BYTES:
        raise ProtocolError(
            f"a {kind.DESCRIPTOR.name} of a request has {len(data)} bytes, at most {MAX_PARSED_BYTES} are allowed"
        )
    return parse(kind, data)

"""Protobuf messages from bytes of another process. Apart from `hetero.wire.trees`, so that launchers need no NumPy."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from hetero.errors import ProtocolError

__all__ = ["parse"]

_Message = TypeVar("_Message", bound=Message)


def parse(kind: type[_Message], data: bytes) -> _Message:
    """Return the message in these bytes.

    Raises:
        ProtocolError: If they are none.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    # The pure-Python implementation raises the others, for text that is not UTF-8 and for deep nesting.
    except (DecodeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"{len(data)} bytes are no {kind.DESCRIPTOR.name} message: {type(exc).__name__}") from None
    return message

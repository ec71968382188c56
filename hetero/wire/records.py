"""Converts records to protobuf messages and back, field by field.

A record is a dataclass. Each of its fields is sent in the message's field of the same name. A new field is therefore
added in two places, the dataclass and the .proto file. The type of a field says how it is converted:

==================  ==========================================
field of a record   field of the message
==================  ==========================================
number, text        the same
enumeration         its number
record              a message
``tuple[X, ...]``   repeated
``Mapping[...]``    a map
``X | None``        absent if the value is None
==================  ==========================================

``Annotated[TYPE, Wire(...)]`` adds a bound or another conversion. Messages come from other processes, so all bounds of
a message are checked before any of its fields is converted.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from hetero.errors import ProtocolError

__all__ = ["NOT_SENT", "Wire", "at_most", "fields_of", "printable", "record_of"]

_Record = TypeVar("_Record")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The bound of a record's field. Also its conversion, if the type of the field is not enough to know it."""

    check: Callable[[Any], object] | None = None
    """Takes the message's value. Raises `ProtocolError` if the value is not allowed."""
    encode: Callable[[Any], Any] | None = None
    """Returns the message's value for the record's value."""
    decode: Callable[[Any], Any] | None = None
    """Returns the record's value for the message's value."""
    write: Callable[[Any], Mapping[str, Any]] | None = None
    """Returns values of the message's fields for the record's value, if no field has the same name."""
    read: Callable[[Any, Any], Any] | None = None
    """Returns the record's value from the message and its containing message, if no field has the same name."""


NOT_SENT = Wire(write=lambda _value: {}, read=lambda _message, _outer: None)
"""For a field that stays in its process. The receiver gets None."""


def at_most(bound: int, what: str, *, each: int | None = None) -> Wire:
    """Return the bound of a field's length.

    Args:
        bound: Largest number of items, characters or bytes.
        what: What is counted, for the message of the error.
        each: Largest length of an item. In a map, largest length of a key or a value.
    """

    def check(value: Any) -> None:
        if len(value) > bound:
            raise ProtocolError(f"a message has {len(value)} {what}, expected at most {bound}")
        if each is not None:
            # Only a map has values. Iterating over it yields its keys.
            items = (*value, *value.values()) if hasattr(value, "values") else value
            if (longest := max(map(len, items), default=0)) > each:
                raise ProtocolError(f"one of the {what} has the length {longest}, expected at most {each}")

    return Wire(check=check)


def printable(max_chars: int, what: str) -> Wire:
    """Return the bound of a text that may be logged as it is.

    Args:
        max_chars: Largest number of characters.
        what: Name of the text, for the message of the error.
    """

    def check(text: str) -> None:
        if len(text) > max_chars or not text.isprintable():
            raise ProtocolError(f"found a {what} {text!r:.80}; expected at most {max_chars} printable characters")

    return Wire(check=check)


def fields_of(record: Any) -> dict[str, Any]:
    """Return the arguments that make a record's message. Records inside it become dicts, which protobuf accepts."""
    fields: dict[str, Any] = {}
    for column in _columns(type(record)):
        value = getattr(record, column.name)
        if column.write is not None:
            fields.update(column.write(value))
        elif value is not None:
            fields[column.name] = column.encode(value)
    return fields


def record_of(kind: type[_Record], message: Message, outer: Message | None = None) -> _Record:
    """Return the record in a message.

    Args:
        kind: The record's class.
        message: The message, which may come from any process.
        outer: The message that contains this one. Needed only if a field of the record is in that message.

    Raises:
        ProtocolError: If a value is not allowed.
    """
    columns = _columns(kind)
    for column in columns:
        if column.check is not None:
            column.check(getattr(message, column.name))
    return kind(**{column.name: column.read(message, outer) for column in columns})


class _Column(NamedTuple):
    """The conversions of one field, see `Wire`."""

    name: str
    check: Callable[[Any], object] | None
    encode: Callable[[Any], Any]
    write: Callable[[Any], Mapping[str, Any]] | None
    read: Callable[[Any, Any], Any]


def _find_columns(kind: Any) -> tuple[_Column, ...]:
    """Return the conversions of all fields of a record's class."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple([_column(field.name, hints[field.name]) for field in dataclasses.fields(kind)])


# The columns of each class are kept, because resolving its types takes longer than converting a hundred records.
_columns: Callable[[Any], tuple[_Column, ...]] = functools.cache(_find_columns)


def _column(name: str, hint: Any) -> _Column:
    """Return the conversions of the field with this name and type.

    By default, the type of the field decides how its value is converted to and from the message's field of the same
    name. A `Wire` with ``encode`` and ``decode`` replaces this conversion of the value. A `Wire` with ``write`` and
    ``read`` is for a field that the message lacks: ``write`` returns values of other fields of the message, and
    ``read`` gets the whole message.
    """
    wire = Wire()
    if typing.get_origin(hint) is Annotated:
        hint, wire = typing.get_args(hint)
    # ``X | None`` has two alternatives, any other type only itself.
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    alternatives = typing.get_args(hint) if is_union else (hint,)
    encode_type, decode_type = _conversion(next(each for each in alternatives if each is not types.NoneType))
    is_optional = types.NoneType in alternatives

    def read_field(message: Any, _outer: object) -> Any:
        if is_optional and not message.HasField(name):
            return None
        value = getattr(message, name)
        return decode_type(value, message) if wire.decode is None else wire.decode(value)

    return _Column(name, wire.check, wire.encode or encode_type, wire.write, wire.read or read_field)


def _conversion(value_type: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """Return functions that encode and decode a value of a type.

    The decoder also gets the message that contains the value. If the value is a record, one of its fields may be in
    that message (`Wire.read`).
    """
    origin = typing.get_origin(value_type)
    if origin is tuple:
        encode, decode = _conversion(typing.get_args(value_type)[0])
        return (
            lambda values: [encode(value) for value in values],
            lambda values, message: tuple([decode(value, message) for value in values]),
        )
    if origin is Mapping:
        return dict, lambda values, _message: dict(values)
    if isinstance(value_type, type) and dataclasses.is_dataclass(value_type):
        return fields_of, functools.partial(record_of, value_type)
    if issubclass(value_type, enum.Enum):
        return int, functools.partial(_member, value_type)
    return lambda value: value, lambda value, _message: value


def _member(kind: type[enum.Enum], number: int, _message: object) -> enum.Enum:
    """Return the member of an enumeration with this number."""
    try:
        return kind(number)
    except ValueError:
        raise ProtocolError(f"found the unknown {kind.__name__} {number}") from None

"""Images of Pillow as plain data, because a loaded sample is often an image."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.structure.limits import MAX_DEPTH
from hetero.errors import ConfigError

__all__ = ["ImageData", "with_images", "without_images"]

_MODES = frozenset({"1", "L", "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"})
_MODES |= {"I;16", "I;16L", "I;16B", "I;16N"}
"""Modes in which the pixels are the whole image. Images of other modes have a palette."""
_PLAIN = frozenset({bool, bytes, float, int, str, type(None)})


@dataclass(frozen=True, slots=True)
class ImageData:
    """The parts of one image."""

    mode: str
    size: tuple[int, int]
    """Width and height."""
    pixels: Any
    """As ``Image.tobytes`` returns them, uint8."""
    info: dict[Any, Any]
    """The entries of ``Image.info`` that are plain values."""


def without_images(value: Any, depth: int = 0) -> Any:
    """Return a value with `ImageData` in place of its images. Containers are searched.

    Raises:
        ConfigError: If an image has a palette.
    """
    image_module = imported("PIL.Image")
    if image_module is None:
        return value
    if isinstance(value, image_module.Image):
        if value.mode not in _MODES:
            raise ConfigError(f"an image of mode {value.mode!r}; convert it with .convert('RGB')")
        pixels = np.frombuffer(value.tobytes(), np.uint8)
        return ImageData(value.mode, value.size, pixels, _plain_info(value.info))
    return _mapped(value, without_images, depth)


def with_images(value: Any, depth: int = 0) -> Any:
    """Return a value with images in place of its `ImageData`.

    Raises:
        ValueError: If pixels and size do not fit together.
    """
    if type(value) is ImageData:
        from PIL import Image

        image = Image.frombytes(value.mode, value.size, value.pixels)
        image.info = value.info
        return image
    return _mapped(value, with_images, depth)


def _plain_info(info: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries with plain values. Texts and fractions of Pillow's own classes become Python's own types."""
    found: dict[Any, Any] = {}
    for key, value in info.items():
        plain = tuple(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
        # A tuple is kept if all its items are plain.
        parts = plain if isinstance(plain, tuple) else (plain,)
        if isinstance(key, str) and _PLAIN.issuperset(map(type, parts)):
            found[str(key)] = plain
    return found


def _plain(value: Any) -> Any:
    """Return a text or a fraction of Pillow's own classes as a str or float. Return other values unchanged."""
    # In PNG files, Pillow's texts are of a subclass of str. `str.__str__` returns a plain str and calls no code of the
    # subclass.
    if isinstance(value, str):
        return str.__str__(value)
    if type(value).__name__ == "IFDRational":
        return float(value)
    return value


def _mapped(value: Any, function: Callable[[Any, int], Any], depth: int) -> Any:
    """Return a copy of a container, with the function applied to each value in it. Return other values unchanged.

    Args:
        value: The value.
        function: `with_images` or `without_images`. Its second argument is the depth of the value that it gets.
        depth: Number of containers around ``value``.
    """
    kind = type(value)
    if depth >= MAX_DEPTH:
        return value
    if kind is dict or kind is OrderedDict:
        return kind((key, function(item, depth + 1)) for key, item in value.items())
    if kind is list or kind is tuple:
        # Return a container of plain values at once. A call for each of a million numbers would take a second.
        if _PLAIN.issuperset(map(type, value)):
            return value
        return kind([function(item, depth + 1) for item in value])
    # A namedtuple. Do not call its class, because the user may have changed how it is made.
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return tuple.__new__(kind, [function(item, depth + 1) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and kind is not ImageData:
        items = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: function(item, depth + 1) for name, item in items.items()}
        # Keep the user's object if nothing in it has changed, because a copy lacks attributes that are not fields.
        if all(changed[name] is item for name, item in items.items()):
            return value
        # Set the fields directly, because the user's __init__ and __post_init__ have already run once.
        made = object.__new__(kind)
        for name, item in changed.items():
            object.__setattr__(made, name, item)
        return made
    return value

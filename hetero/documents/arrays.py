"""Reads arrays from files in NumPy's format, without NumPy's own reader, which allocates what a file states."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["array_of"]


def array_of(content: bytes) -> npt.NDArray[Any]:
    """Return the array of one dimension in a ``.npy`` file. It shares the memory of ``content``.

    Raises:
        ValueError: If the bytes are something else, or the array holds Python objects.
    """
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read_head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_head(file)
    size = len(content) - file.tell()
    if dtype.hasobject or not dtype.itemsize or shape != (size // dtype.itemsize,):
        raise ValueError(f"the array is {dtype} {shape} in {size} bytes, expected one dimension of plain numbers")
    return np.frombuffer(content, dtype, offset=file.tell())

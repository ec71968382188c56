"""States of iterators as bytes. They are sent to endpoints, so only plain values are allowed, and no code is run."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from hetero.batches.imported import imported
from hetero.errors import ConfigError

__all__ = ["MAX_STATE_BYTES", "decode_state", "encode_state"]

MAX_STATE_BYTES = 2**20
"""Largest state of a lane, compressed. It bounds the memory that a peer can demand. No measurement chose it: a state
that counts rows takes about 100 bytes, and one that holds a shuffle buffer of samples does not fit."""


def encode_state(state: object, *, max_bytes: int = MAX_STATE_BYTES) -> bytes:
    """Return a state as bytes. Equal states give equal bytes.

    Args:
        max_bytes: Largest size of the result. 0 for no limit.
        state: None, bool, int, float, str, bytes, arrays, tensors, and lists, tuples and dicts of these.

    Raises:
        ConfigError: If the state has other values, or is too large.
    """
    try:
        content = zlib.compress(json.dumps(_plain(state), separators=(",", ":")).encode(), 1)
    except ConfigError:
        raise
    # An integer of thousands of digits, a tensor of bfloat16, or a list that holds itself.
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"the state of the iterator cannot be saved: {error}") from error
    if 0 < max_bytes < len(content):
        raise ConfigError(f"the state of a lane takes {len(content)} bytes, at most {max_bytes} are allowed")
    return content


def decode_state(content: bytes, *, max_bytes: int = 16 * MAX_STATE_BYTES) -> Any:
    """Return the state that `encode_state` made these bytes of. Unpacked, it may take ``max_bytes``, or any size if 0.

    Raises:
        ConfigError: If the bytes are damaged.
    """
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(content, max_bytes)
        if not unpacker.eof:
            raise ValueError("it is cut off, or too long")
        return _restored(json.loads(text))
    # NumPy raises SyntaxError for some texts that name none.
    except (ValueError, TypeError, LookupError, SyntaxError, RecursionError, zlib.error) as error:
        raise ConfigError(f"the state of a lane is damaged: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value of JSON. What JSON lacks becomes a list whose first item is a text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return ["dict", *([_plain(key), _plain(item)] for key, item in value.items())]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *map(_plain, value)]
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    torch = imported("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return ["tensor", _plain(value.detach().cpu().numpy())]
    # The text of a dtype with fields lacks their names.
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return [kind, value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]
    for plain in (int, float, str):  # a subclass, such as an enum
        if isinstance(value, plain):
            return plain(value)
    raise ConfigError(
        f"the state of the iterator has a {type(value).__name__}, which cannot be saved\n"
        "  Return plain values, arrays and tensors from state_dict()."
    )


def _restored(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "dict":
        return {_restored(key): _restored(item) for key, item in items}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(_restored, items))
    if kind == "bytes":
        return base64.b64decode(items[0])
    if kind == "tensor":
        torch = imported("torch")
        array = _restored(items[0])
        return array if torch is None else torch.from_numpy(array)
    if kind not in ("array", "scalar"):
        raise ValueError(f"it has the unknown kind {kind!r:.40}")
    dtype, shape, content = items
    found = np.frombuffer(base64.b64decode(content), np.dtype(dtype)).reshape(shape).copy()
    return found if kind == "array" else found[()]

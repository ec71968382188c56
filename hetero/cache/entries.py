"""One sample as bytes in a file: a head, the structure of the value, and the bytes of its leaves.

The head has a digest of the rest of the entry, of the sample's index, and of the fingerprint
(`hetero.cache.fingerprint`). So an entry is rejected if it is truncated or damaged, or belongs to another sample or
data set. Only the folder's permissions protect the files from other users. The digest does not.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import xxhash

from hetero.batches.structure.conversion import flatten, unflatten
from hetero.cache.images import with_images, without_images
from hetero.errors import ConfigError, ProtocolError
from hetero.wire.limits import Limits
from hetero.wire.trees import decode_structure, encode_structure

__all__ = ["DamagedEntryError", "EncodedSample", "read_entry"]

_HEAD = struct.Struct("<8s16sIQ")
_MAGIC = b"hcache1\n"
_LIMITS = Limits()


class DamagedEntryError(Exception):
    """An entry does not hold the bytes that were written for this sample."""


class EncodedSample:
    """A loaded sample as an entry.

    Args:
        value: The result of ``load``.
        index: Index of the sample, at least 0.
        fingerprint: See `hetero.cache.fingerprint`.

    Raises:
        ConfigError: If the value cannot be kept. The message names the part of the value.
    """

    def __init__(self, value: Any, index: int, fingerprint: bytes) -> None:
        self._tree, leaves = flatten(without_images(value), _LIMITS)
        self._leaves = leaves
        structure = encode_structure(self._tree, leaves)
        if len(structure) > _LIMITS.max_header_bytes:
            raise ConfigError(f"its keys, numbers and short strings take {len(structure)} bytes; use arrays instead")
        payload = [leaf.data for leaf in leaves if leaf.nbytes]
        payload_bytes = sum(map(len, payload))
        hasher = _hasher(index, fingerprint, structure)
        for piece in payload:
            hasher.update(piece)
        # The sizes in the head say where the structure ends and where the entry ends.
        head = _HEAD.pack(_MAGIC, hasher.digest(), len(structure), payload_bytes)
        self.pieces: list[Any] = [head + structure, *payload]
        """Buffers that make the entry, one after the other."""
        self.nbytes: int = len(self.pieces[0]) + payload_bytes
        """Bytes of the entry."""

    def value(self) -> Any:
        """Return the value as `read_entry` returns it, in memory that the user's value does not share."""
        copies = []
        for leaf in self._leaves:
            # This is faster than a bytearray, whose memory is cleared first.
            buffer = np.empty(leaf.nbytes, np.uint8).data
            buffer[:] = leaf.data
            copies.append(leaf.filled(buffer))
        return with_images(unflatten(self._tree, copies))


def read_entry(descriptor: int, offset: int, nbytes: int, *, index: int, fingerprint: bytes) -> Any:
    """Return the value in an entry, in new memory.

    Args:
        descriptor: The file.
        offset: Where the entry begins.
        nbytes: Size of the entry.
        index: Index of the wanted sample.
        fingerprint: The wanted data set.

    Raises:
        DamagedEntryError: If the file does not have this sample's entry at this place.
        OSError: If the file cannot be read.
    """
    try:
        return _read(descriptor, offset, nbytes, index, fingerprint)
    except (ConfigError, OverflowError, ProtocolError, ValueError, struct.error) as error:
        raise DamagedEntryError(f"{type(error).__name__}: {error}") from error


def _read(descriptor: int, offset: int, nbytes: int, index: int, fingerprint: bytes) -> Any:
    """Return the value in an entry, see `read_entry`. If the entry is damaged, raise any exception."""
    # Check the size first. So a damaged size does not make this process allocate more memory than the file has bytes.
    if not _HEAD.size <= nbytes <= os.fstat(descriptor).st_size - offset:
        raise DamagedEntryError("the file ends before the entry")
    magic, digest, structure_bytes, payload_bytes = _HEAD.unpack(os.pread(descriptor, _HEAD.size, offset))
    is_whole = magic == _MAGIC and _HEAD.size + structure_bytes + payload_bytes == nbytes
    if not is_whole or structure_bytes > _LIMITS.max_header_bytes:
        raise DamagedEntryError("the head is not that of an entry of this size")
    offset += _HEAD.size
    structure = os.pread(descriptor, structure_bytes, offset)
    tree, shapes = decode_structure(structure, _LIMITS)
    if sum([shape.nbytes for shape in shapes]) != payload_bytes:
        raise DamagedEntryError("the leaves do not add up to the payload")
    hasher = _hasher(index, fingerprint, structure)
    leaves = []
    offset += structure_bytes
    for shape in shapes:
        # This is faster than a bytearray, whose memory is cleared first.
        buffer = np.empty(shape.nbytes, np.uint8).data
        num_filled = 0
        while num_filled < shape.nbytes:
            # preadv may read fewer bytes than the buffer has. At the end of the file, it reads 0 bytes.
            num_read = os.preadv(descriptor, [buffer[num_filled:]], offset)
            if not num_read:
                raise DamagedEntryError("the file ends within the entry")
            num_filled += num_read
            offset += num_read
        hasher.update(buffer)
        leaves.append(shape.filled(buffer))
    if hasher.digest() != digest:
        raise DamagedEntryError("the digest differs")
    return with_images(unflatten(tree, leaves))


def _hasher(index: int, fingerprint: bytes, structure: bytes) -> xxhash.xxh3_128:
    """Return the hasher of an entry. It has the index, the data set and the structure, and still needs the payload."""
    # A fast hash is enough, because it protects only against damage. The folder's permissions protect against attacks.
    hasher = xxhash.xxh3_128(fingerprint)
    hasher.update(struct.pack("<qI", index, len(structure)))
    hasher.update(structure)
    return hasher

"""Blocks of payload made smaller for networks that are slower than the codec; the packages may be missing.

Every leaf is cut into blocks of `BLOCK_BYTES`. A block that shrinks travels compressed, any other as it is. Blocks are
independent of each other, so that a receiver needs one of them as extra memory, and undoes one while the kernel
receives the next. lz4 and zstandard give up the interpreter's lock meanwhile.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np

from hetero.errors import ConfigError, ProtocolError
from hetero.wire.limits import BLOCK_BYTES
from hetero.wire.proto import data_pb2 as pb

__all__ = [
    "COMPRESSIONS",
    "BlockReader",
    "ChecksumError",
    "Codec",
    "compress_leaf",
    "compression_from_proto",
    "compression_to_proto",
    "is_installed",
    "load_codec",
    "package_of",
    "raw_block_sizes",
]

_PACKAGES = {"lz4": ("lz4", "lz4.block"), "zstd": ("zstandard", "zstandard")}  # what to install, what to import
_CODES = {"lz4": pb.LZ4, "zstd": pb.ZSTD}
_NAMES: dict[int, str] = {code: name for name, code in _CODES.items()}
COMPRESSIONS = tuple(_CODES)
"""What `hetero.torch.DataLoader` takes."""

_MIN_BLOCK_BYTES = 1024  # less is a packet anyway
_MIN_GAIN = 32  # a block that does not shrink by one part of so many is not worth undoing
_ZSTD_LEVEL = 1  # photographs: 0.5 GB/s; level 3 halves that for 8 % fewer bytes


class ChecksumError(ProtocolError):
    """A batch is not what was sent; asking again may help."""


class Codec(Protocol):
    """One codec. For one thread at a time."""

    def compress(self, block: memoryview) -> bytes:
        """Return the block in fewer bytes, or in more."""

    def decompress(self, data: memoryview, room: memoryview) -> None:
        """Undo `compress` into ``room``, never beyond.

        Raises:
            ChecksumError: If ``data`` is damaged or does not give exactly as many bytes.
        """


class _Lz4:
    def __init__(self, module: Any) -> None:
        self._block = module

    def compress(self, block: memoryview) -> bytes:
        compressed: bytes = self._block.compress(block, store_size=False)
        return compressed

    def decompress(self, data: memoryview, room: memoryview) -> None:
        try:
            # The size bounds what is allocated and written, whatever the data say.
            block = self._block.decompress(data, uncompressed_size=len(room))
        except self._block.LZ4BlockError as error:
            raise _damaged(data, room) from error
        if len(block) != len(room):
            raise _damaged(data, room)
        room[:] = block  # there is no call that decompresses in place; this takes a tenth of its time


class _Zstd:
    def __init__(self, module: Any) -> None:
        self._module = module

    # Only one of them is made, in 50 us: each batch has its codec, which goes one way. Kept for its thread a compressor
    # would keep its tables too: 1.3 MiB for each of an endpoint's connections.

    @cached_property
    def _compressor(self) -> Any:
        return self._module.ZstdCompressor(level=_ZSTD_LEVEL)

    @cached_property
    def _decompressor(self) -> Any:
        # A frame names the memory that it wants for its window: 128 MiB, if nobody objects.
        return self._module.ZstdDecompressor(max_window_size=BLOCK_BYTES)

    def compress(self, block: memoryview) -> bytes:
        compressed: bytes = self._compressor.compress(block)
        return compressed

    def decompress(self, data: memoryview, room: memoryview) -> None:
        # Not `ZstdDecompressor.decompress`, which allocates what the frame says.
        try:
            with self._decompressor.stream_reader(data) as stream:
                is_whole = stream.readinto(room) == len(room) and not stream.read(1)
        except self._module.ZstdError as error:
            raise _damaged(data, room) from error
        if not is_whole:
            raise _damaged(data, room)


_MAKERS: dict[str, Callable[[Any], Codec]] = {"lz4": _Lz4, "zstd": _Zstd}


def _damaged(data: memoryview, room: memoryview) -> ChecksumError:
    return ChecksumError(f"a compressed block arrived damaged: its {len(data)} bytes do not give {len(room)}")


@cache
def _module(name: str) -> Any:
    """Return the module of a codec, None if it is not installed."""
    try:
        return importlib.import_module(_PACKAGES[name][1])  # allowed: a name of ours
    except ImportError:
        return None


def is_installed(name: str) -> bool:
    """Tell whether `load_codec` has what it needs."""
    return _module(name) is not None


def load_codec(name: str) -> Codec:
    """Return a codec for one thread.

    Args:
        name: One of `COMPRESSIONS`.

    Raises:
        ConfigError: If its package is not installed here.
    """
    module = _module(name)
    if module is None:
        raise ConfigError(
            f"compression={name!r} needs the package {_PACKAGES[name][0]}, which is not installed here\n"
            "  pip install lz4 zstandard on every host, or leave compression out."
        )
    return _MAKERS[name](module)


def package_of(name: str) -> str:
    """Return what to install for one of `COMPRESSIONS`."""
    return _PACKAGES[name][0]


def compression_to_proto(name: str | None) -> pb.Compression:
    """Return the message's value for one of `COMPRESSIONS`, or None.

    Raises:
        ConfigError: If it is something else.
    """
    if name is None:
        return pb.COMPRESSION_NONE
    if name not in COMPRESSIONS:
        raise ConfigError(f"compression is {name!r}, expected None or one of {', '.join(COMPRESSIONS)}")
    return _CODES[name]


def compression_from_proto(code: int) -> str | None:
    """Undo `compression_to_proto`.

    Raises:
        ProtocolError: If the code is unknown.
    """
    if code == pb.COMPRESSION_NONE:
        return None
    if code not in _NAMES:
        raise ProtocolError(f"a message names the unknown compression {code}")
    return _NAMES[code]


def raw_block_sizes(leaf_nbytes: int) -> list[int]:
    """Return the sizes of a leaf's blocks, in bytes."""
    num_full, rest = divmod(leaf_nbytes, BLOCK_BYTES)
    return [BLOCK_BYTES] * num_full + ([rest] if rest else [])


def compress_leaf(data: memoryview, codec: Codec) -> tuple[list[memoryview], list[int]]:
    """Return a leaf's blocks as they travel, and of each its size if it is compressed, else 0."""
    pieces: list[memoryview] = []
    sizes: list[int] = []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        size = 0
        if len(block) >= _MIN_BLOCK_BYTES:
            compressed = codec.compress(block)
            if len(compressed) <= len(block) - len(block) // _MIN_GAIN:
                block, size = memoryview(compressed), len(compressed)
        pieces.append(block)
        sizes.append(size)
    return pieces, sizes


class BlockReader:
    """Receives the blocks of one payload, one after the other, into where they belong.

    Args:
        codec: Undoes them.
        sizes: Of each block, as `compress_leaf` returns them; checked against what the block is to become.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        self._codec = codec
        self._sizes = sizes
        self._index = 0  # of the block that is coming
        self._received = 0  # bytes of it
        self._scratch = memoryview(b"")

    def room(self, target: memoryview) -> memoryview:
        """Return where the next bytes go, given where the block that is coming belongs; may allocate a block."""
        size = self._sizes[self._index]
        if size > len(self._scratch):  # the first that is compressed
            self._scratch = np.empty(max(self._sizes), np.uint8).data
        return (self._scratch[:size] if size else target)[self._received :]

    def filled(self, nbytes: int, target: memoryview) -> int:
        """Take note that so many bytes of the `room` are there; return how many of the target are now.

        Raises:
            ChecksumError: If the block is complete and damaged.
        """
        self._received += nbytes
        size = self._sizes[self._index]
        if self._received < (size or len(target)):
            return 0
        if size:
            self._codec.decompress(self._scratch[:size], target)
        self._index += 1
        self._received = 0
        return len(target)

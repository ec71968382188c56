"""Compression of payload for networks that are slower than the codec. The packages of the codecs are optional.

Every leaf is cut into blocks of `BLOCK_BYTES`. A block that shrinks is sent compressed, any other block as it is.
Blocks are independent of each other. A receiver therefore needs only one block as extra memory, and decompresses a
block while the kernel receives the next one. lz4 and zstandard release the interpreter's lock while they work.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
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

# For each codec: the package to install, and the module to import.
_PACKAGES = {"lz4": ("lz4", "lz4.block"), "zstd": ("zstandard", "zstandard")}
_CODES: dict[str | None, pb.Compression] = {None: pb.COMPRESSION_NONE, "lz4": pb.LZ4, "zstd": pb.ZSTD}
_NAMES: dict[int, str | None] = {code: name for name, code in _CODES.items()}
COMPRESSIONS = tuple(_PACKAGES)
"""Values of the ``compression`` argument of `hetero.torch.DataLoader`."""

# A block is sent compressed only if it shrinks by at least 1/32.
_MIN_GAIN = 32
# Level 1 compresses photographs at 0.5 GB/s. Level 3 has half this speed and gives 8 % fewer bytes.
_ZSTD_LEVEL = 1


class ChecksumError(ProtocolError):
    """A batch arrived damaged. Requesting it again may help."""


class Codec(Protocol):
    """A codec. For one thread at a time."""

    def compress(self, block: memoryview) -> bytes:
        """Return the compressed block, which may be larger than the block."""

    def decompress(self, data: memoryview, room: memoryview) -> None:
        """Decompress a block into ``room``, and never write beyond its end.

        Raises:
            ChecksumError: If ``data`` is damaged or does not fill ``room`` exactly.
        """


class _Lz4:
    def __init__(self, module: Any) -> None:
        self._block = module

    def compress(self, block: memoryview) -> bytes:
        compressed: bytes = self._block.compress(block, store_size=False)
        return compressed

    def decompress(self, data: memoryview, room: memoryview) -> None:
        """See `Codec.decompress`."""
        try:
            # The given size bounds the memory that is allocated and written, even if the data contain another size.
            block = self._block.decompress(data, uncompressed_size=len(room))
        except self._block.LZ4BlockError as error:
            raise _damaged(data, room) from error
        if len(block) != len(room):
            raise _damaged(data, room)
        # lz4 cannot decompress in place, and this copy takes a tenth of the decompression time.
        room[:] = block


class _Zstd:
    def __init__(self, module: Any) -> None:
        self._module = module

    # Each batch has its own codec, which either compresses or decompresses. So only one of the two objects is made,
    # when it is first used. This takes 50 us. If each thread kept a compressor instead, each connection of an endpoint
    # would need 1.3 MiB for tables.

    @cached_property
    def _compressor(self) -> Any:
        return self._module.ZstdCompressor(level=_ZSTD_LEVEL)

    @cached_property
    def _decompressor(self) -> Any:
        # The frame contains the size of the window, for which memory is allocated. Without this bound, a frame could
        # demand 128 MiB.
        return self._module.ZstdDecompressor(max_window_size=BLOCK_BYTES)

    def compress(self, block: memoryview) -> bytes:
        compressed: bytes = self._compressor.compress(block)
        return compressed

    def decompress(self, data: memoryview, room: memoryview) -> None:
        """See `Codec.decompress`."""
        # Do not use `ZstdDecompressor.decompress`, because it allocates the size that the frame contains.
        try:
            with self._decompressor.stream_reader(data) as stream:
                # The data must fill ``room``, and nothing may be left.
                is_whole = stream.readinto(room) == len(room) and not stream.read(1)
        except self._module.ZstdError as error:
            raise _damaged(data, room) from error
        if not is_whole:
            raise _damaged(data, room)


def _damaged(data: memoryview, room: memoryview) -> ChecksumError:
    return ChecksumError(f"a compressed block arrived damaged: its {len(data)} bytes do not give {len(room)}")


@cache
def _module(name: str) -> Any:
    """Return the module of a codec, or None if it is not installed."""
    try:
        return importlib.import_module(_PACKAGES[name][1])  # allowed: the name is one of _PACKAGES
    except ImportError:
        return None


def is_installed(name: str) -> bool:
    """Return whether the package that `load_codec` needs is installed."""
    return _module(name) is not None


def load_codec(name: str) -> Codec:
    """Return a codec for one thread.

    Args:
        name: One of `COMPRESSIONS`.

    Raises:
        ConfigError: If the codec's package is not installed here.
    """
    module = _module(name)
    if module is None:
        raise ConfigError(
            f"compression={name!r} needs the package {_PACKAGES[name][0]}, which is not installed here\n"
            "  pip install lz4 zstandard on every host, or leave compression out."
        )
    return _Lz4(module) if name == "lz4" else _Zstd(module)


def package_of(name: str) -> str:
    """Return the package to install for one of `COMPRESSIONS`."""
    return _PACKAGES[name][0]


def compression_to_proto(name: str | None) -> pb.Compression:
    """Return the protobuf value for one of `COMPRESSIONS` or for None.

    Raises:
        ConfigError: If the name is not one of these.
    """
    if name not in _CODES:
        raise ConfigError(f"compression is {name!r}, expected None or one of {', '.join(COMPRESSIONS)}")
    return _CODES[name]


def compression_from_proto(code: int) -> str | None:
    """Return the name for a protobuf value, or None for no compression.

    Raises:
        ProtocolError: If the code is unknown.
    """
    if code not in _NAMES:
        raise ProtocolError(f"a message names the unknown compression {code}")
    return _NAMES[code]


def raw_block_sizes(leaf_nbytes: int) -> list[int]:
    """Return the sizes of a leaf's blocks, in bytes."""
    num_full, rest = divmod(leaf_nbytes, BLOCK_BYTES)
    return [BLOCK_BYTES] * num_full + ([rest] if rest else [])


def compress_leaf(data: memoryview, codec: Codec) -> tuple[list[memoryview], list[int]]:
    """Return a leaf's blocks as they are sent, and for each block its size if it is compressed, else 0."""
    pieces: list[memoryview] = []
    sizes: list[int] = []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        compressed = codec.compress(block)
        # Send the block compressed only if at least 1/_MIN_GAIN of its bytes is saved.
        is_worthwhile = _MIN_GAIN * (len(block) - len(compressed)) >= len(block)
        pieces.append(memoryview(compressed) if is_worthwhile else block)
        sizes.append(len(compressed) if is_worthwhile else 0)
    return pieces, sizes


class BlockReader:
    """Receives the blocks of one payload in order, and writes them uncompressed into the leaves.

    Args:
        codec: Decompresses the blocks.
        sizes: Size of each block as `compress_leaf` returns it, checked to be less than the uncompressed size.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        self._codec = codec
        self._sizes = sizes
        self._index = 0  # index of the arriving block
        self._received = 0  # bytes of this block that have arrived
        self._scratch = memoryview(b"")  # memory for one compressed block, allocated when it is needed

    def room(self, target: memoryview) -> memoryview:
        """Return the buffer for the next bytes of the block that fills ``target``. May allocate memory for a block."""
        # A block of size 0 is not compressed, and is received directly into ``target``.
        size = self._sizes[self._index]
        if size > len(self._scratch):  # at the first compressed block
            self._scratch = np.empty(max(self._sizes), np.uint8).data
        return (self._scratch[:size] if size else target)[self._received :]

    def filled(self, nbytes: int, target: memoryview) -> int:
        """Record that this number of bytes was received into the `room`.

        Return how many bytes were written to ``target``: 0 until the block is complete, then the whole block.

        Raises:
            ChecksumError: If the block is complete and damaged.
        """
        self._received += nbytes
        size = self._sizes[self._index]
        # A size of 0 means that the block is not compressed. Its length is then that of ``target``.
        if self._received < (size or len(target)):
            return 0
        if size:
            self._codec.decompress(self._scratch[:size], target)
        self._index += 1
        self._received = 0
        return len(target)

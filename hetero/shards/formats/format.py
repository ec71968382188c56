"""What a format of shards must offer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from hetero.shards.files import ShardFile

__all__ = ["Block", "BlockRows", "Format", "OpenShard", "Scanned"]


class Scanned(NamedTuple):
    """What `Format.scan` finds out about a block."""

    num_rows: int
    end: int
    """Byte of the content after the block. The block begins where the one before it ends, the first one at 0."""
    memory_bytes: int
    """Memory that its rows take when they are read, about."""


class BlockRows(Sequence[Any]):
    """The rows of one block. Each access makes a new row, so the caller may change it."""

    def take(self, places: Sequence[int]) -> list[Any]:
        """Return the rows at some places. A range has a step of 1."""
        return [self[place] for place in places]


class Block(NamedTuple):
    """The rows of one block, in memory."""

    rows: BlockRows
    nbytes: int
    """Memory that the block takes, about."""


class OpenShard(Protocol):
    """A shard that is open for reading in this process."""

    def block(self, number: int, begin: int, end: int) -> Block:
        """Read a block: its number in the shard, and its bytes ``[begin, end)``.

        Raises:
            ValueError: If the bytes are not of this format. Libraries raise other errors too.
        """
        ...


class Format(Protocol):
    """How the files of one format are read."""

    needs_scan: bool
    """Whether `scan` reads all bytes of a file. If not, a data set needs no index file."""

    def scan(self, path: str) -> Iterator[Scanned]:
        """Yield the blocks of a file in their order. Read it to its end, and check that it is whole.

        Raises:
            ValueError: If the file is cut off or damaged. Libraries raise other errors too.
        """
        ...

    def open(self, file: ShardFile) -> OpenShard:
        """Open a shard. Each process opens it anew.

        Raises:
            ConfigError: If it lacks a column that the user wants.
        """
        ...

"""JSON Lines, plain or compressed with gzip or zstd. A block is a run of lines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import Any, overload

from hetero.shards.files import ShardFile, open_content
from hetero.shards.formats.format import Block, BlockRows, Scanned

__all__ = ["JsonLines"]

# A row costs the reading of its block if the rows come in no order. 64 KiB of a file in memory take 10 us, as the
# parsing of one row does.
_BLOCK_BYTES = 64 * 1024


class JsonLines:
    """Each line that is not blank is a row, an object of JSON.

    Args:
        columns: Keys to keep. None for all.
    """

    needs_scan = True

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self._columns = columns

    def scan(self, path: str) -> Iterator[Scanned]:
        """Yield the blocks. Parse the first row of each, because another file has lines too."""
        num_rows = end = begin = 0
        with open_content(path) as lines:
            for line in lines:
                if not line.isspace():
                    if not num_rows:
                        _check_row(line, end)
                    num_rows += 1
                end += len(line)
                if end - begin >= _BLOCK_BYTES and num_rows:
                    yield Scanned(num_rows, end, end - begin)
                    num_rows, begin = 0, end
        if num_rows:
            yield Scanned(num_rows, end, end - begin)

    def open(self, file: ShardFile) -> _OpenJsonLines:
        """Open a shard, whose file has the content without compression."""
        return _OpenJsonLines(file, self._columns)


class _OpenJsonLines:
    def __init__(self, file: ShardFile, columns: Sequence[str] | None) -> None:
        self._file = file
        self._columns = columns

    def block(self, number: int, begin: int, end: int) -> Block:
        lines = self._file.read(begin, end).split(b"\n")
        # A line takes about 60 bytes beside its text.
        rows = _Lines([line for line in lines if line and not line.isspace()], self._columns)
        return Block(rows, end - begin + 60 * len(rows))


class _Lines(BlockRows):
    """The rows of some lines, each parsed when it is indexed."""

    def __init__(self, lines: list[bytes], columns: Sequence[str] | None) -> None:
        self._lines = lines
        self._columns = columns

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Any: ...
    def __getitem__(self, place: Any) -> Any:
        # A text, because json searches bytes for their encoding first.
        text = self._lines[place].removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass")
        row = json.loads(text)
        return row if self._columns is None else {name: row[name] for name in self._columns}


def _check_row(line: bytes, begin: int) -> None:
    """Raise an error unless a line is a row."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"the line at byte {begin} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"the line at byte {begin} is a {type(row).__name__}, expected an object with keys")

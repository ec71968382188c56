"""ArrayRecord files, read with the package ``array_record``. A block is a run of records."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, overload

from hetero.errors import ConfigError
from hetero.shards.files import ShardFile
from hetero.shards.formats.format import Block, BlockRows, Scanned
from hetero.shards.stores import is_url

__all__ = ["ArrayRecord"]

# The library decompresses records in groups, whose size the writer chose. Its default is 65,536.
_BLOCK_ROWS = 256


class ArrayRecord:
    """Each record is a row: bytes.

    Args:
        columns: None, because records lack columns.
    """

    needs_scan = False

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        if columns is not None:
            raise ConfigError("records of ArrayRecord files have no columns. Leave columns= out")

    def scan(self, path: str) -> Iterator[Scanned]:
        """Yield the blocks, from the footer."""
        if is_url(path):
            raise ConfigError(f"{path}: ArrayRecord files must lie on the host, because their library reads paths")
        size = os.stat(path).st_size
        num_rows = _open_reader(path).num_records()
        for first in range(0, num_rows, _BLOCK_ROWS):
            rows = min(_BLOCK_ROWS, num_rows - first)
            # The library itself knows where records are.
            yield Scanned(rows, size, size * rows // num_rows)

    def open(self, file: ShardFile) -> _OpenArrayRecord:
        """Open a shard."""
        return _OpenArrayRecord(file)


class _OpenArrayRecord:
    def __init__(self, file: ShardFile) -> None:
        self._reader = _open_reader(file.path)
        self._num_rows = self._reader.num_records()

    def block(self, number: int, begin: int, end: int) -> Block:
        first = number * _BLOCK_ROWS
        rows = self._reader.read(list(range(first, min(first + _BLOCK_ROWS, self._num_rows))))
        return Block(_Records(rows), sum(map(len, rows)))


class _Records(BlockRows):
    """Records that were read together."""

    def __init__(self, records: list[bytes]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Any: ...
    def __getitem__(self, place: Any) -> Any:
        return self._records[place]


def _open_reader(path: str) -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise ConfigError(f"{path} needs the package array-record: pip install hetero[array-record]") from error
    return array_record_module.ArrayRecordReader(path)

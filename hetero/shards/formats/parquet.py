"""Parquet files, read with pyarrow. A block is a row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hetero.shards.files import ShardFile
from hetero.shards.formats.format import Block, Scanned
from hetero.shards.formats.tables import TableRows, check_columns, import_pyarrow
from hetero.shards.stores import open_binary

__all__ = ["Parquet"]


class Parquet:
    """Each row is a dictionary of its columns.

    Args:
        columns: Names of columns to read. None for all.
    """

    needs_scan = False

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self._columns = columns

    def scan(self, path: str) -> Iterator[Scanned]:
        """Yield the row groups, from the footer."""
        with open_binary(path) as file:
            metadata = import_pyarrow("pyarrow.parquet").read_metadata(file)
        end = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(place) for place in range(group.num_columns)]
            end = max([end, *(_begin_of(chunk) + chunk.total_compressed_size for chunk in chunks)])
            yield Scanned(group.num_rows, end, group.total_byte_size)

    def open(self, file: ShardFile) -> _OpenParquet:
        """Open a shard."""
        return _OpenParquet(file, self._columns)


class _OpenParquet:
    def __init__(self, file: ShardFile, columns: Sequence[str] | None) -> None:
        # Without a memory map, because a process that reads a mapped file that was cut off is killed.
        self._file = import_pyarrow("pyarrow.parquet").ParquetFile(file.path, memory_map=False, pre_buffer=False)
        self._columns = check_columns(columns, self._file.schema_arrow.names, file.path)

    def block(self, number: int, begin: int, end: int) -> Block:
        # An endpoint has one CPU, so pyarrow's threads would only take turns.
        table = self._file.read_row_group(number, columns=self._columns, use_threads=False)
        batches = table.to_batches()
        # A table of one batch takes longer to make rows of than the batch.
        return Block(TableRows(batches[0] if len(batches) == 1 else table), table.nbytes)


def _begin_of(chunk: Any) -> int:
    """Return the first byte of a column chunk. The dictionary page, if there is one, comes before the data."""
    return int(chunk.dictionary_page_offset or chunk.data_page_offset)

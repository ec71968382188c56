"""Arrow files and streams, as Hugging Face's ``save_to_disk`` writes them. A block is a record batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hetero.shards.files import ShardFile
from hetero.shards.formats.format import Block, Scanned
from hetero.shards.formats.tables import TableRows, check_columns, import_pyarrow
from hetero.shards.stores import is_url, open_binary

__all__ = ["Arrow"]

_FILE_MAGIC = b"ARROW1"
# "IPC File Format" of the Arrow specification: the magic number, two bytes of padding, and then the same messages as in
# a stream.
_FILE_HEADER_BYTES = 8
_END_MARKS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""What follows the last message: the mark of today, and that of versions before 0.15."""


class Arrow:
    """Each row is a dictionary of its columns.

    Args:
        columns: Names of columns to read. None for all.
    """

    needs_scan = False

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self._columns = columns

    def scan(self, path: str) -> Iterator[Scanned]:
        """Yield the record batches. If they are not compressed, little more than their heads is read from the disk."""
        ipc = import_pyarrow("pyarrow.ipc")
        pyarrow = import_pyarrow("pyarrow")
        # A map reads only the pages that are looked at.
        with pyarrow.PythonFile(open_binary(path)) if is_url(path) else pyarrow.memory_map(path) as source:
            schema = _read_schema(ipc, source)
            while True:
                end = source.tell()
                message = _next_message(ipc, source)
                if message is None:
                    break
                batch = ipc.read_record_batch(message, schema)
                yield Scanned(batch.num_rows, source.tell(), batch.nbytes)
            source.seek(end)
            if not source.read(max(map(len, _END_MARKS))).startswith(_END_MARKS):
                raise ValueError(f"the file ends at byte {end} without the mark of its end, so it was cut off")

    def open(self, file: ShardFile) -> _OpenArrow:
        """Open a shard."""
        return _OpenArrow(file, self._columns)


class _OpenArrow:
    def __init__(self, file: ShardFile, columns: Sequence[str] | None) -> None:
        self._file = file
        self._pyarrow = import_pyarrow("pyarrow")
        self._ipc = import_pyarrow("pyarrow.ipc")
        with self._pyarrow.OSFile(file.path) as source:
            self._schema = _read_schema(self._ipc, source)
            self._begin = int(source.tell())
        self._columns = check_columns(columns, self._schema.names, file.path)

    def block(self, number: int, begin: int, end: int) -> Block:
        # A copy, because a process that reads a mapped file that was cut off is killed.
        content = self._pyarrow.BufferReader(self._file.read(max(begin, self._begin), end))
        batch = self._ipc.read_record_batch(_next_message(self._ipc, content), self._schema)
        return Block(TableRows(batch if self._columns is None else batch.select(self._columns)), batch.nbytes)


def _read_schema(ipc: Any, source: Any) -> Any:
    """Return the schema at the beginning of a file or stream, and leave the source after it."""
    is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    source.seek(_FILE_HEADER_BYTES if is_file else 0)
    return ipc.read_schema(source)


def _next_message(ipc: Any, source: Any) -> Any:
    """Return the next record batch as a message. None at the end."""
    try:
        message = ipc.read_message(source)
    except EOFError:
        return None
    if message.type == "dictionary":
        raise ValueError("it has columns of dictionary type, which hetero cannot read. Write them as plain columns")
    return message

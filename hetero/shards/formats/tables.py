"""Rows of tables of pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, overload

from hetero.errors import ConfigError
from hetero.shards.formats.format import BlockRows

__all__ = ["TableRows", "check_columns", "import_pyarrow"]


class TableRows(BlockRows):
    """The rows of a table, as dictionaries of Python objects, each made when it is wanted.

    Args:
        table: A ``pyarrow.Table`` or ``pyarrow.RecordBatch``.
    """

    def __init__(self, table: Any) -> None:
        self._num_rows = int(table.num_rows)
        self._columns = [
            (name, _column_of(column)) for name, column in zip(table.schema.names, table.columns, strict=True)
        ]

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Any: ...
    def __getitem__(self, place: Any) -> Any:
        (row,) = self.take([range(self._num_rows)[place]])
        return row

    def take(self, places: Sequence[int]) -> list[Any]:
        """Return the rows at some places."""
        rows: list[dict[str, Any]] = [{} for _ in places]
        for name, column in self._columns:
            values = column.run(places) if isinstance(places, range) else column.take(places)
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        return rows


class _Column:
    """The values of a column as Python objects.

    Args:
        column: An array of pyarrow, whole or in chunks.
    """

    def __init__(self, column: Any) -> None:
        self._column = column

    def run(self, places: range) -> list[Any]:
        """Return the values at places that follow each other."""
        values: list[Any] = self._column.slice(places.start, len(places)).to_pylist()
        return values

    def take(self, places: Sequence[int]) -> list[Any]:
        """Return the values at some places."""
        try:
            values: list[Any] = self._column.take(places).to_pylist()
        except NotImplementedError:  # for some types, such as string_view
            return [self._column[place].as_py() for place in places]
        return values


class _Numbers(_Column):
    """Numbers without nulls. For four rows, pyarrow's ``take`` needs ten times as long (bench_shards)."""

    def __init__(self, column: Any) -> None:
        super().__init__(column)
        self._values = memoryview(column.to_numpy(zero_copy_only=False))

    def take(self, places: Sequence[int]) -> list[Any]:
        values = self._values
        return [values[place] for place in places]


class _Texts(_Column):
    """Texts without nulls, in UTF-8. Their ends in the content are numbers of 32 bits."""

    def __init__(self, column: Any) -> None:
        super().__init__(column)
        _, ends, content = column.buffers()
        self._ends = memoryview(ends).cast("i")[column.offset :]
        self._content = memoryview(content or b"")

    def take(self, places: Sequence[int]) -> list[Any]:
        ends, content = self._ends, self._content
        return [str(content[ends[place] : ends[place + 1]], "utf-8") for place in places]


def _column_of(column: Any) -> _Column:
    """Return the reader of a column."""
    types = import_pyarrow("pyarrow").types
    # A chunked array takes longer to find a row.
    array = column.chunk(0) if getattr(column, "num_chunks", 0) == 1 else column
    kind = array.type
    if getattr(array, "num_chunks", 1) != 1 or array.null_count or not len(array):
        return _Column(array)
    if types.is_string(kind):
        return _Texts(array)
    is_number = types.is_integer(kind) or types.is_boolean(kind) or types.is_float32(kind) or types.is_float64(kind)
    return _Numbers(array) if is_number else _Column(array)


def check_columns(columns: Sequence[str] | None, found: Sequence[str], path: str) -> list[str] | None:
    """Return the columns to read, None for all.

    Raises:
        ConfigError: If the file lacks one, because pyarrow would leave it out.
    """
    if columns is None:
        return None
    if missing := [name for name in columns if name not in found]:
        raise ConfigError(f"shard {path} has no column {missing[0]!r}; it has {', '.join(found)}")
    return list(columns)


def import_pyarrow(name: str) -> Any:
    """Return a module of pyarrow.

    Raises:
        ConfigError: If pyarrow is not installed.
    """
    try:
        return import_module(name)  # allowed: a module of pyarrow
    except ImportError as error:
        raise ConfigError("Parquet and Arrow files need pyarrow: pip install hetero[parquet]") from error

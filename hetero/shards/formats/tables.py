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
        self._table = table
        self._columns = [
            (name, _one_piece(column)) for name, column in zip(table.schema.names, table.columns, strict=True)
        ]

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Any: ...
    def __getitem__(self, place: Any) -> Any:
        return {name: column[place].as_py() for name, column in self._columns}

    def take(self, places: Sequence[int]) -> list[Any]:
        """Return the rows at some places. Many at once take a third of the time of each alone (bench_shards)."""
        begin, end = places[0], places[-1] + 1
        is_run = end - begin == len(places) and list(places) == list(range(begin, end))
        rows: list[Any] = (self._table.slice(begin, end - begin) if is_run else self._table.take(places)).to_pylist()
        return rows


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


def _one_piece(column: Any) -> Any:
    """Return a column as one array if it is one, because a chunked array takes longer to find a row."""
    return column.chunk(0) if getattr(column, "num_chunks", 0) == 1 else column

"""Rows of tables of pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, overload

from hetero.errors import ConfigError

__all__ = ["TableRows", "check_columns", "import_pyarrow"]


class TableRows(Sequence[Any]):
    """The rows of a table, as dictionaries of Python objects, each made when it is indexed.

    Args:
        table: A ``pyarrow.Table`` or ``pyarrow.RecordBatch``.
    """

    def __init__(self, table: Any) -> None:
        self._num_rows = table.num_rows
        self._columns = [
            (name, _one_piece(column)) for name, column in zip(table.schema.names, table.columns, strict=True)
        ]

    def __len__(self) -> int:
        return int(self._num_rows)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Any: ...
    def __getitem__(self, place: Any) -> Any:
        return {name: column[place].as_py() for name, column in self._columns}


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
        return import_module(name)
    except ImportError as error:
        raise ConfigError("Parquet and Arrow files need pyarrow: pip install hetero[parquet]") from error


def _one_piece(column: Any) -> Any:
    """Return a column as one array if it is one, because a chunked array takes longer to find a row."""
    return column.chunk(0) if getattr(column, "num_chunks", 0) == 1 else column

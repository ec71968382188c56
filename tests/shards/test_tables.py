"""Rows of pyarrow's tables: the objects are those of pyarrow's own ``to_pylist``, however they are read."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pytest

from hetero.shards.formats.tables import TableRows

pa = pytest.importorskip("pyarrow")

NUM_ROWS = 50


def table_of_many_types() -> Any:
    numbers = range(NUM_ROWS)
    day = dt.datetime(2026, 11, 30, 6, tzinfo=dt.timezone.utc)
    return pa.table(
        {
            "bool": pa.array([number % 3 == 0 for number in numbers]),
            "int32": pa.array(numbers, pa.int32()),
            "uint64": pa.array([2**64 - 1 - number for number in numbers], pa.uint64()),
            "float16": pa.array(np.arange(NUM_ROWS, dtype=np.float16)),
            "float32": pa.array([number / 10 for number in numbers], pa.float32()),
            "some ints": pa.array([None if number % 7 == 0 else number for number in numbers]),
            "text": pa.array([f"é{number}" * number for number in numbers]),
            "no text": pa.array([""] * NUM_ROWS),
            "some texts": pa.array([None if number % 7 == 0 else str(number) for number in numbers]),
            "large": pa.array([str(number) for number in numbers], pa.large_string()),
            "bytes": pa.array([b"x" * number for number in numbers]),
            "day": pa.array([day.date()] * NUM_ROWS),
            "time": pa.array([day] * NUM_ROWS, pa.timestamp("us", "UTC")),
            "duration": pa.array(numbers, pa.duration("s")),
            "decimal": pa.array([decimal.Decimal(number) for number in numbers]),
            "list": pa.array([[number, number + 1] for number in numbers]),
            "null": pa.nulls(NUM_ROWS),
        }
    )


@pytest.mark.parametrize("places", [[3], [0, 1, 2], [9, 2, 2, 5]], ids=str)
def test_rows_are_those_of_pyarrow(places: list[int]) -> None:
    whole = table_of_many_types()
    parts = pa.concat_tables([whole.slice(0, 3), whole.slice(3)])
    for table in (whole, whole.to_batches()[0], whole.slice(7, 20), whole.to_batches()[0].slice(7, 20), parts):
        expected = [table.to_pylist()[place] for place in places]
        found = TableRows(table).take(places)
        assert found == expected
        assert [list(map(type, row.values())) for row in found] == [list(map(type, row.values())) for row in expected]


def test_types_that_pyarrow_cannot_take() -> None:
    table = pa.table({"view": pa.array(["a", None, "c" * 20], pa.string_view())})
    assert TableRows(table).take([2, 0, 1]) == [{"view": "c" * 20}, {"view": "a"}, {"view": None}]


def test_tables_without_rows_or_columns() -> None:
    table = table_of_many_types()
    assert len(TableRows(table.slice(0, 0))) == 0
    assert TableRows(table.select([])).take([1, 5]) == [{}, {}]

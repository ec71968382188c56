"""``hetero index --lengths``: what `hetero.TokenBudget` reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero import TokenBudget, cli
from hetero.documents.arrays import array_of
from tests.support.shards import row, write_shards

pytest.importorskip("pyarrow")
FUNCTIONS = """
def of_row(row):
    return len(row["text"])

def of_no_row(row):
    return row["missing"]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lengths_of_test.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet"])
def test_lengths_of_rows_are_written_in_the_order_of_the_files(folder: Path, ending: str) -> None:
    write_shards(folder / "data", ending, [30, 70])
    assert cli.main(["index", f"data/*.{ending}", "--lengths=lengths_of_test:of_row", "--processes=2"]) == 0
    path = folder / "data" / "hetero-lengths.npy"
    assert array_of(path.read_bytes()).tolist() == [len(row(number)["text"]) for number in range(100)]
    assert sum(map(len, TokenBudget(str(path), max_tokens=500))) == 100


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("lengths_of_test", "expected module:function"),
        ("lengths_of_test:missing", "has no attribute 'missing'"),
        ("no_such_module:of_row", "No module named 'no_such_module'"),
        ("lengths_of_test:of_no_row", "failed for row 0 of .*shard-000.jsonl: KeyError: 'missing'"),
    ],
)
def test_function_that_gives_no_length_is_named(
    folder: Path, function: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shards(folder / "data", "jsonl", [3])
    assert cli.main(["index", "data/*.jsonl", f"--lengths={function}"]) == 2
    captured = capsys.readouterr().err
    assert re.search(error, captured), captured

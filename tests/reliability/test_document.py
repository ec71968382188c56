"""docs/reliability.md says no more than the tests show."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import reliability_document as generate

ROWS = generate.load_rows()
TESTS = Path(__file__).resolve().parents[1]


def row_ids() -> list[str]:
    return [row["id"] for table in generate.TITLES for row in ROWS[table]]


def marks() -> dict[str, set[str]]:
    """Return row -> names of the files whose tests are marked with it."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.mark.fault", "pytest.mark.attack"):
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        found.setdefault(str(argument.value), set()).add(path.name)
    return found


def test_rows_are_those_of_the_tables() -> None:
    assert row_ids() == [f"F{number}" for number in range(1, 40)] + [f"A{number}" for number in range(1, 23)]
    for row in (row for table in generate.TITLES for row in ROWS[table]):
        assert row["case"], row
        assert row["promise"], row
        assert "|" not in "".join(row.values()), row


def test_marks_name_rows_that_there_are() -> None:
    unknown = {row: files for row, files in marks().items() if row not in row_ids()}
    assert unknown == {}


def test_document_has_every_row_once() -> None:
    lines = re.findall(r"^\| ([FA]\d+) \|", generate.DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(lines) == sorted(row_ids())


def test_document_names_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", generate.DOCUMENT.read_text(encoding="utf-8"))
    assert named
    for file, name in named:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def evidence(outcome: str, *, variant: str = "", **measured: float) -> dict[str, Any]:
    return {"test": f"tests/x.py::test_a{variant}", "rows": ["F1"], "outcome": outcome, "measured": measured}


@pytest.mark.parametrize(
    ("tests", "text"),
    [
        ([evidence("passed", detection_s=1.5)], "| `x.py::test_a` | detection 1.50 s |"),
        (
            [evidence("passed", variant="[1]", a_s=1), evidence("passed", variant="[2]", a_s=2)],
            "| `x.py::test_a` | a 1.00 to 2.00 s |",
        ),
        ([evidence("passed", variant="[1]"), evidence("failed", variant="[2]")], "| its tests fail |"),
        ([evidence("skipped")], "| its tests were skipped on this machine |"),
        ([], "| no test shows it on a plain machine yet |"),
    ],
)
def test_line_says_what_the_run_has_shown(tests: list[dict[str, Any]], text: str) -> None:
    found = generate.document(ROWS, tests, machine="x")
    (line,) = [line for line in found.splitlines() if line.startswith("| F1 |")]
    assert line.endswith(text)

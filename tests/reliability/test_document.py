"""docs/reliability.md says no more than the tests show."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.reliability import reliability_document as generate

ROWS = generate.load_rows()
TESTS = Path(__file__).resolve().parents[1]
Rows = dict[str, set[str]]


def row_ids() -> list[str]:
    return [row["id"] for table in generate.HEADINGS for row in ROWS[table]]


def rows_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the rows that marks below any of the nodes name."""
    return {
        str(argument.value)
        for root in nodes
        for node in ast.walk(root)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.mark.fault", "pytest.mark.attack")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }


@functools.cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    """Return each file of tests that has such a mark, with its syntax tree."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in sorted(TESTS.rglob("test_*.py")))
    marked = ((path, text) for path, text in texts if "mark.fault" in text or "mark.attack" in text)
    return tuple((path.relative_to(TESTS).as_posix(), ast.parse(text)) for path, text in marked)


@functools.cache
def marks() -> Rows:
    """Return row -> the files whose tests are marked with it, in any way."""
    found: Rows = {}
    for file, tree in trees():
        for row in rows_in([tree]):
            found.setdefault(row, set()).add(file)
    return found


def test_rows_are_those_of_the_tables() -> None:
    assert row_ids() == [f"F{number}" for number in range(1, 46)] + [f"A{number}" for number in range(1, 24)]
    for row in (row for table in generate.HEADINGS for row in ROWS[table]):
        assert row["case"], row
        assert row["promise"].endswith("."), row


def test_marks_name_rows_that_there_are() -> None:
    unknown = {row: files for row, files in marks().items() if row not in row_ids()}
    assert unknown == {}


def test_document_has_every_row_once() -> None:
    lines = re.findall(r"^- \*\*([FA]\d+), ", generate.DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(lines) == sorted(row_ids())


def test_document_has_the_promise_of_each_row() -> None:
    text = " ".join(generate.DOCUMENT.read_text(encoding="utf-8").split())
    rows = [row for table in generate.HEADINGS for row in ROWS[table]]
    missing = [row["id"] for row in rows if f"- **{row['id']}, {row['case']}.** {row['promise']}" not in text]
    assert missing == [], "write it anew: make reliability"


def test_document_shows_every_row_that_a_test_is_marked_with() -> None:
    _, _, rest = generate.DOCUMENT.read_text(encoding="utf-8").partition("## Not shown")
    entries = [" ".join(entry.split()) for entry in rest.partition("\n## ")[0].split("\n- ")]
    missing = {entry.removeprefix("**").partition(",")[0] for entry in entries if not entry.endswith(generate.SKIPPED)}
    assert missing & set(marks()) == set(), "write it anew: make reliability"


def test_rows_that_say_why_they_are_not_shown_have_no_tests() -> None:
    reasons = {row["id"] for table in generate.HEADINGS for row in ROWS[table] if "not_shown" in row}
    assert reasons == set(row_ids()) - set(marks())


def evidence(outcome: str, *, variant: str = "", **measured: float) -> dict[str, Any]:
    return {"test": f"tests/x.py::test_a{variant}", "rows": ["F1"], "outcome": outcome, "measured": measured}


@pytest.mark.parametrize(
    ("tests", "ending"),
    [
        ([evidence("passed", detection_s=1.5)], "Measured: detection 1.50 s."),
        (
            [evidence("passed", variant="[1]", a_s=1), evidence("passed", variant="[2]", a_s=2)],
            "Measured: a 1.00 to 2.00 s.",
        ),
        ([evidence("passed", variant="[1]"), evidence("skipped", variant="[2]")], ROWS["faults"][0]["promise"]),
        ([evidence("passed"), evidence("failed") | {"test": "tests/x.py::test_b"}], "Its tests fail."),
        ([evidence("skipped")], generate.SKIPPED),
        ([], "No test shows it on a plain machine yet."),
    ],
)
def test_entry_says_what_the_run_has_shown(tests: list[dict[str, Any]], ending: str) -> None:
    found = generate.document(ROWS, tests, machine="x")
    (entry,) = [entry for entry in found.split("\n- ") if entry.startswith("**F1, ")]
    assert " ".join(entry.partition("\n\n")[0].split()).endswith(ending)

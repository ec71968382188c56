"""docs/reliability.md says no more than the tests show."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import reliability_document as generate

ROWS = generate.load_rows()
TESTS = Path(__file__).resolve().parents[1]
Rows = dict[str, set[str]]


def row_ids() -> list[str]:
    return [row["id"] for table in generate.TITLES for row in ROWS[table]]


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


@functools.cache
def marked_tests() -> Rows:
    """Return ``file::test`` -> the rows that it is marked with, itself, in a parameter, or with its whole module."""
    found: Rows = {}
    for file, tree in trees():
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        of_all = rows_in(node for node in assigned if ast.unparse(node.targets[0]) == "pytestmark")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                rows = of_all | rows_in(node.decorator_list)
                if rows:
                    found[f"{file}::{node.name}"] = rows
    return found


def gaps(document: str, marked: Rows) -> list[str]:
    """Return which marked tests are missing in the line of a row of theirs, unless the machine could not run them."""
    lines: dict[str, str] = dict(re.findall(r"^\| ([FA]\d+) (\|.*)$", document, re.MULTILINE))
    named = {row: set(re.findall(r"`([\w/]+\.py::\w+)`", line)) for row, line in lines.items()}
    skipped = set(re.findall(r"^- `([\w/]+\.py::\w+)`$", document, re.MULTILINE))
    return sorted(
        f"{row}: {test}"
        for test, rows in marked.items()
        for row in rows
        if test not in skipped and test not in named.get(row, set())
    )


def test_rows_are_those_of_the_tables() -> None:
    assert row_ids() == [f"F{number}" for number in range(1, 46)] + [f"A{number}" for number in range(1, 24)]
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


def test_document_names_every_marked_test() -> None:
    """A row that is said not to be shown, though a test is marked with it, is a gap as well."""
    marked = marked_tests()
    assert len(marked) > 100
    assert set().union(*marked.values()) == set(marks())
    assert gaps(generate.DOCUMENT.read_text(encoding="utf-8"), marked) == [], "write it anew: make reliability"


def test_rows_that_say_why_they_are_not_shown_have_no_tests() -> None:
    reasons = {row["id"] for table in generate.TITLES for row in ROWS[table] if "not_shown" in row}
    assert reasons == set(row_ids()) - set(marks())


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


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ([evidence("passed")], []),
        ([evidence("passed", variant="[1]"), evidence("skipped", variant="[2]")], []),
        ([evidence("skipped")], []),
        ([evidence("failed")], ["F1: x.py::test_a"]),
        ([], ["F1: x.py::test_a"]),  # the row stands among those that are not shown
        ([evidence("passed") | {"test": "tests/x.py::test_b"}], ["F1: x.py::test_a"]),
        ([evidence("passed") | {"rows": ["F2"]}], ["F1: x.py::test_a"]),
    ],
)
def test_marked_test_that_the_document_does_not_name_is_noticed(
    tests: list[dict[str, Any]], expected: list[str]
) -> None:
    assert gaps(generate.document(ROWS, tests, machine="x"), {"x.py::test_a": {"F1"}}) == expected

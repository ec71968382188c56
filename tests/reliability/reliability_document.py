"""Writes docs/reliability.md from what a run of the tests has shown.

    HETERO_TEST_EVIDENCE=evidence.jsonl python -m tests.run_parts
    python -m tests.reliability.reliability_document evidence.jsonl

The rows are in rows.yaml beside this file. The marks of tests name the rows that they show. Tests also measure times.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("rows.yaml")
DOCUMENT = ROOT / "docs" / "reliability.md"
SKIPPED = "Its tests were skipped on this machine."
_DEFAULT_REASON = "No test shows it on a plain machine yet."
_WIDTH = 120

TITLE = "# Reliability: what is promised"
INTRODUCTION = """\
`make reliability` wrote this page from a run of the tests on {machine}. Tests with the mark of a row show its promise:
`grep -rn '"F3"' tests` finds those of F3. The tests do not assert every number of a promise, because the speed of
machines changes. Measured times are not promises. The tests scale time down (`HETERO_TIME_SCALE`, leases never below
3 s). A range of times covers the variants of a test. `benchmarks/bench_unauthenticated.py` measures the throughput that
A9 promises.
"""
OUTCOMES = ("passed", "failed", "skipped")
HEADINGS = {"faults": "Faults", "attacks": "Attacks"}


def main(argv: list[str]) -> int:
    """Write the document from the evidence file named on the command line."""
    (path,) = argv
    tests = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    DOCUMENT.write_text(document(load_rows(), tests, machine=machine), encoding="utf-8")
    return 0


def load_rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows of both tables, in order."""
    found: dict[str, list[dict[str, str]]] = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return found


def document(rows: dict[str, list[dict[str, str]]], tests: list[dict[str, Any]], *, machine: str) -> str:
    """Return the document.

    Args:
        rows: Of both tables.
        tests: What `HETERO_TEST_EVIDENCE` received.
        machine: Where the tests ran.
    """
    shown = _shown(tests)
    parts = [f"{TITLE}\n\n{_wrapped(INTRODUCTION.format(machine=machine))}\n"]
    for table, title in HEADINGS.items():
        parts.append(f"\n## {title}\n\n")
        parts += [_entry(row, _measured(shown[row["id"]])) for row in rows[table] if row["id"] in shown]
    missing = [row for table in HEADINGS for row in rows[table] if row["id"] not in shown]
    if missing:
        parts.append("\n## Not shown\n\n")
        parts += [_entry(row, _reason(row, tests)) for row in missing]
    if skipped := _skipped(tests):
        parts.append("\n## Skipped\n\nMarked tests that this machine could not run:\n\n")
        parts += [f"- `{name.removeprefix('tests/')}`\n" for name in skipped]
    return "".join(parts)


def _skipped(tests: list[dict[str, Any]]) -> list[str]:
    """Return the tests without any variant that ran."""
    names = {outcome: {_name(test) for test in tests if test["outcome"] == outcome} for outcome in OUTCOMES}
    return sorted(names["skipped"] - names["passed"] - names["failed"])


def _shown(tests: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return row -> quantity -> values, for rows with a test that passed and none that failed."""
    failed = {row for test in tests if test["outcome"] == "failed" for row in test["rows"]}
    found: dict[str, dict[str, list[float]]] = {}
    for test in tests:
        if test["outcome"] != "passed":
            continue
        for row in set(test["rows"]) - failed:
            quantities = found.setdefault(row, defaultdict(list))
            for quantity, value in test["measured"].items():
                quantities[quantity].append(value)
    return found


def _name(test: dict[str, Any]) -> str:
    return str(test["test"]).partition("[")[0]


def _entry(row: dict[str, str], ending: str) -> str:
    """Return the list item of a row."""
    text = f"- **{row['id']}, {row['case']}.** {row['promise']} {ending}"
    return _wrapped(text.rstrip(), indent="  ") + "\n"


def _wrapped(text: str, *, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _measured(quantities: dict[str, list[float]]) -> str:
    texts = [f"{_words(quantity)} {_range(values)}" for quantity, values in sorted(quantities.items())]
    return f"Measured: {', '.join(texts)}." if texts else ""


def _words(quantity: str) -> str:
    return quantity.removesuffix("_s").replace("_", " ")


def _range(values: list[float]) -> str:
    texts = sorted({f"{value:.2f}" for value in values}, key=float)
    return f"{texts[0]} s" if len(texts) == 1 else f"{texts[0]} to {texts[-1]} s"


def _reason(row: dict[str, str], tests: list[dict[str, Any]]) -> str:
    outcomes = {test["outcome"] for test in tests if row["id"] in test["rows"]}
    if "failed" in outcomes:
        return "Its tests fail."
    if "skipped" in outcomes:
        return SKIPPED
    return row.get("not_shown", _DEFAULT_REASON)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a run of the tests leaves for docs/reliability.md, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.reliability import reliability_document as generate

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = """
    import os

    import pytest

    @pytest.mark.fault("F1")
    @pytest.mark.attack("A1")
    def test_shown(measured):
        measured("recovery_s", 1.5)

    @pytest.mark.fault("F2")
    def test_failing():
        assert False

    @pytest.mark.fault("F3")
    def test_skipped():
        pytest.skip("not here")

    def test_of_no_row():
        pass

    @pytest.mark.fault("F4")
    def test_that_hangs():
        os._exit(1)  # which is what the timeout does
"""


def test_tests_that_were_done_are_in_the_evidence_of_a_run_that_broke_off(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    fault(row)\n    attack(row)\n")
    (tmp_path / "test_some.py").write_text(textwrap.dedent(TESTS))
    path = tmp_path / "evidence.jsonl"
    other = '{"test": "by_the_other_half", "rows": ["F9"], "outcome": "passed", "measured": {}}\n'
    path.write_text(other)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "HETERO_TEST_EVIDENCE": path.name},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    found: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    outcomes = [(entry["test"].partition("::")[2], entry["outcome"], entry["rows"]) for entry in found]
    assert outcomes == [
        ("", "passed", ["F9"]),
        ("test_shown", "passed", ["A1", "F1"]),
        ("test_failing", "failed", ["F2"]),
        ("test_skipped", "skipped", ["F3"]),
    ], done.stdout
    document = generate.document(generate.load_rows(), found, machine="x")
    assert document.count("Measured: recovery 1.50 s.") == 2  # of F1 and of A1

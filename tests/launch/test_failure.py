"""The failure file: first line first, within the platform's bound, never fatal itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.control.status import Cause
from hetero.errors import ExitCode
from hetero.launch.failure import MAX_FAILURE_CHARS, failure_text, write_failure

CAUSE = Cause(host="algo-2", summary="rank 1 failed", detail="trace\n" * 1000, exit_code=ExitCode.SCRIPT_FAILED)


def test_text_long_detail_keeps_the_first_line_and_the_end() -> None:
    text = failure_text(CAUSE)
    assert text.splitlines()[0] == "HET-30 algo-2: rank 1 failed"
    assert text.endswith("trace")
    assert len(text) <= MAX_FAILURE_CHARS


def test_text_long_summary_is_cut_at_the_bound() -> None:
    assert len(failure_text(Cause(host="a", summary="x" * 5000))) == MAX_FAILURE_CHARS


def test_write_makes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "output" / "failure"
    write_failure(path, CAUSE)
    assert path.read_text().startswith("HET-30")


@pytest.mark.attack("A13")
def test_write_through_a_link_is_refused_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    path = tmp_path / "failure"
    path.symlink_to(target)
    write_failure(path, CAUSE)
    assert target.read_text() == "precious"
    assert "HETERO_FAILURE HET-30 algo-2: rank 1 failed" in capfd.readouterr().err


def test_write_to_a_full_disk_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    write_failure(Path("/dev/full"), CAUSE)
    assert "HETERO_FAILURE" in capfd.readouterr().err

"""The failure file: first line first, within the platform's bound, never fatal itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hetero.control.status import MAX_SUMMARY_CHARS, Cause
from hetero.errors import ExitCode
from hetero.launch.failure import failure_text, reserved_space, shown_detail, write_failure

CAUSE = Cause(host="algo-2", summary="rank 1 failed", detail="trace\n" * 1000, exit_code=ExitCode.SCRIPT_FAILED)


def test_text_long_detail_keeps_the_first_line_and_the_end() -> None:
    text = failure_text(CAUSE)
    assert text.splitlines()[0] == "HET-30 algo-2: rank 1 failed"
    assert text.endswith("trace")
    assert len(text) <= MAX_SUMMARY_CHARS


def test_text_long_summary_is_cut_at_the_bound() -> None:
    assert len(failure_text(Cause(host="a", summary="x" * 5000))) == MAX_SUMMARY_CHARS


def test_text_says_nothing_twice() -> None:
    cause = Cause(host="algo-2", summary="rank 1: data set photos failed", detail="data set photos failed\n  trace")
    assert failure_text(cause).splitlines()[1:] == ["  trace"]
    assert failure_text(Cause(host="algo-2", summary="boom", detail="boom")).splitlines()[1:] == []


@pytest.mark.parametrize(
    ("host", "of_rank", "shown"),
    [
        ("algo-1", False, ["    one", "    two"]),
        ("algo-1", True, ["    see the lines of that rank above for details"]),
        ("algo-2", True, ["    see the log of algo-1 for details"]),
        ("algo-2", False, ["    see the log of algo-1 for details"]),
    ],
)
def test_detail_is_in_one_log_of_the_job(host: str, of_rank: bool, shown: list[str]) -> None:
    cause = Cause(host="algo-1", summary="it failed", detail="one\ntwo", of_rank=of_rank)
    assert shown_detail(cause, host) == shown
    assert shown_detail(Cause(host="algo-1", summary="it failed"), host) == []


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


@pytest.mark.fault("F26")
def test_write_to_a_full_disk_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    write_failure(Path("/dev/full"), CAUSE)
    assert "HETERO_FAILURE" in capfd.readouterr().err


@pytest.mark.fault("F26")
def test_write_to_a_disk_that_became_full_takes_the_reserve(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from hetero.control.status import Cause
        from hetero.launch.failure import reserved_space, shown_detail, write_failure
        path = Path(sys.argv[1]) / "failure"
        with reserved_space(path):
            try:
                with (path.parent / "checkpoint").open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            except OSError:
                write_failure(path, Cause(host="algo-2", summary="rank 1 failed", detail="trace " * 400))
            print(path.read_text())
    """)
    mount = f"mount -t tmpfs -o size=64k none {disk} && exec {sys.executable} -c '{program}' {disk}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", mount], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("needs a mount namespace: root")
    assert done.stdout.startswith("HET-40 algo-2: rank 1 failed\n"), done.stderr
    assert done.stdout.strip().endswith("trace")
    assert len(done.stdout.strip()) > 1000


def test_reserve_is_gone_afterwards_and_not_made_where_there_is_no_folder(tmp_path: Path) -> None:
    with reserved_space(tmp_path / "failure"):
        assert len(list(tmp_path.iterdir())) == 1
    with reserved_space(tmp_path / "absent" / "failure"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_shorter_text_replaces_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "failure"
    path.write_text("x" * 5000)
    write_failure(path, Cause(host="a", summary="short"))
    assert path.read_text() == "HET-40 a: short"


@pytest.mark.attack("A13")
def test_reserve_is_not_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / ".hetero-reserve").symlink_to(target)
    with reserved_space(tmp_path / "failure"):
        assert target.read_text() == "precious"
        assert (tmp_path / ".hetero-reserve").stat().st_size >= MAX_SUMMARY_CHARS
    assert target.read_text() == "precious"

"""The processes that Ray's actors start, without Ray."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero import cli
from hetero.control.security import Token
from hetero.errors import ClusterError, ExitCode
from hetero.ray.child import Child
from hetero.ray.job_host import LEDGERS, RESULTS, Demand, JobHost

COUNTS_SIGNALS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
print("ready", flush=True)
time.sleep(60)
"""


class _Lines(list[str]):
    def wait_for(self, line: str) -> None:
        deadline_s = time.monotonic() + 30
        while line not in self:
            assert time.monotonic() < deadline_s, list(self)
            time.sleep(0.01)


def _child(code: str, lines: list[str], tmp_path: Path) -> Child:
    return Child(
        ["-c", code],
        token=Token.generate(),
        folder=str(tmp_path),
        variables={},
        on_line=lines.append,
        on_end=lambda _: None,
    )


def test_child_gets_each_signal_once(tmp_path: Path) -> None:
    lines = _Lines()
    child = _child(COUNTS_SIGNALS, lines, tmp_path)
    lines.wait_for("ready")
    child.stop()
    lines.wait_for("SIGTERM")
    child.stop()
    child.stop(signal.SIGKILL)
    assert child.wait(300)
    assert (lines, child.exit_code) == (["ready", "SIGTERM"], -signal.SIGKILL)


def test_child_does_not_inherit_what_asks_for_a_job_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_PLATFORM", "ray")
    monkeypatch.setenv("HETERO_RAY_GROUPS", "trainer=GPU:1:1")
    monkeypatch.setenv("HETERO_LOG_LEVEL", "debug")
    lines = _Lines()
    assert _child("import os; print(*os.environ, sep='\\n')", lines, tmp_path).wait(300)
    assert {"HETERO_PLATFORM", "HETERO_RAY_GROUPS", "HETERO_LOG_LEVEL"} & set(lines) == {"HETERO_LOG_LEVEL"}


@pytest.mark.parametrize(("at_start", "expected"), [("", set()), ("A=1\0OMP_NUM_THREADS=1\0", {"OMP_NUM_THREADS"})])
def test_child_inherits_a_limit_of_threads_only_from_the_user(
    at_start: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environ").write_text(at_start)
    monkeypatch.setattr("hetero.ray.child._AT_START", tmp_path / "environ")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines = _Lines()
    assert _child("import os; print(*os.environ, sep='\\n')", lines, tmp_path).wait(300)
    assert {"OMP_NUM_THREADS"} & set(lines) == expected


def test_child_that_cannot_be_started_has_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = _child("", [], tmp_path / "missing")
    assert child.wait(300)
    assert child.exit_code == ExitCode.RESOURCES
    assert "could not be started" in capfd.readouterr().err


def test_platform_of_the_command_line_is_used_instead_of_ray(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETERO_PLATFORM", "ray")
    monkeypatch.setattr("hetero.cli.commands.launch.bind_to_parent", lambda: None)
    cli.main(["launch", "--platform", "volcano", "train.py"])
    found = capfd.readouterr().err
    assert "volcano" in found.lower()
    assert "--platform ray" not in found
    cli.main(["launch", "train.py"])
    assert "--platform ray needs the groups" in capfd.readouterr().err


class _Host(JobHost):
    def address(self) -> str:
        return "127.0.0.1"


def _order(arguments: Sequence[str], script: Sequence[str] = ()) -> dict[str, object]:
    return {
        "name": "data-0",
        "arguments": arguments,
        "script": script,
        "cluster": {},
        "hosts": {},
        "token": Token.generate().reveal(),
        "variables": {},
    }


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_host_removes_its_files(tmp: Path) -> None:
    host = _Host()
    assert host.run(_order(["--version"])) == ExitCode.OK
    assert [path.name[:11] for path in tmp.iterdir()] == ["hetero-ray-"]
    host.close(1)
    assert list(tmp.iterdir()) == []


def test_words_of_the_script_stay_as_they_are(tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = _Host()
    assert host.run(_order(["report"], ["runs/{port}"])) == ExitCode.USAGE
    assert "runs/{port}" in capfd.readouterr().err
    host.close(1)


def test_demand_is_not_waited_for_when_the_launcher_has_ended(tmp: Path) -> None:
    host = _Host()
    assert host.run(_order(["--version"])) == ExitCode.OK
    with pytest.raises(ClusterError, match="has ended"):
        host.demand(0)
    host.close(1)


def test_host_whose_launcher_hangs_is_closed(tmp: Path) -> None:
    host, codes = _Host(), []
    # It waits for the other host until the start timeout.
    thread = threading.Thread(target=lambda: codes.append(host.run(_order(["launch", "--join=127.0.0.1:9", __file__]))))
    thread.start()
    deadline_s = time.monotonic() + 30
    while host._child is None or host._child._process is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    host.close(0)
    thread.join(100)
    assert codes == [-signal.SIGKILL]
    assert list(tmp.iterdir()) == []


def test_host_that_was_asked_to_stop_starts_no_launcher(tmp: Path) -> None:
    host = _Host()
    host.stop()
    assert host.run(_order(["--version"])) == -signal.SIGTERM
    host.close(0)
    assert list(tmp.iterdir()) == []


def test_host_gives_its_results_but_no_others_and_none_that_is_too_large(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.ray.job_host._MAX_FILE_BYTES", 4)
    host = _Host()
    assert host.results(RESULTS) == ({}, [])
    assert host.run(_order(["--version"])) == ExitCode.OK
    output = next(tmp.iterdir()) / "output"
    output.mkdir()
    for name in ("report.md", "ledger-rank-0.jsonl", "ledger-rank-1.jsonl", "weights"):
        (output / name).write_text(name[:4])
    (output / "ledger-rank-1.jsonl").write_text("longer")
    large = [str(output / "ledger-rank-1.jsonl")]
    assert host.results(RESULTS) == ({"report.md": b"repo", "ledger-rank-0.jsonl": b"ledg"}, large)
    assert host.results(LEDGERS) == ({"ledger-rank-0.jsonl": b"ledg"}, large)
    host.close(1)


def test_host_counts_estimates() -> None:
    host = _Host()
    for high in (3, 4):
        for name, value in (("", 2), ("_low", 1), ("_high", high)):
            host._read(f"[trainer trainer-0] INFO hetero_metric wanted_data_hosts{name}={value}")
    assert host.demand(0) == Demand(2, 1, 4)
    assert host.demand(1) == Demand(2, 1, 4)

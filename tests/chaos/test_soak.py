"""The soak in short, and that its judge would notice."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos import soak
from tests.support.chaos import leftovers
from tests.support.integration.harness import wait_gone


@pytest.mark.integration
@pytest.mark.fault("F39")
def test_short_soak_finds_nothing_lost_repeated_or_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "summary.json"
    flags = ["--duration-s", "1", "--seed", "4", "--steps", "160", "--events", "6"]
    code = soak.main([*flags, "--network", "proxies", "--summary", str(summary)])
    output = capsys.readouterr().out
    assert code == 0, output
    found = json.loads(summary.read_text())
    assert found["violations"] == []
    assert found["num_events"] >= 5
    assert found["num_batches"] == 160 * soak.NUM_RANKS * found["num_jobs"]
    assert "seed 4  event 1 " in output


def launchers_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the launchers that a soak has started and that live."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):
            if "hetero.cli" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_soak_that_is_ended_takes_its_launchers_along(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.chaos.soak", "--network", "proxies", "--step-s", "1"]
    output = tmp_path / "output"
    with output.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    launchers: list[psutil.Process] = []
    try:
        deadline_s = time.monotonic() + 60.0
        while len(launchers) <= soak.NUM_DATA_HOSTS:
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline_s, "it has started no job"
            time.sleep(0.05)
            launchers = launchers_of(psutil.Process(process.pid))
        process.send_signal(number)
        process.wait(300.0)
        wait_gone(launchers)
    finally:
        process.kill()
        process.wait()
        for launcher in launchers:
            with contextlib.suppress(psutil.Error):
                launcher.kill()
    if number == signal.SIGTERM:
        assert list(tmp_path.glob("hetero-soak-*")) == [], output.read_text()


@pytest.mark.parametrize(
    ("indices", "chain", "words"),
    [
        ([[1, 2], [3, 4], [5, 6]], "a", []),
        ([[1, 2], [3, 4], [5, 6]], "b", ["the bytes of batches differ"]),
        ([[1, 2], [5, 6], [3, 4]], "b", ["reordered"]),
        ([[1, 2], [5, 6]], "b", ["1 batches are lost, 0"]),
        ([[1, 2], [3, 4], [3, 4], [5, 6]], "b", ["0 batches are lost, 1 are there twice"]),
    ],
)
def test_judge_names_what_differs(indices: list[list[int]], chain: str, words: list[str]) -> None:
    expected = {"indices": [[1, 2], [3, 4], [5, 6]], "chain": "a"}
    found = soak.compare(expected, {"indices": indices, "chain": chain})
    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True))


def test_semaphore_of_another_program_is_no_leftover() -> None:
    before, name = leftovers.shared_memory(), f"test-{secrets.token_hex(8)}"
    made = [Path("/dev/shm", name), Path("/dev/shm", f"sem.{name}")]
    try:
        for path in made:
            path.touch()
        found = [path for path in leftovers.new_shared_memory(before) if name in path]
    finally:
        for path in made:
            path.unlink(missing_ok=True)
    assert found == [str(made[0])]


@pytest.mark.parametrize(("code", "num_violations"), [(0, 1), (30, 0)])
def test_judge_misses_the_result_of_a_job_that_says_it_is_well(tmp_path: Path, code: int, num_violations: int) -> None:
    class Launcher:
        returncode = code

        def poll(self) -> int:
            return self.returncode

    class Ended:
        data_hosts = ()

        def results(self) -> dict[int, object]:
            return {0: {"indices": [], "chain": "a"}}

        def launcher(self, _host: str) -> Launcher:
            return Launcher()

        def leftovers(self, _before: object) -> list[str]:
            return []

    summary = soak.Summary(seed=1, network="none")
    judge = soak.Soak(None, tmp_path, summary, steps=1, step_s=0.0, max_events=1)  # type: ignore[arg-type]
    judge._shared_before = set()
    judge._expected = {0: {"indices": [], "chain": "a"}, 1: {"indices": [], "chain": "a"}}
    judge._check("job", Ended())  # type: ignore[arg-type]
    assert len(summary.violations) == num_violations

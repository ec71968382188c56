"""The demo: the emulated times that it chooses, and whole runs of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]
DEMO = Path(__file__).parents[2] / "examples" / "photos" / "demo.py"


@pytest.mark.parametrize(
    ("real_s", "step_s"),
    [
        (0.0, 0.15),  # the shortest step
        (0.075, 0.15),
        (0.0751, 0.2),
        (0.1, 0.2),  # 0.2 is not rounded up to 0.25 by 0.1 + 0.1 in floating point
        (0.4, 0.8),
    ],
)
def test_emulated_step_has_room_for_the_real_work(script: Script, real_s: float, step_s: float) -> None:
    assert script("photos/demo.py").emulated_step_s(real_s) == pytest.approx(step_s)


def test_demo_first_failure_ends_it_with_its_exit_code(
    script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert script("photos/demo.py").main(["--data", str(tmp_path), "--output-dir", str(tmp_path / "runs")]) == 2
    captured = capfd.readouterr()
    assert "=== 1/5 Real JPEGs" in captured.out
    assert "2/5" not in captured.out
    assert "choose another --output" in captured.err


def run_demo(folder: Path, *flags: str, prefix: Sequence[str] = ()) -> str:
    command = [*prefix, sys.executable, str(DEMO), *flags]
    environment = {**os.environ, "PYTHONPATH": str(DEMO.parents[2])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(1400)
@pytest.mark.parametrize(
    "prefix", [(), ("taskset", "-c", "0"), ("nice", "-n", "19")], ids=["plain", "one core", "nice"]
)
def test_demo_on_any_machine_gives_a_verdict_or_the_command_that_decides(tmp_path: Path, prefix: Sequence[str]) -> None:
    output = run_demo(tmp_path, prefix=prefix)
    assert "The real work of a step takes this machine" in output
    assert "The second run is **worth it: " in output or "To decide: python " in output
    assert output.splitlines()[-1] == "Both runs on one page: runs/demo/comparison.html"
    page = (tmp_path / "runs" / "demo" / "comparison.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5
    assert len(page.encode()) < 500_000

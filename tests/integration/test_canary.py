"""``hetero canary`` as a user runs it: real jobs on a part of the files, and a forecast."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetero.decide.canary.model import load_canary
from tests.support.integration.harness import Start

SCRIPT = """
import os, pathlib, time

def main():
    files = sorted(pathlib.Path(os.environ["SM_CHANNEL_TRAINING"]).glob("*.txt"))
    losses = []
    for step, path in enumerate(files):
        end = time.process_time() + 0.01
        while time.process_time() < end:
            losses.append(len(path.read_text()))

main()
"""


def test_canary_of_a_script_is_forecast_and_goes_on_where_it_was(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    data = tmp_path / "data"
    data.mkdir()
    for index in range(150):
        (data / f"{index:03d}.txt").write_text("x" * 1000)
    command = [
        *(sys.executable, "-m", "hetero.cli", "canary", "--fractions", "10%", "20%", "30%", "40%", "--repeats", "1"),
        *("--group", "trainer=ml.m5.large:1", "--price", "ml.m5.large=0.1", "--channel", f"training={data}"),
        *("--output-dir", str(tmp_path / "out"), str(tmp_path / "train.py")),
    ]
    canary = start(command, tmp_path, {})
    # The noise of a busy machine may refuse the forecast.
    code = canary.wait(300.0)
    assert code in (0, 1), canary.output
    (found,) = load_canary(tmp_path / "out").candidates
    assert sorted(point.fraction for point in found.points) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    for point in found.points:
        assert point.failure == ""
        assert [part.name for part in point.parts] == ["start-up and end", "imports", "script"]
        assert point.growing_s >= 0.9 * 0.01 * 150 * point.fraction
        assert point.resources.memory_peak_bytes
    assert {refusal.rule for refusal in found.refusals} <= {"noise", "busy", "curved", "no-growth"}
    # Again: nothing is left to run, and the same forecast appears.
    again = start([*command[:-1], "--json", command[-1]], tmp_path, {})
    assert again.wait(300.0) == code, again.output
    assert load_canary(tmp_path / "out").candidates[0] == found
    assert found.figure("cost") is None
    assert "Costs are not known" in canary.output
    assert "give --as-fast-as TYPE" in canary.output
    # A statement about this machine gives the forecast its costs.
    priced = start([*command[:-1], "--as-fast-as", "ml.m5.large", command[-1]], tmp_path, {})
    assert priced.wait(300.0) == code, priced.output
    assert load_canary(tmp_path / "out").candidates[0].figure("cost") is not None
    assert "Costs are not known" not in priced.output
    # The runs of a script that has changed since are not mixed with others.
    (tmp_path / "train.py").write_text(SCRIPT.replace("0.01", "0.02"))
    other = start(command, tmp_path, {})
    assert other.wait(300.0) == 2, other.output
    assert "content of the script" in other.output
    assert "--fresh" in other.output

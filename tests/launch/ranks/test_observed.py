"""What a canary run observes of its script: imports, periodic conditions, loops left early."""

from __future__ import annotations

import ast
import builtins
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE, ScriptObserver, instrumented, observer_of

SCRIPT = """
import json
import pathlib

def train(steps):
    bad = 0
    for step in range(steps):
        if step % 500 == 0 and step:
            raise AssertionError("not reached")
        if not step % 4:
            bad += 1
        if bad >= 3:
            break
    while True:
        if bad >= 3:
            break
    for other in range(3):
        if other == 1:
            break
    name = "%s-%d" % ("a", 3)
    if "x%d" % 3 == "x3":
        return name

if __name__ == "__main__":
    result = train(40)
"""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    original = builtins.__import__
    yield
    assert builtins.__import__ is original
    for name in ("__hetero_modulo__", "__hetero_left_loop__"):
        if hasattr(builtins, name):
            delattr(builtins, name)


def observe(tmp_path: Path, text: str) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(text)
    with ScriptObserver(tmp_path, 0).running(str(script), is_module=False):
        runpy.run_path(str(script), run_name="__main__")
    found: dict[str, Any] = json.loads((tmp_path / "rank-0.json").read_text())
    return found


def test_periods_and_ends_of_loops_are_counted(tmp_path: Path) -> None:
    found = observe(tmp_path, SCRIPT)
    assert found["periodic"] == [
        {"line": 8, "text": "if step % 500 == 0 and step", "period": 500, "largest": 8},
        {"line": 10, "text": "if not step % 4", "period": 4, "largest": 8},
    ]
    assert found["left_loops"] == [{"line": 12, "text": "if bad >= 3", "count": 1}]


def test_script_does_the_same_as_without_the_observer(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = runpy.run_path(str(script), run_name="__main__")["result"]
    with ScriptObserver(tmp_path, 0).running(str(script), is_module=False):
        assert runpy.run_path(str(script), run_name="__main__")["result"] == plain == "a-3"


def test_times_are_those_of_imports_and_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.2)\n")
    found = observe(tmp_path, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport slow_module\n")
    assert 0.2 <= found["import_s"] <= found["ended_monotonic_s"] - found["began_monotonic_s"]


def test_file_is_written_if_the_script_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no')\n")
    with (
        pytest.raises(ValueError, match="no") as caught,
        ScriptObserver(tmp_path, 3).running(str(script), is_module=False),
    ):
        runpy.run_path(str(script), run_name="__main__")
    assert caught.traceback[-1].path == script
    assert (tmp_path / "rank-3.json").is_file()


def test_script_that_is_not_python_fails_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        observe(tmp_path, "def\n")


def test_lines_keep_their_numbers() -> None:
    before, after = ast.parse(SCRIPT), instrumented(SCRIPT)
    lines = {node.lineno for node in ast.walk(before) if isinstance(node, ast.stmt)}
    assert {node.lineno for node in ast.walk(after) if isinstance(node, ast.stmt)} == lines


def test_observer_exists_in_canary_runs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CANARY_DIR_VARIABLE, raising=False)
    assert observer_of(0) is None
    monkeypatch.setenv(CANARY_DIR_VARIABLE, str(tmp_path))
    assert observer_of(0) is not None

"""What a canary run observes of its script: its times, and those of its imports."""

from __future__ import annotations

import builtins
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE, observed


@pytest.fixture(autouse=True)
def _restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CANARY_DIR_VARIABLE, str(tmp_path))
    original = builtins.__import__
    yield
    assert builtins.__import__ is original


def observe(tmp_path: Path, text: str) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(text)
    with observed(0):
        runpy.run_path(str(script), run_name="__main__")
    found: dict[str, Any] = json.loads((tmp_path / "rank-0.json").read_text())
    return found


def test_times_are_those_of_imports_and_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.2)\n")
    found = observe(tmp_path, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport slow_module\n")
    assert 0.2 <= found["import_s"] <= found["ended_monotonic_s"] - found["began_monotonic_s"]


def test_file_is_written_if_the_script_fails(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no')\n")
    with pytest.raises(ValueError, match="no") as caught, observed(3):
        runpy.run_path(str(script), run_name="__main__")
    assert caught.traceback[-1].path == script
    assert (tmp_path / "rank-3.json").is_file()


def test_only_canary_runs_are_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CANARY_DIR_VARIABLE)
    original = builtins.__import__
    with observed(0):
        assert builtins.__import__ is original
    assert list(tmp_path.iterdir()) == []

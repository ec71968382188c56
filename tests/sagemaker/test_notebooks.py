"""The notebooks of examples/sagemaker: their cells run, one after the other, and end before anything is submitted."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero.report import load_report

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "sagemaker"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
HOSTS = {"pytorch": ["algo-1", "algo-2"], "tensorflow": ["algo-1", "algo-2", "algo-3"]}
MODULES = {"pytorch": "torch", "tensorflow": "tensorflow"}
GUARD = "if SUBMIT and not errors:\n"


def cells(path: Path, kind: str) -> list[str]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_output_and_its_links_lead_somewhere(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
    links = [link for text in cells(path, "markdown") for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    assert links
    assert [link for link in links if not (FOLDER / link).exists()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_submission_is_guarded(path: Path) -> None:
    (cell,) = [cell for cell in cells(path, "code") if re.search(r"\bsubmit\(", cell)]
    before, guard, after = cell.partition(GUARD)
    assert guard
    assert "submit(" not in before
    assert all(line.startswith("    ") for line in after.partition("\nelse:")[0].splitlines())
    others = "\n".join(each for each in cells(path, "code") if each != cell)
    assert re.search(r"\.(fit|train)\(", others) is None


@pytest.mark.integration
@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path != NOTEBOOKS[0])) for path in NOTEBOOKS]
)
def test_notebook_runs_and_rehearses_its_job(path: Path, tmp_path: Path) -> None:
    for module in ("sagemaker", MODULES[path.stem], "cv2", "sklearn"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    if importlib.util.find_spec("sagemaker.train") is not None:
        pytest.skip("needs version 2 of the SageMaker SDK")
    program = "\n\n".join(cells(path, "code"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=FOLDER,
        env={**os.environ, "WORK_DIR": str(tmp_path), "NUM_PHOTOS": "128", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "is the cheapest" in done.stdout
    assert "SM-" not in done.stdout
    assert done.stdout.endswith("not submitted: set SUBMIT=yes\n")
    report = load_report(tmp_path / "rehearsal")
    assert report.run.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "rehearsal" / "hosts").iterdir()) == HOSTS[path.stem]
    assert "USD/h" in done.stdout
    assert "No step was measured" not in done.stdout

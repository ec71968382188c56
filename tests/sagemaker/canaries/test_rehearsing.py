"""A rehearsal of a canary run that is asked to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from estimators import pytorch

from hetero.pricing import Catalogue
from hetero.sagemaker.canaries import rehearsing
from hetero.sagemaker.canaries.rehearsing import RehearsalExecutor
from hetero.sagemaker.rehearsal.rehearse import Rehearsal, rehearse
from hetero.studies.runs import PlannedRun
from hetero.system.process import start_child

pytest.importorskip("sagemaker.estimator", reason="needs version 2 of the SageMaker SDK")

RUN = PlannedRun(run_id="001", levels={"cluster": "c"}, script="train.py", options={"estimator": "digest"})
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
ENDS = "import signal; print(flush=True); signal.pause()"


def executor_of(source_dir: Path) -> RehearsalExecutor:
    return RehearsalExecutor({"c": pytorch(source_dir)}, None, catalogue=Catalogue.load())


@pytest.mark.parametrize(("script", "code"), [(ENDS, signal.SIGTERM), (IGNORES_SIGTERM, signal.SIGKILL)])
def test_stop_ends_the_process_of_a_rehearsal(
    source_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int
) -> None:
    executor = executor_of(source_dir)

    def fake(*_: object, on_start: Callable[[subprocess.Popen[bytes]], object], **__: object) -> Rehearsal:
        process = start_child([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
            on_start(process)
            threading.Thread(target=executor.stop).start()
            process.wait(60)
        return Rehearsal(exit_code=128 - process.returncode, failure="", output_dir=tmp_path)

    monkeypatch.setattr(rehearsing, "rehearse", fake)
    monkeypatch.setattr(rehearsing, "_GRACE_S", 0.2 if code == signal.SIGKILL else 600.0)
    result = executor.execute(RUN, tmp_path)
    executor.stop()
    assert (result.state, result.exit_code) == ("failed", 128 + code)


@pytest.mark.integration
def test_process_of_a_rehearsal_stops_on_sigterm(source_dir: Path, tmp_path: Path) -> None:
    (source_dir / "train.py").write_text("import time\ntime.sleep(600)\n")
    started: list[Any] = []

    def stop(process: subprocess.Popen[bytes]) -> None:
        started.append(process)
        process.terminate()

    estimator = pytorch(source_dir, entry_point="train.py")
    found = rehearse(estimator, output_dir=tmp_path / "run", through="plain", on_start=stop)
    assert found.exit_code == 143
    assert started[0].returncode is not None

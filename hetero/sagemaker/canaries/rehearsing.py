"""Executes canary runs of an estimator on this machine, with `hetero.sagemaker.rehearse`."""

from __future__ import annotations

import contextlib
import datetime as dt
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.pricing import Catalogue
from hetero.report.model import REPORT_FILE_NAME, load_report
from hetero.sagemaker.preparation.adapters import adapter_of
from hetero.sagemaker.rehearsal.rehearse import rehearse
from hetero.studies.executors import phases_of
from hetero.studies.runs import FAILED, FINISHED, PlannedRun, RunResult

__all__ = ["IDENTITY_OPTION", "RehearsalExecutor"]

IDENTITY_OPTION = "estimator"
"""Option of a run with the identity of the estimator's job. It makes another estimator another run."""
_GRACE_S = 150.0
"""Seconds from the request to stop until the kill. Hosts are killed after 120 s already, as on the platform."""


class RehearsalExecutor:
    """Rehearses each run, one at a time. The channels of a run are local folders.

    Args:
        estimators: The estimator of each cluster, by the level ``cluster`` of a run.
        inputs: The inputs of the whole job.
        catalogue: Prices of the instance types.
    """

    max_parallel = 1

    def __init__(self, estimators: Mapping[str, Any], inputs: Any, *, catalogue: Catalogue) -> None:
        self._estimators = estimators
        self._inputs = inputs
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._killer: threading.Timer | None = None

    def hourly_usd(self, run: PlannedRun) -> float | None:
        """Return the price of all hosts of the run per hour, or None if a price is unknown."""
        total = 0.0
        for group in adapter_of(self._estimators[str(run.levels["cluster"])]).groups():
            info = self._catalogue.find(group.instance_type)
            if info is None or info.hourly_usd is None:
                return None
            total += group.count * info.hourly_usd
        return total

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        """Rehearse the run, see `hetero.studies.runs.Executor.execute`."""
        started_at = dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")
        started_s = time.monotonic()
        options: dict[str, Any] = {name: value for name, value in run.options.items() if name != IDENTITY_OPTION}
        try:
            done = rehearse(
                self._estimators[str(run.levels["cluster"])],
                self._inputs,
                output_dir=folder,
                data=dict(run.channels),
                environment=run.environment,
                on_start=self._enter,
                **options,
            )
        finally:
            self._leave()
        measured_s = time.monotonic() - started_s
        report = load_report(folder) if (folder / REPORT_FILE_NAME).is_file() else None
        wall_s = measured_s if report is None else report.run.wall_s
        hourly_usd = self.hourly_usd(run)
        return RunResult(
            run_id=run.run_id,
            state=FINISHED if done.exit_code == 0 else FAILED,
            exit_code=done.exit_code,
            cause="" if done.exit_code == 0 else done.failure or f"the job ended with {done.exit_code}",
            started_at=started_at,
            wall_s=wall_s,
            usd=None if hourly_usd is None else hourly_usd * wall_s / 3600,
            metrics=() if report is None else report.run.metrics,
            phases={} if report is None else phases_of(report),
            report=report,
        )

    def stop(self) -> None:
        """Ask the rehearsal to stop as the platform does, and kill it after a grace. Thread-safe, idempotent."""
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._end_process()

    def _enter(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._process = process
            if self._is_stopped:
                self._end_process()

    def _leave(self) -> None:
        with self._lock:
            self._process = None
            if self._killer is not None:
                self._killer.cancel()

    def _end_process(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        self._killer = threading.Timer(_GRACE_S, self._process.kill)
        self._killer.daemon = True
        self._killer.start()

"""Executes canary runs of an estimator on this machine, with `hetero.sagemaker.rehearse`."""

from __future__ import annotations

import datetime as dt
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

__all__ = ["RehearsalExecutor"]


class RehearsalExecutor:
    """Rehearses each run, one at a time. The channels of a run are local folders.

    Args:
        estimators: The estimator of each cluster, by the level ``cluster`` of a run.
        inputs: The inputs of the whole job.
        catalogue: Prices of the instance types.
        options: Options of `rehearse`.
    """

    max_parallel = 1

    def __init__(
        self, estimators: Mapping[str, Any], inputs: Any, *, catalogue: Catalogue, options: Mapping[str, Any]
    ) -> None:
        self._estimators = estimators
        self._inputs = inputs
        self._catalogue = catalogue
        self._options = dict(options)

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
        done = rehearse(
            self._estimators[str(run.levels["cluster"])],
            self._inputs,
            output_dir=folder,
            data=dict(run.channels),
            environment=run.environment,
            **{**run.options, **self._options},
        )
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
        """Do nothing. A rehearsal stops with Ctrl-C, which `rehearse` forwards."""

"""The records of one run of a study: what to start, who starts it, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from hetero.documents.records import limits
from hetero.metrics.logged import LoggedMetric
from hetero.report.model import MAX_METRICS, Report

__all__ = [
    "FAILED",
    "FINISHED",
    "STATES",
    "STOPPED",
    "Billing",
    "EndedRun",
    "Executor",
    "Level",
    "PlannedRun",
    "RunResult",
]

Level = str | int | float | bool
"""A level of a factor, or a quantity derived from levels."""

FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
STATES = (FINISHED, FAILED, STOPPED)
"""How a run ended. ``stopped``: the study stopped the run, because the budget was passed. It counts as not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a study, complete: an executor needs nothing else."""

    run_id: str
    """Stable name of the run, usable as the name of a folder: ``007-ranks=2-samples=1000-r1``."""
    levels: Mapping[str, Level]
    """Level of each factor, and the derived quantities (epochs, batch_per_device, learning_rate, seed)."""
    replicate: int = 1
    """Number of this run among the runs with the same levels, from 1."""
    script: str
    """Path of the training script."""
    script_args: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    """Instance groups as ``NAME=TYPE:COUNT``. Empty for executors whose cluster is given elsewhere."""
    channels: Mapping[str, str] = field(default_factory=dict)
    """Folder of each input channel by its name."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Launch options by name, see `hetero.config.LaunchOptions`, for example ``nproc_per_node``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to the environment of the job."""
    study_folder: str = ""
    """Relative paths start from this folder. A run is the same after the folder has moved, see
    `hetero.decide.studies.ledger.digest_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """How a run ended, and what the study measured about it. The ledger has this."""

    run_id: str
    state: str = field(metadata=limits(choices=STATES))
    """``finished``, ``failed`` or ``stopped``, see `STATES`."""
    exit_code: int = field(metadata=limits(minimum=-255, maximum=255))
    cause: str = ""
    """Why the run failed or was stopped. Empty if it finished."""
    started_at: str
    """ISO 8601 with time zone."""
    wall_s: float
    """Seconds that the cluster is paid for, from the report if there is one."""
    usd: float | None = None
    """Cost: list prices times `wall_s`. None if a price is unknown."""
    metrics: tuple[LoggedMetric, ...] = field(default=(), metadata=limits(max_items=MAX_METRICS))
    """Values that the script logged, and those that the study's expressions found in the log."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the run by its name, in order, for example ``start``, ``training`` and ``end``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(EndedRun):
    """How a run ended, with its levels and its report."""

    levels: Mapping[str, Level] = field(default_factory=dict)
    """Levels and derived quantities of the run. `hetero.decide.studies.conduct` fills them in."""
    replicate: int = 1
    report: Report | None = None
    """The run's ``report.json``. None if the job wrote none."""


class Executor(Protocol):
    """Starts the runs of a study. Its methods must allow calls from several threads if `max_parallel` is above 1."""

    max_parallel: int
    """Number of runs that may run at the same time, at least 1."""

    def hourly_usd(self, run: PlannedRun) -> float | None:
        """Return the price of all hosts of the run per hour, or None if a price is unknown."""

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        """Run the job and return how it ended. Blocks until then.

        A run that fails is a result. An exception means that the study cannot go on, for example without the script.

        Args:
            run: The run.
            folder: Folder of the run, which exists. The executor puts ``report.json`` there.
        """

    def stop(self) -> None:
        """Ask the runs that are being executed to stop. `execute` then returns soon. Thread-safe, idempotent."""


@runtime_checkable
class Billing(Protocol):
    """An executor whose runs cost nothing at first, because their hosts are not there yet."""

    def billed_s(self, run: PlannedRun) -> float:
        """Return the seconds that a run which is being executed is billed so far. Thread-safe."""

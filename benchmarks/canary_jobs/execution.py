"""Runs canaries and whole jobs on this machine, and keeps what they measured."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import say

from canary_jobs.jobs import SCRIPTS, Job
from hetero.canary.conducting import run_canaries
from hetero.canary.design import CanaryRequest, Cluster
from hetero.canary.files import data_files, evict
from hetero.canary.forecast import ForecastOptions
from hetero.canary.model import CanaryReport
from hetero.canary.observations import point_of, read_observed
from hetero.canary.points import CanaryPoint
from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE
from hetero.pricing import Catalogue
from hetero.studies.conduct import Progress
from hetero.studies.executors import SimulateExecutor
from hetero.studies.runs import PlannedRun

__all__ = ["canaries", "data_of", "whole"]

_TYPE = "ml.m5.large"
_OPTIONS = {"usage_interval_s": 0.1, "warmup_steps": 3, "purity_checks": 0, "log_level": "warning"}


def data_of(job: Job, folder: Path, scale: float) -> Path | None:
    """Return the folder of a job's data, which is made if it is not there."""
    if job.make is None:
        return None
    path = folder / f"{job.dataset}-{scale:g}"
    if not path.is_dir():
        say(f"making {path.name}")
        draft = path.with_name(f"{path.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        job.make(draft, scale)
        os.sync()
        draft.rename(path)
    return path


def arguments_of(job: Job, scale: float) -> tuple[str, ...]:
    """Return the arguments of a job, with its amount of data scaled."""
    words = list(job.args)
    if job.scaled:
        at = words.index(job.scaled) + 1
        words[at] = str(max(1, round(int(words[at]) * scale)))
    return tuple(words)


def canaries(
    job: Job,
    folder: Path,
    *,
    data: Path | None,
    scale: float,
    fractions: Sequence[float],
    repeats: int,
    seed: int = 0,
    clusters: Sequence[tuple[str, ...]] = (),
    prices: Sequence[str] = (),
) -> CanaryReport:
    """Run the canaries of a job and return its forecast."""
    catalogue = _catalogue(prices)
    request = CanaryRequest(
        script=str(SCRIPTS / job.script),
        script_args=arguments_of(job, scale),
        clusters=tuple(Cluster(groups=groups) for groups in clusters or [job.groups]),
        fractions=tuple(fractions),
        repeats=repeats,
        channels={} if data is None else {"training": data},
        by_samples=job.by_samples,
        whole_samples=None if job.whole_samples is None else round(job.whole_samples * scale),
        options=_OPTIONS,
        as_fast_as=frozenset((_TYPE, *(price.partition("=")[0] for price in prices))),
        seed=seed,
    )
    return run_canaries(
        request,
        folder,
        executor=SimulateExecutor(catalogue=catalogue),
        catalogue=catalogue,
        memory_gib={} if job.limit_mib is None else {_TYPE: job.limit_mib / 1024},
        options=ForecastOptions(seed=seed),
        on_progress=_show,
    )


def whole(
    job: Job,
    folder: Path,
    *,
    data: Path | None,
    scale: float,
    groups: tuple[str, ...] = (),
) -> CanaryPoint:
    """Run the whole job once and return what it used. Its fraction is 1."""
    observations = folder / "observed"
    shutil.rmtree(folder, ignore_errors=True)
    observations.mkdir(parents=True)
    if data is not None:
        evict(data / file.name for file in data_files(data)[0])
    samples = "" if job.whole_samples is None else str(round(job.whole_samples * scale))
    words = arguments_of(job, scale)
    run = PlannedRun(
        run_id=f"{job.name}-whole",
        levels={},
        script=str(SCRIPTS / job.script),
        script_args=tuple(word.replace("{fraction}", "1").replace("{samples}", samples) for word in words),
        groups=groups or job.groups,
        channels={} if data is None else {"training": str(data)},
        options=_OPTIONS,
        environment={CANARY_DIR_VARIABLE: str(observations)},
    )
    result = SimulateExecutor(catalogue=_catalogue(())).execute(run, folder)
    return point_of(result, fraction=1.0, observed=read_observed(observations))


def _catalogue(prices: Sequence[str]) -> Catalogue:
    return Catalogue.load(overrides=tuple(prices) or (f"{_TYPE}=1",))


def _show(progress: Progress) -> None:
    if progress.result is not None:
        say(f"  {progress.run.run_id}: {progress.result.state}, {progress.result.wall_s:.1f} s {progress.result.cause}")


def facts_of(point: CanaryPoint) -> dict[str, Any]:
    """Return the figures of a whole run by the names of a forecast's figures."""
    resources = point.resources
    found: dict[str, Any] = {
        "time": point.wall_s,
        "CPU mean": resources.cpu_percent_mean,
        "memory mean": resources.memory_mean_bytes,
        "memory p99": resources.memory_p99_bytes,
        "memory peak": resources.memory_peak_bytes,
    }
    percents = sorted(resources.cpu_percents)
    found["CPU p99"] = percents[min(len(percents) - 1, int(0.99 * len(percents)))] if percents else None
    return {name: value for name, value in found.items() if value is not None}


logging.getLogger("hetero").setLevel(logging.WARNING)

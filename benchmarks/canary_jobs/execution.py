"""Runs canaries and whole jobs on this machine, and keeps what they measured."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import HERE, say

from canary_jobs import data as makers
from canary_jobs.jobs import SCRIPTS, Job
from hetero.decide.canary.conducting import run_canaries
from hetero.decide.canary.design import CanaryRequest, Cluster
from hetero.decide.canary.files import data_files
from hetero.decide.canary.forecast import ForecastOptions
from hetero.decide.canary.model import CanaryReport
from hetero.decide.canary.observations import point_of, read_observed
from hetero.decide.canary.points import CanaryPoint
from hetero.decide.studies.conduct import Progress
from hetero.decide.studies.executors import SimulateExecutor
from hetero.decide.studies.runs import PlannedRun
from hetero.documents.files import evict
from hetero.documents.records import decode, encode
from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE
from hetero.pricing import Catalogue

__all__ = ["canaries", "data_of", "folder_of", "kept_whole", "stamp_of"]

_TYPE = "ml.m5.large"
_ANALYSIS = ("comparison", "forecast", "line", "model", "page", "plots", "refusals", "square", "suggestions", "text")
"""Modules of `hetero.decide.canary` that compute from runs. A call with other ones uses the kept runs."""
_OPTIONS = {"usage_interval_s": 0.1, "warmup_steps": 3, "purity_checks": 0, "log_level": "warning"}


def data_of(job: Job, folder: Path, scale: float) -> Path | None:
    """Return the folder of a job's data, which is made if it is not there. Its name has a digest of what made it."""
    if job.make is None:
        return None
    path = folder / f"{job.make.func.__name__}-{scale:g}-{_data_digest(job)}"
    if not path.is_dir():
        say(f"making {path.name}")
        draft = path.with_name(f"{path.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        job.make(draft, scale)
        os.sync()
        draft.rename(path)
    return path


def folder_of(name: str, job: Job, work: Path, scale: float, clusters: Sequence[tuple[str, ...]] = ()) -> Path:
    """Return the folder of a job's runs, for example ``bert-1-0f3a9c12d4``.

    Its name has a digest of what the measurements depend on: script, arguments, data and the code of hetero, without
    the modules that only compute from kept runs.
    """
    content = (
        (SCRIPTS / job.script).read_bytes(),
        repr((arguments_of(job, scale), job.whole_samples, job.by_samples, clusters or job.groups, _OPTIONS)).encode(),
        _data_digest(job).encode(),
        *(path.read_bytes() for path in _measuring()),
    )
    return work / f"{name}-{scale:g}-{_digest(*content)}"


def _measuring() -> list[Path]:
    """Return the files of hetero that runs and their readings depend on."""
    found = sorted((HERE.parent / "hetero").rglob("*.py"))
    return [path for path in found if path.parent.name != "canary" or path.stem not in _ANALYSIS]


def stamp_of(folder: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return date and commit of the first run in a folder, which are those of ``facts`` if it is new."""
    path = folder / "stamp.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({name: facts[name] for name in ("date", "commit")}), encoding="utf-8")
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _data_digest(job: Job) -> str:
    if job.make is None:
        return ""
    return _digest(repr((job.make.func.__name__, job.make.keywords)).encode(), Path(makers.__file__).read_bytes())


def _digest(*contents: bytes) -> str:
    found = hashlib.sha256()
    for content in contents:
        found.update(hashlib.sha256(content).digest())
    return found.hexdigest()[:10]


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


def kept_whole(job: Job, folder: Path, *, data: Path | None, scale: float, groups: tuple[str, ...] = ()) -> CanaryPoint:
    """Return what a whole run used. It is run once for each folder, or again if it failed without a memory limit."""
    path = folder.with_name(f"{folder.name}.json")
    if path.is_file():
        return decode(CanaryPoint, json.loads(path.read_text(encoding="utf-8")))
    say(f"{job.name}: whole")
    point = whole(job, folder, data=data, scale=scale, groups=groups)
    say(f"  {point.wall_s:.1f} s {point.failure}")
    if not point.failure or job.limit_mib is not None:
        path.write_text(json.dumps(encode(point)), encoding="utf-8")
    return point


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


logging.getLogger("hetero").setLevel(logging.WARNING)

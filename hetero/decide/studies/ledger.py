"""The ledger of a study: one line of JSON for each run that began or ended, so a killed study can go on.

``runs.jsonl`` has three kinds of lines. The first line states what the study is (`Identity`). A ``started`` line is
written before a run and an ``ended`` line after it. Every line is on the disk before the study continues. A line that
is incomplete, because the study was killed while it wrote, is ignored and overwritten.

A run that has a ``started`` line and no ``ended`` line was interrupted. Its cost until the interruption counts, see
`Ledger.interrupted`. For this, the file ``alive`` in the run's folder has the time when the study last saw the run.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hetero.decide.studies.runs import FINISHED, STOPPED, EndedRun, PlannedRun, RunResult
from hetero.documents.files import read_bounded, write_text
from hetero.documents.records import decode, encode
from hetero.documents.text import shortened
from hetero.errors import ConfigError
from hetero.metrics.logged import thinned
from hetero.report.model import MAX_METRICS, REPORT_FILE_NAME, Report, load_report
from hetero.simulate.simulate import locked_folder

__all__ = [
    "JOB_FILE_NAME",
    "LEDGER_FILE_NAME",
    "RUNS_FOLDER",
    "Ledger",
    "RecordedRuns",
    "differences",
    "digest_of",
    "digest_of_script",
    "report_in",
]

logger = logging.getLogger(__name__)

LEDGER_FILE_NAME = "runs.jsonl"
RUNS_FOLDER = "runs"
JOB_FILE_NAME = "job.json"
"""File in a run's folder. It names the job that an executor started, also for the study's next start."""
_ALIVE_FILE_NAME = "alive"
_VERSION = 1
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended(EndedRun):
    """An ``ended`` line. The report of the run is in its folder."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A ``started`` line."""

    run_id: str
    digest: str
    started_at: str
    hourly_usd: float | None


def digest_of(run: PlannedRun) -> str:
    """Return a digest of everything that a run is made of. Paths in the folder of the study are relative to it."""
    # Leave out the folder of the study, because it may move between two starts.
    content = {each.name: getattr(run, each.name) for each in fields(run) if each.name != "study_folder"}
    if run.study_folder:
        # Use relative paths, because a study that was moved or copied could not continue with absolute paths.
        content["script"] = _relative(run.script, run.study_folder)
        content["channels"] = {name: _relative(path, run.study_folder) for name, path in run.channels.items()}
    text = json.dumps(content, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_script(path: Path) -> str:
    """Return a digest of a script's content. A study whose script has changed is another study.

    Raises:
        ConfigError: If the script cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"script: cannot read {path}: {error.strerror or error}") from error


def _relative(path: str, base: str) -> str:
    """Return a text for a path that stays the same if the folder of the study moves.

    For a path within the folder, it is the path relative to the folder. For a path outside, it is only the last name,
    because the folders before it may change when the study moves. Two paths outside may have the same last name. If the
    study's file is changed from one of them to the other, the identity of the study changes, so its ledger is rejected.
    """
    return str(Path(path).relative_to(base)) if Path(path).is_relative_to(base) else Path(path).name


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def report_in(folder: Path) -> Report | None:
    """Return the report in the folder of a run, or None without one. A malformed report is logged and left out."""
    if not (folder / REPORT_FILE_NAME).is_file():
        return None
    try:
        return load_report(folder)
    except ConfigError as error:
        logger.warning("the run in %s is kept without its report: %s", folder, error)
        return None


def differences(before: object, now: object, path: str = "") -> Iterator[str]:
    """Yield one line for each value that differs between two documents, with the path of the value."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif before != now:
        yield f"{path}: was {_short(before)}, is now {_short(now)}"


def _short(value: object) -> str:
    return "not stated" if value is None else shortened(json.dumps(value, default=str), 120)


class RecordedRuns:
    """The runs in the ledger of a folder. It reads the ledger once, and writes nothing.

    Args:
        folder: Folder of the study.
        identity: What the study is. A ledger of a study that differs is rejected. None: any ledger is accepted.

    Raises:
        ConfigError: If the ledger is missing, or belongs to another study or is malformed.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any] | None = None) -> None:
        self._path = folder / LEDGER_FILE_NAME
        self.results: dict[str, tuple[str, RunResult]] = {}
        """Last result of each run, with the digest of the run, without reports."""
        self.spent_usd = 0.0
        self.spent_s = 0.0
        self._not_ended: dict[str, _Started] = {}
        """Runs that began and have not ended."""
        self._complete_bytes = self._read(identity)

    def result(self, run: PlannedRun) -> RunResult | None:
        """Return the result of a run with its report, or None if it has not ended yet.

        Raises:
            ConfigError: If the run with this id in the ledger had other arguments, options or groups.
        """
        found = self.results.get(run.run_id)
        if found is None:
            return None
        digest, result = found
        if digest != digest_of(run):
            raise ConfigError(
                f"the ledger {self._path} has a run {run.run_id} with other arguments, options or groups\n"
                "  to do: give another --output-dir, or --fresh to begin again"
            )
        folder = self._path.parent / RUNS_FOLDER / run.run_id
        report = report_in(folder)
        # The ledger has only the metrics that are not in the report.
        logged = () if report is None else report.run.metrics
        metrics = tuple(sorted([*logged, *result.metrics], key=lambda value: value.at_s))
        return replace(result, report=report, metrics=metrics, levels=run.levels, replicate=run.replicate)

    def _read(self, identity: Mapping[str, Any] | None) -> int:
        """Read the complete lines, and return how many bytes they have. An incomplete last line is ignored."""
        to_do = "run the study first, or give the folder of one that has run"
        content = read_bounded(self._path, f"the ledger {self._path}", max_bytes=_MAX_BYTES, to_do=to_do)
        # Cut off a line without an end, which a study leaves if it is killed while it writes.
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):
            logger.warning("the last line of %s is incomplete and is ignored", self._path)
        found = []
        for line in complete.splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            # A malformed line becomes a line without a kind, which `_take_over` reports with its number.
            found.append(value if isinstance(value, dict) else {})
        self._take_over(found)
        if found and identity is not None:
            self._check_identity(found[0].get("identity"), identity)
        return len(complete)

    def _take_over(self, lines: Sequence[dict[str, Any]]) -> None:
        """Add the runs in the lines. Skip a malformed line, but reject a malformed first line.

        The first line says which study this is, so the other lines mean nothing without it.
        """
        for number, line in enumerate(lines, start=1):
            kind = line.pop("kind", None)
            try:
                if number == 1:
                    if kind != "study" or line.get("version") != _VERSION:
                        raise ConfigError(f"expected a study of version {_VERSION}")
                elif kind == "ended":
                    self._add(decode(_Ended, line))
                elif kind == "started":
                    started = decode(_Started, line)
                    # Reject a malformed time here, because `interrupted` computes with it.
                    dt.datetime.fromisoformat(started.started_at)
                    self._not_ended[started.run_id] = started
                else:
                    raise ConfigError(f"found kind {kind!r}, expected started or ended")
            # This also catches ConfigError, which is a ValueError.
            except ValueError as error:
                if number == 1:
                    raise ConfigError(f"{self._path}, line 1: {error}; {_TO_DO}") from error
                logger.warning("%s, line %d is malformed and is skipped: %s", self._path, number, error)

    def _check_identity(self, known: object, identity: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the ledger states another identity. A ledger without one belongs to every study."""
        # Compare with the identity as a ledger would have it, for example with lists instead of tuples.
        changed = list(differences(known, json.loads(json.dumps(identity, default=str))))
        if known is not None and changed:
            listed = "\n  ".join(changed[:10])
            raise ConfigError(
                f"{self._path} belongs to a study that differs from this one, so its runs cannot be compared\n"
                f"  {listed}\n  to do: undo the change, give another --output-dir, or give --fresh to begin again"
            )

    def _add(self, ended: _Ended) -> None:
        """Add a run that has ended: what it cost, and its result."""
        self._not_ended.pop(ended.run_id, None)
        self.spent_s += ended.wall_s
        self.spent_usd += ended.usd or 0.0
        # Keep no result of a stopped run, because it runs again.
        if ended.state != STOPPED:
            self.results[ended.run_id] = ended.digest, RunResult(**_values_of(ended))


class Ledger(RecordedRuns):
    """The ledger in a folder. A context manager: the folder is locked until its end. Use it on one thread at a time.

    Args:
        folder: Folder of the study. It is created if it does not exist.
        identity: What the study is. A ledger of a study that differs is rejected. None: any ledger is accepted.
        fresh: Whether to forget the runs of earlier starts. Their folders stay until runs of the same name begin.

    Raises:
        ConfigError: If the ledger belongs to another study or is malformed, or another study writes to the folder.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any] | None = None, *, fresh: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LEDGER_FILE_NAME
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked_folder(folder, "study"))
            # Delete the ledger only under the lock, because another study may be writing it. A second start with
            # --fresh once deleted the ledger before the lock refused this start. Delete the notes about submitted jobs
            # too, because an executor would follow these jobs instead of starting new ones.
            if fresh:
                for old in (path, *folder.glob(f"{RUNS_FOLDER}/*/{JOB_FILE_NAME}")):
                    old.unlink(missing_ok=True)
            self._file = stack.enter_context(path.open("ab"))
            super().__init__(folder, identity)
            # Cut off an incomplete line, because the next line must not continue it.
            os.truncate(path, self._complete_bytes)
            if not self._complete_bytes:
                self._append({"kind": "study", "version": _VERSION, "identity": identity})
            # Keep the lock and the file until `__exit__`. Any error above has released both.
            self._stack = stack.pop_all()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, run: PlannedRun, hourly_usd: float | None) -> None:
        """Record that a run begins now."""
        started = _Started(run_id=run.run_id, digest=digest_of(run), started_at=_now(), hourly_usd=hourly_usd)
        self._not_ended[run.run_id] = started
        self._append({"kind": "started", **encode(started)})

    def record_alive(self, run: PlannedRun) -> None:
        """Record that a run is being executed now. If the study is killed, `interrupted` reads this time."""
        folder = self._path.parent / RUNS_FOLDER / run.run_id
        # Ignore errors, because a full disk must not end the run.
        with contextlib.suppress(OSError):
            write_text(folder / _ALIVE_FILE_NAME, _now() + "\n")

    def end(self, run: PlannedRun, result: RunResult) -> None:
        """Record how a run ended."""
        # Leave out the metrics that the report has, because a result is read together with its report.
        in_report = set() if result.report is None else set(result.report.run.metrics)
        metrics = thinned([value for value in result.metrics if value not in in_report], MAX_METRICS)
        ended = _Ended(**{**_values_of(result), "metrics": metrics}, digest=digest_of(run))
        self._add(ended)
        self._append({"kind": "ended", **encode(ended)})

    def interrupted(self, run: PlannedRun) -> RunResult | None:
        """Return a result for a run that an earlier start of the study began and did not end, or None.

        The wall time of the result ends when the study last saw the run, see `record_alive`.
        """
        started = self._not_ended.get(run.run_id)
        if started is None:
            return None
        folder = self._path.parent / RUNS_FOLDER / run.run_id
        wall_s = 0.0
        # If the executor goes on with the job of the run, the wall time is 0, because the result of the job will have
        # the whole time and cost.
        if not (folder / JOB_FILE_NAME).exists():
            # If the study never saw the run, the file is missing, and the wall time is 0.
            with contextlib.suppress(OSError, ValueError):
                seen = dt.datetime.fromisoformat((folder / _ALIVE_FILE_NAME).read_text().strip())
                wall_s = max(0.0, (seen - dt.datetime.fromisoformat(started.started_at)).total_seconds())
        return RunResult(
            run_id=run.run_id,
            state=STOPPED,
            # The exit code is not known. Take that of a killed process.
            exit_code=-9,
            cause="the study was interrupted",
            started_at=started.started_at,
            wall_s=wall_s,
            usd=None if started.hourly_usd is None else started.hourly_usd * wall_s / 3600,
        )

    def forget_failed(self) -> None:
        """Let failed runs run again. What they cost still counts."""
        for name, (_, result) in list(self.results.items()):
            if result.state != FINISHED:
                self.forget_job(name)
                del self.results[name]

    def forget_job(self, run_id: str) -> None:
        """Remove the note about the job of a run that is to run again."""
        (self._path.parent / RUNS_FOLDER / run_id / JOB_FILE_NAME).unlink(missing_ok=True)

    def _append(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, default=str, allow_nan=False).encode() + b"\n")
        self._file.flush()
        # Write to the disk before the study continues, because the machine may crash then.
        os.fsync(self._file.fileno())


_TO_DO = "give another --output-dir, or --fresh to begin again"


def _values_of(run: EndedRun) -> dict[str, Any]:
    return {each.name: getattr(run, each.name) for each in fields(EndedRun)}


def _now() -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")

"""Executes the runs of a study as SageMaker training jobs.

A function of the user makes the estimator of each run. The executor submits the job, follows it, and makes a result
from the service's description of the job and from the report in its output. The name of a submitted job is in
``job.json`` in the run's folder. If the study is killed, the job continues, and the next start follows it.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import logging
import re
import secrets
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, cast

from hetero.cluster import slug
from hetero.decide.studies.ledger import JOB_FILE_NAME, digest_of, report_in
from hetero.decide.studies.runs import FAILED, FINISHED, PlannedRun, RunResult
from hetero.decide.studies.study_file import Metric, Study
from hetero.documents.files import read_bounded, write_text
from hetero.documents.text import one_line
from hetero.errors import CapacityError, ConfigError, ExitCode, HeteroError, first_line
from hetero.metrics.logged import LoggedMetric, is_metric_name
from hetero.pricing import Catalogue
from hetero.report.model import REPORT_FILE_NAME
from hetero.sagemaker.preparation.adapters import adapter_of
from hetero.sagemaker.preparation.metric_definitions import logged_metric
from hetero.sagemaker.submission.shortages import is_shortage
from hetero.sagemaker.submission.submit import FIRST_WAIT_S, failure_code, follow, submit, with_end

__all__ = ["EstimatorExecutor", "from_study", "noted_job"]

logger = logging.getLogger(__name__)

_MAX_OUTPUT_BYTES = 4 << 30
_MAX_PARALLEL = 100
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

Download = Callable[[Any, str, Path], bool]
"""Takes an estimator's session, the S3 URI of an object and a file. Writes the object to the file, and returns False if
the object is missing."""


class _StoppedError(Exception):
    """The study was asked to stop while a job was waiting for instances."""


@dataclass(slots=True)
class _Job:
    """The last job that was submitted for a run."""

    name: str
    may_run: bool = False
    """Whether the job may run or may have run. False if no job was submitted, or the job ended without instances."""


class _Made(NamedTuple):
    """What the user's function has made for a run."""

    estimator: Any
    inputs: Any


class EstimatorExecutor:
    """Executes runs as jobs of estimators, at most ``at_most`` at once.

    Args:
        make: Returns the estimator of a run, or the estimator and its inputs. It gets the run, whose ``levels`` and
            ``script_args`` have everything that varies. SDK 2 and SDK 3 both work.
        at_most: Number of jobs at the same time, 1 to 100.
        catalogue: Prices of the instance types.
        name: Name of the study. The names of the jobs begin with it.
        metrics: Metrics to add to the metric definitions of each estimator.
        download: Reads objects from S3. Default: the session's boto3 client.
        sleep: Function that waits a number of seconds.

    Raises:
        ConfigError: If ``at_most`` is out of range.
    """

    def __init__(
        self,
        make: Callable[[PlannedRun], Any],
        *,
        at_most: int = 1,
        catalogue: Catalogue,
        name: str = "study",
        metrics: Sequence[Metric] = (),
        download: Download | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 1 <= at_most <= _MAX_PARALLEL:
            raise ConfigError(f"at_most is {at_most}; expected 1 to {_MAX_PARALLEL}")
        self.max_parallel = at_most
        self._make = make
        self._catalogue = catalogue
        self._name = slug(name)
        self._metrics = tuple(metrics)
        self._download = _from_s3 if download is None else download
        self._sleep_s = sleep
        self._lock = threading.Lock()
        self._active: dict[str, Any] = {}
        """Client of each job that was submitted and has not ended."""
        self._asked: set[str] = set()
        """Jobs that the service was asked to stop."""
        self._is_stopped = threading.Event()
        self._prices: dict[str, float | None] = {}
        """Hourly price of each run in USD, None if a price is unknown. By id of the run."""
        self._billed_since: dict[str, dt.datetime] = {}
        """When the job of each run got its hosts. Jobs that wait for hosts are missing."""

    def hourly_usd(self, run: PlannedRun) -> float | None:
        """Return the price of all instances of the run per hour, or None if a price is unknown."""
        if run.run_id not in self._prices:
            groups = adapter_of(self._made(run).estimator).groups()
            self._prices[run.run_id] = self._catalogue.hourly_usd((each.instance_type, each.count) for each in groups)
        return self._prices[run.run_id]

    def billed_s(self, run: PlannedRun) -> float:
        """Return the seconds since the job of a run got its hosts, 0 if it waits for them. Thread-safe."""
        since = self._billed_since.get(run.run_id)
        return 0.0 if since is None else max(0.0, (dt.datetime.now(dt.timezone.utc) - since).total_seconds())

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        """Submit the job of a run and wait for its end, or follow the job that an earlier start submitted."""
        # Make the estimator, and a function that notes when the job got its hosts.
        usd_per_hour = self.hourly_usd(run)
        started_at = _text(dt.datetime.now(dt.timezone.utc))
        made = self._made(run)
        client = made.estimator.sagemaker_session.sagemaker_client

        def note_start(description: Mapping[str, Any]) -> None:
            # Count from the time when the job had its hosts. A job that waited two hours for instances once passed the
            # budget, although a wait costs nothing.
            if isinstance(description.get("TrainingStartTime"), dt.datetime):
                self._billed_since[run.run_id] = description["TrainingStartTime"]

        # If the run is repeated, the time of its earlier job does not count.
        self._billed_since.pop(run.run_id, None)
        # `job` changes with each attempt. `job.may_run` says whether a job may run now, and cost money.
        job = _Job(name=noted_job(folder, digest_of(run)))
        try:
            # Follow the job of an earlier start, if there is one.
            if job.name:
                job.may_run = True
                logger.info("following %s, which an earlier start of the study submitted", job.name)
                self._enter(job.name, client)
                description = follow(client, job.name, sleep=self._sleep_s, on_description=note_start)
                # If the job ended without instances, submit it again. A study that was killed while its job waited once
                # recorded CapacityError as the result of the run.
                job.may_run = not _lacked_instances(description)
            # An earlier job is missing, or it got no instances.
            if not job.may_run:
                # This changes `job.name` and `job.may_run` in each attempt, and returns when a job has its instances.
                self._submit(run, made, folder, job)
                self._enter(job.name, client)
                description = follow(client, job.name, sleep=self._sleep_s, on_description=note_start)
        except Exception as error:
            # If the job may still run, end the study, and follow the job at the next start. Expired credentials once
            # made a running job a failed run that cost USD 0, and a later start submitted a second job beside it. After
            # a CapacityError no job runs, because the last one got no instances.
            if job.may_run and not isinstance(error, CapacityError):
                raise _lost(job.name, folder, error) from error
            # A mistake of the user or of this machine would fail all further runs too.
            if isinstance(error, (ConfigError, MemoryError)):
                raise
            # If the service rejects a job, the run has failed, and the study goes on.
            return _failed(run, error, started_at)
        finally:
            self._leave(job.name)
        # Fetch the report. A report of an earlier attempt in the folder is not this job's.
        report_file = folder / REPORT_FILE_NAME
        report_file.unlink(missing_ok=True)
        self._fetch_report(made, description, report_file)
        return _result(run, description, folder, started_at=started_at, hourly_usd=usd_per_hour)

    def stop(self) -> None:
        """Ask the service to stop all jobs that run. Thread-safe, idempotent."""
        self._is_stopped.set()
        with self._lock:
            active = {name: client for name, client in self._active.items() if name not in self._asked}
        for job_name, client in active.items():
            self._stop_job(job_name, client)

    def _stop_job(self, job_name: str, client: Any) -> None:
        self._asked.add(job_name)
        try:
            client.stop_training_job(TrainingJobName=job_name)
        except Exception as error:  # noqa: BLE001  the job may just have ended
            logger.warning("cannot stop %s: %s", job_name, error)

    def _enter(self, job_name: str, client: Any) -> None:
        """Add a job to those that `stop` stops. If `stop` was called before, stop the job."""
        with self._lock:
            is_new = job_name not in self._active
            self._active[job_name] = client
        # `stop` has read the active jobs before this job was added, so stop the job here.
        if is_new and self._is_stopped.is_set():
            self._stop_job(job_name, client)

    def _leave(self, job_name: str) -> None:
        with self._lock:
            self._active.pop(job_name, None)

    def _made(self, run: PlannedRun) -> _Made:
        """Call the user's function for a run, and return its estimator and inputs."""
        try:
            made = self._make(run)
        except HeteroError:
            raise
        except Exception as error:  # the user's code
            name = getattr(self._make, "__qualname__", repr(self._make))
            raise ConfigError(
                f"the function {name}, which makes the estimator of a run, raised {type(error).__name__}: "
                f"{one_line(str(error), 300)}\n"
                f"  in: run {run.run_id}\n"
                "  to do: correct the function. It gets the run, whose levels have everything that varies"
            ) from error
        estimator, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        adapter_of(estimator).add_metrics(
            [
                {"Name": metric.name, "Regex": metric.regex} if metric.regex else logged_metric(metric.name)
                for metric in self._metrics
            ]
        )
        return _Made(estimator, inputs)

    def _submit(self, run: PlannedRun, made: _Made, folder: Path, job: _Job) -> None:
        """Submit the job of a run, again after each shortage, and wait until the job has its instances."""

        def note(job_name: str) -> None:
            """Record a job that `submit` has submitted."""
            # A new name means a new attempt, so the job of the attempt before got no instances.
            self._leave(job.name)
            job.name, job.may_run = job_name, True
            # Write the name as soon as it is known. If the study is killed, its next start then follows the job instead
            # of paying for a second one.
            write_text(folder / JOB_FILE_NAME, json.dumps({"job_name": job_name, "digest": digest_of(run)}) + "\n")
            self._enter(job_name, made.estimator.sagemaker_session.sagemaker_client)

        def wait(seconds: float) -> None:
            """Wait for `submit`. Raise `_StoppedError` if the study was asked to stop and no job may run.

            `submit` waits in two places. It waits a few seconds before it asks again for the state of a job. After a
            job has ended without instances, it waits at least FIRST_WAIT_S before the next attempt.
            """
            # This is the wait before the next attempt, so no job runs.
            if seconds >= FIRST_WAIT_S:
                job.may_run = False
            # If a job may run, `stop` asks the service to stop it, and `submit` then notices its end.
            if self._is_stopped.is_set() and not job.may_run:
                raise _StoppedError("the study was asked to stop before the job had instances")
            self._sleep_s(seconds)

        if self._is_stopped.is_set():
            raise _StoppedError("the study was asked to stop before the job was submitted")
        number = run.run_id.partition("-")[0]
        # The random end keeps a run that is repeated within a second apart from its first attempt.
        end = f"-{number}-{time.strftime('%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
        name = with_end(self._name, end)
        submit(made.estimator, made.inputs, job_name=name, wait=False, sleep=wait, on_submit=note)

    def _fetch_report(self, made: _Made, description: Mapping[str, Any], target: Path) -> None:
        """Write the report from the job's output, if the job wrote one. An error is logged."""
        uri = str(description.get("OutputDataConfig", {}).get("S3OutputPath", "")).rstrip("/")
        if not uri:
            return
        with tempfile.TemporaryDirectory(prefix="hetero-study-") as folder:
            archive = Path(folder) / "output.tar.gz"
            try:
                uri = f"{uri}/{description['TrainingJobName']}/output/output.tar.gz"
                if self._download(made.estimator.sagemaker_session, uri, archive):
                    _extract_report(archive, target)
            except Exception as error:  # noqa: BLE001  without its report a run still has its time and cost
                logger.warning("cannot read the report of %s from %s: %s", description["TrainingJobName"], uri, error)


def from_study(study: Study, catalogue: Catalogue) -> EstimatorExecutor:
    """Return the executor of a study with ``executor: {sagemaker: {estimator: "module:function", at_most: N}}``.

    The module is imported from the folder of the study, or from Python's path.

    Raises:
        ConfigError: If the settings are malformed, or the function cannot be imported.
    """
    settings = study.executor.settings
    unknown = next((name for name in settings if name not in ("estimator", "at_most")), None)
    if unknown is not None:
        raise ConfigError(f"executor.sagemaker.{unknown}: unknown key, expected one of estimator, at_most")
    reference, at_most = settings.get("estimator"), settings.get("at_most", 1)
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        raise ConfigError(
            f"executor.sagemaker.estimator: found {reference!r}, expected MODULE:FUNCTION, which makes the estimator "
            "of a run"
        )
    if not isinstance(at_most, int):
        raise ConfigError(f"executor.sagemaker.at_most: found {at_most!r}, expected a whole number")
    folder = str(study.path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module, _, name = reference.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)  # allowed: the user's own function
    except Exception as error:  # a module of the user raises anything
        why = f"cannot import {reference!r} from {folder}: {type(error).__name__}: {one_line(str(error), 300)}"
        raise ConfigError(f"executor.sagemaker.estimator: {why}") from error
    return EstimatorExecutor(make, at_most=at_most, catalogue=catalogue, name=study.name, metrics=study.metrics)


def noted_job(folder: Path, digest: str | None = None) -> str:
    """Return the name of the job that was submitted for a run, or an empty text.

    Args:
        folder: The run's folder.
        digest: Digest of the run. A job of another run does not count. With None, any job counts.
    """
    path = folder / JOB_FILE_NAME
    if not path.is_file():
        return ""
    try:
        note = json.loads(read_bounded(path, source=str(path)))
        return str(note["job_name"]) if digest in (None, note["digest"]) else ""
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is malformed, so no job was submitted: %s", path, error)
        return ""


def _lacked_instances(description: Mapping[str, Any]) -> bool:
    """Return whether a job ended because the service had no instances for it. Such a job costs nothing."""
    return description["TrainingJobStatus"] == "Failed" and is_shortage(str(description.get("FailureReason", "")))


def _lost(job_name: str, folder: Path, error: Exception) -> ConfigError:
    """Return the error that ends a study whose job cannot be followed. The run stays open in the ledger."""
    return ConfigError(
        f"cannot follow {job_name}: {one_line(f'{type(error).__name__}: {error}', 300)}\n"
        "  the job continues and costs money\n"
        "  to do: renew the credentials or wait for the network, then start the study again, which follows the job\n"
        f"  or, if the job does not exist any more: delete {folder / JOB_FILE_NAME}, and a new job is submitted"
    )


def _failed(run: PlannedRun, error: Exception, started_at: str) -> RunResult:
    """Return the result of a run whose job did not begin."""
    code = error.exit_code if isinstance(error, HeteroError) else ExitCode.SCRIPT_FAILED
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, HeteroError):
        # The further lines of a CapacityError say which instance types are missing and why. Those of other errors are
        # advice.
        text = str(error) if isinstance(error, CapacityError) else first_line(error)
    return RunResult(
        run_id=run.run_id,
        state=FAILED,
        exit_code=int(code),
        cause=one_line(text, 500),
        started_at=started_at,
        wall_s=0.0,
        usd=0.0,
    )


def _result(
    run: PlannedRun, description: Mapping[str, Any], folder: Path, *, started_at: str, hourly_usd: float | None
) -> RunResult:
    """Return the result of a job that has ended, from the service's description and the report."""
    status, failure = description["TrainingJobStatus"], str(description.get("FailureReason", ""))
    is_good = status == "Completed"
    began = description.get("TrainingStartTime") or description.get("CreationTime")
    billed_s = _billed_s(description)
    report = report_in(folder)
    # The report has all values of a metric, and the service only the last one.
    logged = () if report is None else report.run.metrics
    names = {value.name for value in logged}
    metrics = [*logged, *(value for value in _final_metrics(description, began) if value.name not in names)]
    # 143 is the code of a job that SIGTERM has ended.
    exit_code = {"Completed": 0, "Stopped": 143}.get(status, failure_code(failure))
    return RunResult(
        run_id=run.run_id,
        state=FINISHED if is_good else FAILED,
        exit_code=exit_code,
        cause="" if is_good else one_line(failure, 500) or f"the job ended with status {status}",
        started_at=_text(began) if isinstance(began, dt.datetime) else started_at,
        wall_s=billed_s,
        usd=None if hourly_usd is None else hourly_usd * billed_s / 3600,
        metrics=tuple(metrics),
        phases=_phases(description),
        report=report,
    )


def _billed_s(description: Mapping[str, Any]) -> float:
    """Return the seconds that each instance of the job is billed."""
    for name in ("BillableTimeInSeconds", "TrainingTimeInSeconds"):
        if isinstance(description.get(name), (int, float)):
            return float(description[name])
    began, ended = description.get("TrainingStartTime"), description.get("TrainingEndTime")
    if isinstance(began, dt.datetime) and isinstance(ended, dt.datetime):
        return max(0.0, (ended - began).total_seconds())
    return 0.0


def _phases(description: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase that the service states, such as Starting, Downloading and Training."""
    found: dict[str, float] = {}
    for each in description.get("SecondaryStatusTransitions", ()):
        began, ended = each.get("StartTime"), each.get("EndTime")
        if isinstance(began, dt.datetime) and isinstance(ended, dt.datetime):
            name = str(each.get("Status", "")).lower()[:60]
            found[name] = found.get(name, 0.0) + max(0.0, (ended - began).total_seconds())
    # The service also lists the final state of a job, which is not a phase.
    return {name: seconds for name, seconds in found.items() if name not in ("completed", "failed", "stopped")}


def _final_metrics(description: Mapping[str, Any], began: object) -> list[LoggedMetric]:
    """Return the last value of each metric that the service read from the logs, except hetero's own figures.

    The time of a value is the time of its last log line, in seconds since the start of the job. The value gets no
    wall-clock time, because a study would read it as the time when the metric first reached the value. The service does
    not state that time.
    """
    found = []
    for each in description.get("FinalMetricDataList", ()):
        name, value, at = str(each.get("MetricName", "")), each.get("Value"), each.get("Timestamp")
        if not is_metric_name(name) or name.startswith("hetero:") or not isinstance(value, (int, float)):
            continue
        at_s = 0.0
        # The service may lack the time of a metric, or the time when the job began.
        if isinstance(at, dt.datetime) and isinstance(began, dt.datetime):
            at_s = max(0.0, at.timestamp() - began.timestamp())
        found.append(LoggedMetric(name=name, value=float(value), at_s=at_s))
    return found


def _from_s3(session: Any, uri: str, target: Path) -> bool:
    """Write an object of S3 to a file, with the session's account. Return False if the object is missing."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    client = session.boto_session.client("s3")
    try:
        size = client.head_object(Bucket=bucket, Key=key)["ContentLength"]
    except client.exceptions.ClientError as error:
        if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
            return False
        raise
    if size > _MAX_OUTPUT_BYTES:
        raise ConfigError(f"the output has {size} bytes; expected at most {_MAX_OUTPUT_BYTES}")
    client.download_file(bucket, key, str(target))
    return True


def _extract_report(archive: Path, target: Path) -> None:
    """Write the report in a job's output archive to a file. Do nothing without one."""
    with tarfile.open(archive, mode="r|gz") as content:
        for member in content:
            if member.isreg() and PurePosixPath(member.name).name == REPORT_FILE_NAME:
                source = cast("IO[bytes]", content.extractfile(member))
                with target.open("wb") as file:
                    shutil.copyfileobj(source, file)
                return


def _text(time_of: dt.datetime) -> str:
    return time_of.astimezone(dt.timezone.utc).isoformat(timespec="milliseconds")

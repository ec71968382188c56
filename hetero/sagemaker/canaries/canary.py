"""`canary`: forecast the job of an estimator from training jobs on a few percent of its files."""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetero.cluster import Role, slug
from hetero.decide.canary.comparison import decide
from hetero.decide.canary.conducting import execute_canaries, raise_over_budget, write_report
from hetero.decide.canary.design import Cluster, check_fractions, check_real, check_repeats, run_name
from hetero.decide.canary.files import DataFile, choose_files
from hetero.decide.canary.forecast import ForecastOptions, forecast
from hetero.decide.canary.model import SCHEMA_VERSION, CanaryReport, Candidate
from hetero.decide.canary.points import CanaryPoint, Resources
from hetero.decide.canary.refusals import percent
from hetero.decide.studies.ledger import RUNS_FOLDER
from hetero.decide.studies.runs import PlannedRun, RunResult
from hetero.decide.studies.study_file import Budget
from hetero.documents.text import counted
from hetero.errors import ConfigError
from hetero.pricing import Catalogue
from hetero.sagemaker.canaries.identity import digest_of_text, identity_of
from hetero.sagemaker.canaries.manifests import (
    channels_of,
    channels_of_sdk,
    list_objects,
    manifest_text,
    sdk_inputs,
    split_uri,
)
from hetero.sagemaker.canaries.watching import names_of_trainers, point_of_job, resources_of_job
from hetero.sagemaker.checks.facts import roles_of
from hetero.sagemaker.preparation.adapters import adapter_of
from hetero.sagemaker.recording import ACCOUNT, copy_of, record, sdk_version
from hetero.sagemaker.request import Channel, RequestGroup
from hetero.sagemaker.study_executor import EstimatorExecutor, noted_job

__all__ = ["canary"]

logger = logging.getLogger(__name__)

_FOLDER = "hetero-canary"


def canary(
    estimator: Any,
    inputs: Any,
    *,
    fractions: Sequence[float] = (0.01, 0.02, 0.03),
    repeats: int = 3,
    candidates: Sequence[str] = (),
    whole: Sequence[str] = (),
    output_dir: Path | str = "canary",
    at_most: int = 3,
    catalogue: Catalogue | None = None,
    budget_usd: float | None = None,
    seed: int = 0,
    options: ForecastOptions | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CanaryReport:
    """Forecast time, cost, CPU, memory and GPU of an estimator's job, and write the forecast.

    Each canary is a training job of the same estimator on a few percent of the files. The estimator may be of any
    algorithm. The channels get manifests with some of their objects. The channels ``code``, ``sm_drivers`` and
    ``recipe`` of SDK 3 stay whole. Times come from the jobs' descriptions, resources from CloudWatch. The call blocks
    until all jobs have ended. After a job that fails, no more jobs of its cluster begin, and those that run end
    normally.

    If the call is repeated with the same folder, it goes on where it was. It then needs the same inputs, candidates,
    fractions and ``whole``, and the same hyperparameters, image, environment and source code. Only the token that
    `prepare` makes may differ.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3. The call does not change it.
        inputs: The inputs that its ``fit`` or ``train`` takes.
        fractions: At least three fractions of the data, each in (0, 0.5], the largest at least twice the smallest.
        repeats: Jobs of each fraction. The jobs of a cluster together have at most the whole data.
        candidates: Clusters to compare, each ``TYPE:COUNT``. Empty means only the estimator's own cluster.
        whole: Channels that every job gets whole.
        output_dir: Folder of the study. It gets ``canary.json``, ``canary.md`` and ``canary.html``.
        at_most: Jobs at the same time.
        catalogue: Prices and memory of instance types. None means the shipped facts without prices.
        budget_usd: Highest cost of all canary jobs together.
        seed: Seed that chooses the files.
        options: Options of the forecast.
        sleep: Function that waits a number of seconds.

    Raises:
        BudgetError: If the budget does not allow a job. The forecast from the jobs that ended is written.
        ConfigError: If a value is out of its bounds, a channel has too few files, or a candidate is malformed.
    """
    # Plan the jobs, and check them before the first one costs money.
    folder = Path(output_dir)
    catalogue = catalogue or Catalogue.load()
    estimators = _estimators(estimator, candidates)
    check_fractions(fractions, "fractions")
    check_repeats(repeats, len(fractions), len(estimators), "repeats")
    study = _Study(estimator, inputs, estimators, whole, folder=folder, seed=seed)
    # Number the jobs by replicate first, because more replicates must not change the names of the other runs.
    cells = itertools.product(range(1, repeats + 1), estimators, fractions)
    planned = [
        study.planned(cluster, fraction, replicate, run_name(number, fraction, replicate))
        for number, (replicate, cluster, fraction) in enumerate(cells, start=1)
    ]
    # Check the fractions before the first manifest is written. With three objects, nine paid jobs once started on 33 %
    # of the data each.
    study.check(planned)
    executor = _Executor(
        study, planned, at_most=at_most, catalogue=catalogue, name=f"canary-{_name_of(estimator)}", sleep=sleep
    )
    # Execute the jobs that are left.
    options = options or ForecastOptions()
    results, over_budget = execute_canaries(
        [each.run for each in planned],
        executor,
        folder,
        budget=Budget(usd=budget_usd),
        on_progress=None,
        identity={
            "estimator": _name_of(estimator),
            "fractions": list(fractions),
            "seed": seed,
            "candidates": [list(_cluster(each).groups) for each in estimators.values()],
            "whole": sorted(whole),
            **study.identity,
        },
        # A forecast that accepts failed jobs needs the other jobs, so they go on after a failure.
        accepts_failures="failed" in options.accept,
    )
    # Write the forecast also if the budget ended the study.
    report = study.report(planned, results, catalogue, options)
    write_report(report, folder)
    raise_over_budget(over_budget, folder, "budget_usd")
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    run: PlannedRun
    fraction: float
    """Share of the bytes that the job gets."""
    files: Mapping[str, Sequence[DataFile]]
    """The objects of each reduced channel."""


class _Executor(EstimatorExecutor):
    """Writes the manifests of each run before its job is submitted."""

    def __init__(self, study: _Study, planned: Sequence[_Planned], **options: Any) -> None:
        super().__init__(study.made, **options)
        self._study = study
        self._planned = {each.run.run_id: each for each in planned}

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        """Submit the job of a run, see `EstimatorExecutor.execute`."""
        self._study.put_manifests(self._planned[run.run_id])
        return super().execute(run, folder)


class _Study:
    """The canary jobs of one estimator."""

    def __init__(
        self,
        estimator: Any,
        inputs: Any,
        estimators: Mapping[str, Any],
        whole: Sequence[str],
        *,
        folder: Path,
        seed: int,
    ) -> None:
        self._estimators = estimators
        self._seed = seed
        self._folder = folder
        self._version = sdk_version(estimator)
        recording = record(estimator, inputs)
        if recording.local_data:
            raise ConfigError(
                f"the input {next(iter(recording.local_data.values()))} is on this machine; expected data in S3\n"
                "  to do: upload it, or run hetero canary with the script on this machine"
            )
        self._roles = roles_of(recording.request)
        self._job = identity_of(recording)
        self._channels = channels_of(recording.request, without=channels_of_sdk(estimator, version=self._version))
        unknown = sorted(set(whole) - {channel.name for channel in self._channels})
        if unknown:
            raise ConfigError(f"whole names {unknown[0]!r}; the channels are {self._names()}")
        # A manifest can replace only a prefix.
        reducible = [each for each in self._channels if each.source.get("S3DataType", "S3Prefix") == "S3Prefix"]
        self._reduced = [channel for channel in reducible if channel.name not in whole]
        if not self._reduced:
            raise ConfigError(f"no channel can be reduced, of {self._names()}; expected one with S3DataType S3Prefix")
        self._session = estimator.sagemaker_session
        self._client = self._session.boto_session.client("s3")
        self._objects = {channel.name: list_objects(self._client, channel.uri) for channel in self._reduced}
        self._num_bytes = sum(file.num_bytes for files in self._objects.values() for file in files)
        self._manifests_uri = _target_uri(recording.request.document, self._session)
        self._job_label = _name_of(estimator)

    def _names(self) -> str:
        return ", ".join(channel.name for channel in self._channels) or "none"

    @property
    def identity(self) -> dict[str, object]:
        """What must be the same if a killed study goes on."""
        return {
            **self._job,
            "inputs": {channel.name: channel.document for channel in self._channels},
            "bytes of the channels": self._num_bytes,
        }

    def planned(self, cluster: str, fraction: float, replicate: int, run_id: str) -> _Planned:
        """Return one job.

        Args:
            cluster: Name of the cluster, a key of the estimators.
            fraction: Share of the data that the job should get.
            replicate: Number of the job among the jobs with the same cluster and fraction, from 1.
            run_id: Id of the run.
        """
        groups = adapter_of(self._estimators[cluster]).groups()
        files = {channel.name: self._chosen(channel, groups, fraction, replicate) for channel in self._reduced}
        num_bytes = sum(file.num_bytes for chosen in files.values() for file in chosen)
        run = PlannedRun(
            run_id=run_id,
            levels={"cluster": cluster, "fraction": fraction},
            replicate=replicate,
            script=self._job_label,
            groups=_cluster(self._estimators[cluster]).groups,
            channels={
                channel.name: self._manifest_uri(run_id, channel, files[channel.name]) for channel in self._reduced
            },
        )
        # Objects are whole, so the real fraction differs from ``fraction``.
        return _Planned(run=run, fraction=num_bytes / self._num_bytes, files=files)

    def check(self, planned: Sequence[_Planned]) -> None:
        """Raise `ConfigError` if the jobs give no forecast, or have more than the whole data together.

        Jobs get whole objects. With few objects, jobs of different fractions may get the same share of the bytes, and a
        forecast needs different shares. `check_real` checks the shares that the jobs really get.
        """
        num_objects = sum(len(files) for files in self._objects.values())
        what = f"the channels have {counted(num_objects, 'object')}"
        for cluster in self._estimators:
            fractions = [each.fraction for each in planned if each.run.levels["cluster"] == cluster]
            check_real(fractions, what, "divide the data into more objects, or give larger fractions")
            if sum(fractions) > 1:
                raise ConfigError(
                    f"{what}, and the {len(fractions)} canary jobs of {cluster} have {percent(sum(fractions))} of the "
                    "data together\n  to do: run the whole job instead, or give smaller fractions or fewer repeats"
                )

    def _chosen(
        self, channel: Channel, groups: Sequence[RequestGroup], fraction: float, replicate: int
    ) -> list[DataFile]:
        """Return the objects of a channel that a job gets."""
        # Each host of a sharded channel must get at least one object.
        min_objects = sum(group.count for group in groups) if channel.is_sharded else 1
        # `choose_files` numbers replicates from 0.
        return choose_files(
            self._objects[channel.name], fraction, seed=self._seed, replicate=replicate - 1, min_files=min_objects
        )

    def _manifest_uri(self, run_id: str, channel: Channel, files: Sequence[DataFile]) -> str:
        """Return where a manifest goes. The URI has a digest, so manifests of other canaries have other URIs."""
        name = f"{channel.name}-{digest_of_text(manifest_text(channel.uri, files))}.manifest"
        return f"{self._manifests_uri}/{_FOLDER}/{slug(self._job_label)}/{slug(run_id)}/{name}"

    def put_manifests(self, planned: _Planned) -> None:
        """Write the manifests of a job to S3."""
        for channel in self._reduced:
            bucket, key = split_uri(planned.run.channels[channel.name])
            text = manifest_text(channel.uri, planned.files[channel.name])
            self._client.put_object(Bucket=bucket, Key=key, Body=text.encode(), ContentType="application/json")

    def made(self, run: PlannedRun) -> tuple[Any, Any]:
        """Return the estimator and the inputs of a job."""
        estimator = copy_of(self._estimators[str(run.levels["cluster"])])
        return estimator, sdk_inputs(self._version, self._channels, run.channels)

    def report(
        self, planned: Sequence[_Planned], results: Sequence[RunResult], catalogue: Catalogue, options: ForecastOptions
    ) -> CanaryReport:
        """Return the forecast from the results of all jobs."""
        by_id = {result.run_id: result for result in results}
        watch = self._session.boto_session.client("cloudwatch")
        forecasts = []
        for name, estimator in self._estimators.items():
            groups = adapter_of(estimator).groups()
            hosts = _Hosts.of(groups, self._roles, catalogue)
            # A run that the budget did not allow lacks a result.
            runs = [each for each in planned if each.run.levels["cluster"] == name and each.run.run_id in by_id]
            points = tuple(self._point(watch, each, by_id[each.run.run_id], hosts) for each in runs)
            has_resources = all(point.resources.cpu_percent_mean is not None for point in points)
            notes = () if has_resources else (_NO_RESOURCES,)
            candidate = Candidate(
                name=_cluster(estimator).name,
                groups=_cluster(estimator).groups,
                points=points,
                hourly_usd=catalogue.hourly_usd((group.instance_type, group.count) for group in groups),
                memory_limit_bytes=hosts.memory_bytes,
                data_bytes=float(self._num_bytes),
                notes=notes,
            )
            # Canaries on SageMaker are never simulated, whatever the caller's options state.
            forecasts.append(forecast(candidate, replace(options, basis="measured")))
        return CanaryReport(
            schema_version=SCHEMA_VERSION,
            command=self._job_label,
            how=f"Each job gets a fraction of the objects of {', '.join(each.name for each in self._reduced)}, through "
            "a manifest. Fractions are shares of the bytes.",
            candidates=tuple(each.candidate for each in forecasts),
            decision=decide(forecasts),
        )

    def _point(self, watch: Any, planned: _Planned, result: RunResult, hosts: _Hosts) -> CanaryPoint:
        job_name = noted_job(self._folder / RUNS_FOLDER / result.run_id)
        resources = self._watched(watch, job_name, result, hosts) if job_name else Resources()
        return point_of_job(result, fraction=planned.fraction, resources=resources)

    def _watched(self, watch: Any, job_name: str, result: RunResult, hosts: _Hosts) -> Resources:
        """Return the resources of a job. Only log an error of CloudWatch, because the time is known without it."""
        names = names_of_trainers(hosts.groups, hosts.trainers, result.report)
        # CloudWatch lacks figures of a job that never ran.
        if not names or result.wall_s <= 0:
            return Resources()
        began = dt.datetime.fromisoformat(result.started_at)
        try:
            return resources_of_job(
                watch,
                job_name,
                names,
                began=began,
                ended=began + dt.timedelta(seconds=result.wall_s),
                memory_bytes=hosts.memory_bytes,
                one_gpu_bytes=hosts.one_gpu_bytes,
            )
        except Exception as error:  # noqa: BLE001  botocore's errors, or a response of another form
            logger.warning("CloudWatch has no figures of run %s: %s", result.run_id, error)
            return Resources()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hosts:
    """The groups of a cluster, and the memory of a host that trains."""

    groups: Sequence[RequestGroup]
    trainers: Sequence[RequestGroup]
    """Groups that train: all whose role is not data, also if hetero does not know the roles."""
    memory_bytes: float | None
    """None if it is unknown, or the groups that train have different amounts."""
    one_gpu_bytes: float | None
    """Memory of one GPU of a host. None if it is unknown, or the groups that train have different GPUs."""

    @classmethod
    def of(cls, groups: Sequence[RequestGroup], roles: Mapping[str, Role], catalogue: Catalogue) -> _Hosts:
        """Return the hosts of a job, with the memory that the catalogue states for the types of the trainer groups."""
        trainers = [group for group in groups if roles.get(group.name) is not Role.DATA]
        # None for a type that the catalogue does not know.
        infos = [catalogue.find(group.instance_type) for group in trainers]
        return cls(
            groups=groups,
            trainers=trainers,
            memory_bytes=_bytes_if_equal([None if info is None else info.memory_gib for info in infos]),
            one_gpu_bytes=_bytes_if_equal([None if info is None else info.accelerator_memory_gib for info in infos]),
        )


def _bytes_if_equal(memory_gib: Sequence[float | None]) -> float | None:
    """Return the memory that all types have, in bytes. None if a type's memory is unknown, or the types differ."""
    kinds = {*memory_gib}
    gib = kinds.pop() if len(kinds) == 1 else None
    return None if gib is None else gib * 2**30


_NO_RESOURCES = (
    "CloudWatch has no figures of some jobs, so CPU, memory and GPU are not forecast. It has one value per minute, "
    "which a short job may lack. With data hosts, only hetero's report states which hosts train."
)


def _estimators(estimator: Any, candidates: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the estimator for each candidate, by the name of its cluster."""
    if not candidates:
        return {_cluster(estimator).name: estimator}
    found = {}
    for text in candidates:
        kind, colon, count = text.rpartition(":")
        if not (kind and colon and count.isdecimal() and int(count) >= 1):
            raise ConfigError(f"candidate {text!r:.80}: expected TYPE:COUNT, for example ml.m5.4xlarge:6")
        estimator_copy = _with_cluster(estimator, kind, int(count))
        name = _cluster(estimator_copy).name
        if name in found:
            raise ConfigError(f"candidate {text} is given twice; expected different clusters")
        found[name] = estimator_copy
    return found


def _with_cluster(estimator: Any, instance_type: str, count: int) -> Any:
    """Return a copy of the estimator with other hosts."""
    if sdk_version(estimator) == 3:
        compute = estimator.compute.model_copy(
            update={"instance_type": instance_type, "instance_count": count, "instance_groups": None}
        )
        return estimator.model_copy(update={"compute": compute})
    estimator_copy = copy_of(estimator)
    estimator_copy.instance_groups = None
    estimator_copy.instance_type, estimator_copy.instance_count = instance_type, count
    return estimator_copy


def _cluster(estimator: Any) -> Cluster:
    groups = adapter_of(estimator).groups()
    return Cluster(groups=tuple(f"{group.name}={group.instance_type}:{group.count}" for group in groups))


def _name_of(estimator: Any) -> str:
    """Return a name for the job: its entry point, or the class of the estimator."""
    entry = getattr(estimator, "entry_point", None) or getattr(
        getattr(estimator, "source_code", None), "entry_script", None
    )
    return Path(str(entry)).name if entry else type(estimator).__name__


def _target_uri(document: Mapping[str, Any], session: Any) -> str:
    """Return where manifests go: the bucket of the job's output, or else the session's default bucket."""
    path = str((document.get("OutputDataConfig") or {}).get("S3OutputPath") or "")
    # `document` is the request that `record` made without asking AWS. If the SDK put its default bucket into the
    # request, the name of this bucket has the made-up number `ACCOUNT`, and the bucket does not exist.
    if path.startswith("s3://") and ACCOUNT not in path:
        return path.rstrip("/")
    return f"s3://{session.default_bucket()}"

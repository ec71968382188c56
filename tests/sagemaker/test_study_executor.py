"""Runs of a study as training jobs, with botocore's own stub in place of the service."""

from __future__ import annotations

import datetime as dt
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero.decide.studies.conduct import conduct
from hetero.decide.studies.runs import Billing, PlannedRun
from hetero.decide.studies.study_file import Metric, parse_study
from hetero.errors import ConfigError
from hetero.pricing import Catalogue
from hetero.sagemaker.study_executor import EstimatorExecutor, from_study
from tests.support.studies import report_document

boto3 = pytest.importorskip("boto3")
sdk = pytest.importorskip("sagemaker.estimator", reason="needs version 2 of the SageMaker SDK")

from botocore.stub import ANY, Stubber  # noqa: E402

ROLE = "arn:aws:iam::000000000000:role/training"
QUIET = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
START = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.timezone.utc)
ARN = "arn:aws:sagemaker:us-east-1:000000000000:training-job/job"
CATALOGUE = Catalogue.load(overrides=["ml.p3.2xlarge=3.6"])
RUN = PlannedRun(run_id="000-samples=1000-r1", levels={"samples": 1000}, script="train.py")


class Service:
    """The service as scripted, call by call, and the objects of its storage."""

    def __init__(self) -> None:
        from sagemaker.session import Session

        boto_session = boto3.Session(aws_access_key_id="none", aws_secret_access_key="none", region_name="us-east-1")
        self.client = boto_session.client("sagemaker")
        self.stubber = Stubber(self.client)
        self.session = Session(boto_session=boto_session, sagemaker_client=self.client, sagemaker_config=QUIET)
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.made: list[Any] = []

    def estimator(self, run: PlannedRun) -> Any:
        made = sdk.Estimator(
            image_uri="image",
            role=ROLE,
            instance_type="ml.p3.2xlarge",
            instance_count=2,
            hyperparameters={"samples": run.levels["samples"]},
            output_path="s3://bucket/out",
            max_run=3600,
            debugger_hook_config=False,
            sagemaker_session=self.session,
        )
        self.made.append(made)
        return made

    def takes(self) -> Service:
        self.stubber.add_response(
            "create_training_job",
            {"TrainingJobArn": ARN},
            {
                "TrainingJobName": ANY,
                **dict.fromkeys(("AlgorithmSpecification", "OutputDataConfig", "ResourceConfig", "RoleArn"), ANY),
                **dict.fromkeys(("StoppingCondition", "HyperParameters", "ProfilerConfig"), ANY),
            },
        )
        return self

    def describes(self, status: str, stage: str, **more: Any) -> Service:
        answer = {
            "TrainingJobName": "job",
            "TrainingJobArn": ARN,
            "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/out"},
            "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
            "TrainingJobStatus": status,
            "SecondaryStatus": stage,
            "AlgorithmSpecification": {"TrainingInputMode": "File"},
            "ResourceConfig": {"VolumeSizeInGB": 30},
            "StoppingCondition": {},
            "CreationTime": START,
            **more,
        }
        self.stubber.add_response("describe_training_job", answer, {"TrainingJobName": ANY})
        return self

    def completes(self) -> Service:
        return self.describes("InProgress", "Training").describes(
            "Completed",
            "Completed",
            TrainingStartTime=START,
            BillableTimeInSeconds=500,
            SecondaryStatusTransitions=[
                {"Status": "Downloading", "StartTime": START, "EndTime": START + dt.timedelta(seconds=100)},
                {
                    "Status": "Training",
                    "StartTime": START + dt.timedelta(seconds=100),
                    "EndTime": START + dt.timedelta(seconds=500),
                },
                {"Status": "Completed", "StartTime": START, "EndTime": START},
            ],
            FinalMetricDataList=[
                {"MetricName": "f1", "Value": 0.5, "Timestamp": START + dt.timedelta(seconds=480)},
                {"MetricName": "hetero:usd", "Value": 1.0, "Timestamp": START},
            ],
        )

    def download(self, session: Any, uri: str, target: Path) -> bool:
        self.asked.append(uri)
        if uri not in self.objects:
            return False
        target.write_bytes(self.objects[uri])
        return True

    def executor(self, **options: Any) -> EstimatorExecutor:
        return EstimatorExecutor(
            self.estimator, catalogue=CATALOGUE, download=self.download, sleep=lambda seconds: None, **options
        )


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    with made.stubber:
        yield made
    made.stubber.assert_no_pending_responses()


def archive(files: Mapping[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as content:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            content.addfile(member, io.BytesIO(data))
    return target.getvalue()


def test_result_is_made_from_the_description_of_the_job(service: Service, tmp_path: Path) -> None:
    service.takes().completes()
    result = service.executor(metrics=[Metric(name="f1")]).execute(RUN, tmp_path)
    assert (result.state, result.exit_code, result.cause) == ("finished", 0, "")
    assert result.wall_s == 500
    assert result.usd == pytest.approx(2 * 3.6 * 500 / 3600)
    assert result.phases == {"downloading": 100, "training": 400}
    assert [(value.name, value.value, value.at_s) for value in result.metrics] == [("f1", 0.5, 480)]
    assert service.asked == ["s3://bucket/out/job/output/output.tar.gz"]
    assert [each["Name"] for each in service.made[-1].metric_definitions] == ["f1"]


def test_report_in_the_output_of_the_job_is_part_of_the_result(service: Service, tmp_path: Path) -> None:
    service.takes().completes()
    report = json.dumps(report_document(f1=0.75)).encode()
    service.objects["s3://bucket/out/job/output/output.tar.gz"] = archive(
        {"algo-1/other.txt": b"x", "algo-1/report.json": report}
    )
    result = service.executor().execute(RUN, tmp_path)
    assert result.report is not None
    assert [value.value for value in result.metrics] == [0.75]  # with its time, instead of the service's last value
    assert (tmp_path / "report.json").read_bytes() == report


def test_failed_job_is_a_result_with_its_cause(service: Service, tmp_path: Path) -> None:
    reason = "AlgorithmError: HET-34 algo-1: the data set failed, exit code: 1"
    service.takes().describes("InProgress", "Training")
    service.describes("Failed", "Failed", FailureReason=reason, BillableTimeInSeconds=60)
    result = service.executor().execute(RUN, tmp_path)
    assert (result.state, result.exit_code, result.cause) == ("failed", 34, reason)
    assert result.usd == pytest.approx(0.12)


def test_job_that_the_service_rejects_is_a_failed_run_without_cost(service: Service, tmp_path: Path) -> None:
    service.stubber.add_client_error("create_training_job", "ValidationException", "no such role", 400)
    result = service.executor().execute(RUN, tmp_path)
    assert (result.state, result.usd, result.wall_s) == ("failed", 0, 0)
    assert "ValidationException" in result.cause


def test_killed_study_follows_the_job_that_it_submitted(service: Service, tmp_path: Path) -> None:
    service.takes().describes("InProgress", "Training").describes("InProgress", "Training")

    class KilledError(BaseException):
        """The study's process is killed."""

    def kill(seconds: float) -> None:
        raise KilledError

    executor = EstimatorExecutor(service.estimator, catalogue=CATALOGUE, download=service.download, sleep=kill)
    with pytest.raises(KilledError):
        conduct([RUN], executor, tmp_path)
    assert json.loads((tmp_path / "runs" / RUN.run_id / "job.json").read_text())["job_name"].startswith("study-000-")
    service.completes()  # and takes no second job
    (result,) = conduct([RUN], service.executor(), tmp_path)
    assert (result.state, result.wall_s) == ("finished", 500)


def test_job_that_cannot_be_followed_any_more_ends_the_study_and_stays_open(service: Service, tmp_path: Path) -> None:
    service.takes().describes("InProgress", "Training")
    for _ in range(61):  # ten minutes
        service.stubber.add_client_error("describe_training_job", "ExpiredTokenException", "the token is expired", 400)
    with pytest.raises(ConfigError, match="ExpiredTokenException") as caught:
        conduct([RUN], service.executor(), tmp_path)
    assert "start the study again, which follows the job" in str(caught.value)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["study", "started"]
    service.completes()  # and takes no second job
    (result,) = conduct([RUN], service.executor(), tmp_path, retry_failed=True)
    assert (result.state, result.wall_s) == ("finished", 500)


def test_job_of_an_earlier_start_that_got_no_instances_is_submitted_again(service: Service, tmp_path: Path) -> None:
    service.takes().describes("InProgress", "Starting")

    class KilledError(BaseException):
        """The study's process is killed."""

    def kill(seconds: float) -> None:
        raise KilledError

    executor = EstimatorExecutor(service.estimator, catalogue=CATALOGUE, download=service.download, sleep=kill)
    with pytest.raises(KilledError):
        executor.execute(RUN, tmp_path)
    service.describes("Failed", "Failed", FailureReason="CapacityError: Unable to provision ML compute capacity")
    service.takes().completes()
    result = service.executor().execute(RUN, tmp_path)
    assert (result.state, result.wall_s) == ("finished", 500)


def test_stopped_study_submits_no_job(service: Service, tmp_path: Path) -> None:
    executor = service.executor()
    executor.stop()
    assert "asked to stop before the job was submitted" in executor.execute(RUN, tmp_path).cause


def test_stop_asks_the_service_to_stop_the_job(service: Service, tmp_path: Path) -> None:
    service.takes().describes("InProgress", "Training").describes("InProgress", "Training")
    service.stubber.add_response("stop_training_job", {}, {"TrainingJobName": ANY})
    service.describes("Stopped", "Stopped", BillableTimeInSeconds=30)
    executor = EstimatorExecutor(
        service.estimator, catalogue=CATALOGUE, download=service.download, sleep=lambda seconds: executor.stop()
    )
    result = executor.execute(RUN, tmp_path)
    assert (result.state, result.exit_code, result.wall_s) == ("failed", 143, 30)


def test_time_in_the_queue_is_not_billed(service: Service, tmp_path: Path) -> None:
    service.takes().describes("InProgress", "Starting").describes("InProgress", "Downloading")
    began = dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=100)
    service.describes("InProgress", "Training", TrainingStartTime=began).completes()
    found: list[float] = []
    executor = EstimatorExecutor(
        service.estimator,
        catalogue=CATALOGUE,
        download=service.download,
        sleep=lambda seconds: found.append(executor.billed_s(RUN)),
    )
    assert isinstance(executor, Billing)
    executor.execute(RUN, tmp_path)
    assert found[0] == 0.0
    assert found[1] == pytest.approx(100, abs=30)


def test_price_is_that_of_all_instances(service: Service) -> None:
    assert service.executor().hourly_usd(RUN) == 7.2
    unpriced = EstimatorExecutor(service.estimator, catalogue=Catalogue.load())
    assert unpriced.hourly_usd(RUN) is None


@pytest.mark.parametrize("at_most", [0, 101])
def test_number_of_jobs_out_of_range_is_rejected(at_most: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 100"):
        EstimatorExecutor(lambda run: None, at_most=at_most, catalogue=CATALOGUE)


def test_function_of_a_study_is_imported_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_jobs_19.py").write_text("def make(run): return None\n")
    document = {"name": "s", "script": "train.py", "factors": {"samples": [1, 2]}}
    settings = {"estimator": "own_jobs_19:make", "at_most": 3}
    study = parse_study({**document, "executor": {"sagemaker": settings}}, tmp_path / "STUDY.yaml")
    assert from_study(study, CATALOGUE).max_parallel == 3
    (tmp_path / "broken_jobs_19.py").write_text("def make(run) return None\n")
    for bad in ("broken_jobs_19:make", "own_jobs_19:other", "own_jobs_19", "no_such_module_19:make"):
        study = parse_study({**document, "executor": {"sagemaker": {"estimator": bad}}}, tmp_path / "STUDY.yaml")
        with pytest.raises(ConfigError, match="executor.sagemaker.estimator"):
            from_study(study, CATALOGUE)


def test_function_that_raises_is_named_before_a_run_begins(tmp_path: Path) -> None:
    def make(run: PlannedRun) -> Any:
        raise KeyError("instance_type")

    with pytest.raises(ConfigError, match=r"which makes the estimator of a run, raised KeyError: 'instance_type'"):
        conduct([RUN], EstimatorExecutor(make, catalogue=CATALOGUE), tmp_path)
    assert not (tmp_path / "runs.jsonl").exists()

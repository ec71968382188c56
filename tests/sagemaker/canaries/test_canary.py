"""Canary jobs of an estimator, with botocore's own stubs in place of S3, SageMaker and CloudWatch."""

from __future__ import annotations

import copy
import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero.canary.files import DataFile
from hetero.canary.model import load_canary
from hetero.errors import BudgetError, ConfigError
from hetero.pricing import Catalogue
from hetero.sagemaker.canaries.canary import _target_uri
from hetero.sagemaker.canaries.manifests import channels_of, list_objects, manifest_text, sdk_inputs, split_uri
from hetero.sagemaker.canaries.watching import resources_of_job

boto3 = pytest.importorskip("boto3")
sdk = pytest.importorskip("sagemaker.estimator", reason="needs version 2 of the SageMaker SDK")

from botocore.stub import ANY, Stubber  # noqa: E402

from hetero.sagemaker import canary, record  # noqa: E402

ROLE = "arn:aws:iam::000000000000:role/training"
QUIET = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
START = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.timezone.utc)
ARN = "arn:aws:sagemaker:us-east-1:000000000000:training-job/job"
CATALOGUE = Catalogue.load(overrides=["ml.m5.4xlarge=0.922", "ml.m5.24xlarge=5.53"])
NUM_FILES, FILE_BYTES = 300, 1_000_000


class Account:
    """Buckets, jobs and figures of an account. A job's time follows from the manifest that it gets.

    Args:
        seconds: Returns the time of training of a job from its number of files and its instance type.
        cpu_percent: What CloudWatch has of each job, or None for nothing.
    """

    def __init__(self, seconds: Callable[[int, str], float], cpu_percent: float | None = 350.0) -> None:
        from sagemaker.session import Session

        boto_session = boto3.Session(aws_access_key_id="none", aws_secret_access_key="none", region_name="us-east-1")
        self.objects: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.status = "Completed"
        self._seconds = seconds
        self._cpu_percent = cpu_percent
        boto_session.events.register("before-call", self.answer)
        self.session = Session(
            boto_session=boto_session, sagemaker_client=boto_session.client("sagemaker"), sagemaker_config=QUIET
        )

    def estimator(self, **more: Any) -> Any:
        values = {
            "image_uri": "image",
            "role": ROLE,
            "instance_type": "ml.m5.4xlarge",
            "instance_count": 1,
            "output_path": "s3://bucket/out",
            "max_run": 3600,
            "debugger_hook_config": False,
            "disable_profiler": True,
            "sagemaker_session": self.session,
        }
        return sdk.Estimator(**values | more)

    def answer(self, *, event_name: str, params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
        """Return the response of a call, which botocore has validated before."""
        operation = event_name.split(".")[-1]
        self.asked.append(operation)
        content = getattr(self, operation)(params)
        code = 404 if "Error" in content else 200
        return type("Response", (), {"status_code": code, "headers": {}})(), content

    def ListObjectsV2(self, params: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        listed = [{"Key": f"train/part-{i:04d}.csv", "Size": FILE_BYTES} for i in range(NUM_FILES)]
        return {"Contents": [{"Key": "train/", "Size": 0}, *listed], "IsTruncated": False}

    def PutObject(self, params: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        body = params["body"]
        self.objects[params["url_path"]] = body if isinstance(body, bytes) else body.read()
        return {}

    def CreateTrainingJob(self, params: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        request = json.loads(params["body"])
        self.jobs[request["TrainingJobName"]] = request
        return {"TrainingJobArn": ARN}

    def DescribeTrainingJob(self, params: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = json.loads(params["body"])["TrainingJobName"]
        request = self.jobs[name]
        files = self.files_of(name)
        kind = request["ResourceConfig"]["InstanceType"]
        download_s, training_s = 20 + 0.1 * len(files), self._seconds(len(files), kind)
        at = [START, START + dt.timedelta(seconds=download_s)]
        at.append(at[1] + dt.timedelta(seconds=training_s))
        at.append(at[2] + dt.timedelta(seconds=15))
        phases = ("Downloading", "Training", "Uploading")
        return {
            **{key: request[key] for key in ("TrainingJobName", "ResourceConfig", "OutputDataConfig")},
            "TrainingJobStatus": self.status,
            "SecondaryStatus": self.status,
            "FailureReason": "",
            "CreationTime": START,
            "TrainingStartTime": START,
            "BillableTimeInSeconds": round((at[3] - at[0]).total_seconds()),
            "SecondaryStatusTransitions": [
                {"Status": phase, "StartTime": begin, "EndTime": end}
                for phase, begin, end in zip(phases, at[:-1], at[1:], strict=True)
            ],
        }

    def HeadObject(self, params: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"Error": {"Code": "404", "Message": "a job without hetero has no report"}}

    def GetMetricData(self, params: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        body = params["body"]
        queries = json.loads(body)["MetricDataQueries"] if isinstance(body, str | bytes) and body else []
        values = {"cpu": self._cpu_percent, "memory": 40.0}
        return {
            "MetricDataResults": [
                {"Id": each["Id"], "Values": [values[each["Id"].partition("_")[0]]] * 5}
                for each in queries
                if self._cpu_percent is not None and each["Id"].partition("_")[0] in values
            ]
        }

    def files_of(self, job_name: str) -> list[str]:
        """Return the files that the manifest of a job names."""
        (channel,) = self.jobs[job_name]["InputDataConfig"]
        source = channel["DataSource"]["S3DataSource"]
        assert source["S3DataType"] == "ManifestFile"
        (content,) = (
            body for path, body in self.objects.items() if source["S3Uri"].endswith(path.rpartition("out/")[2])
        )
        prefix, *names = json.loads(content)
        assert prefix == {"prefix": "s3://bucket/train/"}
        return names


def forecast_of(account: Account, folder: Path, **more: Any) -> Any:
    return canary(
        account.estimator(),
        {"train": "s3://bucket/train/"},
        output_dir=folder,
        catalogue=CATALOGUE,
        sleep=lambda seconds: None,
        **{"repeats": 2, **more},
    )


@pytest.fixture
def linear() -> Account:
    return Account(lambda files, kind: 60 + 12.0 * files)


def test_jobs_get_manifests_and_the_forecast_follows_from_their_descriptions(linear: Account, tmp_path: Path) -> None:
    found = forecast_of(linear, tmp_path)
    (shown,) = found.candidates
    assert len(linear.jobs) == 6
    assert sorted({len(linear.files_of(name)) for name in linear.jobs}) == [3, 6, 9]
    assert sorted({point.fraction for point in shown.points}) == [0.01, 0.02, 0.03]
    time, cost = shown.figure("time"), shown.figure("cost")
    assert time is not None
    assert cost is not None
    whole_s = 20 + 0.1 * 300 + 60 + 12 * 300 + 15
    assert time.value == pytest.approx(whole_s, rel=0.05)
    assert time.low < whole_s < time.high
    assert cost.value == pytest.approx(whole_s * 0.922 / 3600, rel=0.05)
    cpu = shown.figure("CPU mean")
    assert cpu is not None
    assert cpu.value == pytest.approx(350, rel=0.05)
    assert load_canary(tmp_path) == found


def test_second_call_starts_no_more_jobs(linear: Account, tmp_path: Path) -> None:
    first = forecast_of(linear, tmp_path)
    linear.asked.clear()
    assert forecast_of(linear, tmp_path) == first
    assert set(linear.asked) <= {"ListObjectsV2", "PutObject"}


def test_candidates_run_on_their_own_types_and_the_cheaper_one_is_named(tmp_path: Path) -> None:
    account = Account(lambda files, kind: 60 + (12.0 if kind == "ml.m5.4xlarge" else 9.0) * files)
    found = forecast_of(account, tmp_path, candidates=["ml.m5.4xlarge:1", "ml.m5.24xlarge:1"])
    assert [each.name for each in found.candidates] == ["1 x ml.m5.4xlarge", "1 x ml.m5.24xlarge"]
    kinds = [request["ResourceConfig"]["InstanceType"] for request in account.jobs.values()]
    assert (kinds.count("ml.m5.4xlarge"), kinds.count("ml.m5.24xlarge")) == (6, 6)
    assert found.decision is not None
    assert found.decision.cheapest == "1 x ml.m5.4xlarge"


def test_sharded_channel_has_a_file_for_every_host(tmp_path: Path) -> None:
    from sagemaker.inputs import TrainingInput

    account = Account(lambda files, kind: 60 + 12.0 * files)
    train = TrainingInput("s3://bucket/train/", distribution="ShardedByS3Key", content_type="text/csv")
    found = canary(
        account.estimator(instance_count=6),
        {"train": train},
        output_dir=tmp_path,
        catalogue=CATALOGUE,
        fractions=[0.01, 0.04, 0.06],
        repeats=2,
        sleep=lambda seconds: None,
    )
    assert min(len(account.files_of(name)) for name in account.jobs) == 6
    (channel,) = next(iter(account.jobs.values()))["InputDataConfig"]
    assert channel["ContentType"] == "text/csv"
    assert channel["DataSource"]["S3DataSource"]["S3DataDistributionType"] == "ShardedByS3Key"
    assert found.candidates[0].points[0].fraction >= 0.02


def test_jobs_without_figures_have_a_forecast_of_the_time_and_a_note(tmp_path: Path) -> None:
    found = forecast_of(Account(lambda files, kind: 60 + 12.0 * files, cpu_percent=None), tmp_path)
    (shown,) = found.candidates
    assert [figure.name for figure in shown.figures] == ["time", "cost"]
    assert "CloudWatch has no figures" in shown.notes[0]


def test_quadratic_job_is_refused(tmp_path: Path) -> None:
    found = forecast_of(Account(lambda files, kind: 60 + 8.0 * files**2), tmp_path)
    assert {refusal.rule for refusal in found.candidates[0].refused("time")} == {"curved"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fractions": [0.01, 0.02]}, "fractions are 1 %, 2 %; expected at least 3"),
        ({"fractions": [0.01, 0.02, 0.6]}, "at most 50 %"),
        ({"repeats": 0}, "^repeats is 0"),
        ({"repeats": 1}, "a forecast needs at least 4"),
        ({"repeats": 4, "fractions": [0.1, 0.2, 0.3]}, "12 canary jobs of .* have 240 % of the data together"),
        ({"candidates": ["ml.m5.large:1", "ml.m5.large:1"]}, "ml.m5.large:1 is given twice"),
        ({"at_most": 0}, "at_most is 0"),
        ({"whole": ["train"]}, "no channel can be reduced"),
        ({"whole": ["labels"]}, "whole names 'labels'"),
        ({"candidates": ["ml.m5.large"]}, "expected TYPE:COUNT"),
        ({"through": "plain"}, "options of a rehearsal need rehearse_on"),
    ],
)
def test_call_that_cannot_work_is_rejected_before_a_job_starts(
    linear: Account, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        forecast_of(linear, tmp_path, **more)
    assert linear.jobs == {}
    assert linear.objects == {}


def test_three_objects_start_no_jobs(linear: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.NUM_FILES", 3)
    with pytest.raises(ConfigError, match="3 objects, of which whole ones give the runs 33.3 % of the data"):
        forecast_of(linear, tmp_path)
    assert linear.jobs == {}


def test_other_inputs_are_another_study(linear: Account, tmp_path: Path) -> None:
    forecast_of(linear, tmp_path)
    for more in ({"candidates": ["ml.m5.large:1"]}, {"fractions": [0.01, 0.02, 0.04]}):
        with pytest.raises(ConfigError, match="belongs to a study that differs"):
            forecast_of(linear, tmp_path, **more)
    with pytest.raises(ConfigError, match="inputs.train"):
        canary(linear.estimator(), {"train": "s3://bucket/train/part"}, output_dir=tmp_path, repeats=2)
    assert len(linear.jobs) == 6


def test_budget_that_ends_the_study_leaves_a_forecast(linear: Account, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="raise budget_usd and start again"):
        forecast_of(linear, tmp_path, budget_usd=0.2, at_most=1)
    assert 1 <= len(load_canary(tmp_path).candidates[0].points) < 6


def test_budget_holds_in_a_rehearsal_too(linear: Account, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for index in range(100):
        (data / f"{index}.csv").write_text("x")
    with pytest.raises(BudgetError, match="raise budget_usd"):
        forecast_of(linear, tmp_path / "out", rehearse_on={"train": data}, budget_usd=0.0)
    with pytest.raises(ConfigError, match="expected a name of 1 to 64 letters"):
        forecast_of(linear, tmp_path / "out", rehearse_on={"../data": data})
    assert len(list(data.iterdir())) == 100


def test_job_that_fails_is_the_last_one(tmp_path: Path) -> None:
    account = Account(lambda files, kind: 60 + 12.0 * files)
    account.status = "Failed"
    (shown,) = forecast_of(account, tmp_path, at_most=1).candidates
    assert len(account.jobs) == 1
    assert "failed" in {refusal.rule for refusal in shown.refusals}


def test_members_of_a_channel_are_kept() -> None:
    from sagemaker.inputs import ShuffleConfig, TrainingInput

    train = TrainingInput(
        "s3://bucket/train/",
        distribution="ShardedByS3Key",
        compression="Gzip",
        content_type="text/csv",
        record_wrapping="RecordIO",
        input_mode="Pipe",
        shuffle_config=ShuffleConfig(5),
    )
    estimator = Account(lambda files, kind: 1.0).estimator()
    before = record(estimator, {"train": train, "labels": "s3://bucket/labels"}).request
    manifests = {"train": "s3://bucket/a.manifest"}
    after = record(estimator, sdk_inputs(2, channels_of(before), manifests)).request.document["InputDataConfig"]
    expected = copy.deepcopy(before.document["InputDataConfig"])
    expected[0]["DataSource"]["S3DataSource"] |= {"S3Uri": "s3://bucket/a.manifest", "S3DataType": "ManifestFile"}
    assert after == expected
    assert {"InputMode", "CompressionType", "RecordWrapperType", "ShuffleConfig"} <= set(after[0])


def test_manifests_go_to_the_default_bucket_if_the_output_is_not_stated() -> None:
    from types import SimpleNamespace

    session = SimpleNamespace(default_bucket=lambda: "own")
    unknown = {"OutputDataConfig": {"S3OutputPath": "s3://sagemaker-us-east-1-000000000000/"}}
    assert _target_uri(unknown, session) == "s3://own"
    assert _target_uri({"OutputDataConfig": {"S3OutputPath": "s3://b/out/"}}, session) == "s3://b/out"


def test_local_input_is_rejected(linear: Account, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is on this machine; expected data in S3"):
        canary(linear.estimator(), {"train": str(tmp_path)}, output_dir=tmp_path)


def test_manifest_has_the_prefix_and_the_keys() -> None:
    text = manifest_text("s3://bucket/train/", [DataFile("a/1.csv", 5), DataFile("2.csv", 6)])
    assert json.loads(text) == [{"prefix": "s3://bucket/train/"}, "a/1.csv", "2.csv"]
    assert split_uri("s3://bucket/a/b") == ("bucket", "a/b")
    with pytest.raises(ConfigError, match="expected an S3 URI"):
        split_uri("/local")


def test_empty_prefix_is_rejected() -> None:
    client = boto3.client("s3", aws_access_key_id="none", aws_secret_access_key="none", region_name="us-east-1")
    with Stubber(client) as stubber:
        stubber.add_response("list_objects_v2", {"IsTruncated": False}, {"Bucket": "bucket", "Prefix": "none/"})
        with pytest.raises(ConfigError, match="contains no objects"):
            list_objects(client, "s3://bucket/none/")
        content = {"IsTruncated": False, "Contents": [{"Key": "all.csv", "Size": 9}]}
        stubber.add_response("list_objects_v2", content, {"Bucket": "bucket", "Prefix": "all.csv"})
        with pytest.raises(ConfigError, match="is an object; expected the prefix of several"):
            list_objects(client, "s3://bucket/all.csv")


def test_figures_of_several_hosts_are_joined_and_pages_followed() -> None:
    client = boto3.client("cloudwatch", aws_access_key_id="none", aws_secret_access_key="none", region_name="us-east-1")
    expected = {"MetricDataQueries": ANY, "StartTime": ANY, "EndTime": ANY, "ScanBy": "TimestampAscending"}
    first = {"MetricDataResults": [{"Id": "cpu_0", "Values": [100.0, 300.0]}], "NextToken": "more"}
    second = {
        "MetricDataResults": [
            {"Id": "cpu_1", "Values": [200.0]},
            {"Id": "memory_0", "Values": [10.0, 20.0]},
            {"Id": "memory_1", "Values": [10.0, 50.0]},
        ]
    }
    with Stubber(client) as stubber:
        stubber.add_response("get_metric_data", first, expected)
        stubber.add_response("get_metric_data", second, {**expected, "NextToken": "more"})
        found = resources_of_job(
            client,
            "job",
            ["algo-1", "algo-2"],
            began=START,
            ended=START + dt.timedelta(minutes=5),
            memory_bytes=64e9,
            gpu_memory_bytes=None,
        )
        stubber.assert_no_pending_responses()
    assert found.cpu_percent_mean == 200.0
    assert (found.memory_peak_bytes, found.memory_mean_bytes) == (32e9, pytest.approx(19.2e9))
    assert found.gpu_percent_mean is None

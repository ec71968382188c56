"""Canary jobs of an estimator, with botocore's own stubs in place of S3, SageMaker and CloudWatch."""

from __future__ import annotations

import copy
import datetime as dt
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero.decide.canary.files import DataFile
from hetero.decide.canary.model import load_canary
from hetero.documents.records import json_text
from hetero.errors import BudgetError, ConfigError
from hetero.report.model import RankFacts
from hetero.sagemaker.canaries.canary import _target_uri
from hetero.sagemaker.canaries.identity import identity_of
from hetero.sagemaker.canaries.manifests import (
    channels_of,
    channels_of_sdk,
    list_objects,
    manifest_text,
    sdk_inputs,
    split_uri,
)
from hetero.sagemaker.canaries.watching import resources_of_job
from tests.support.sagemaker.canary_account import CATALOGUE, START, Account
from tests.support.sagemaker.guards import state_of
from tests.support.studies import report_of

boto3 = pytest.importorskip("boto3")
pytest.importorskip("sagemaker.estimator", reason="needs version 2 of the SageMaker SDK")

from botocore.stub import ANY, Stubber  # noqa: E402

from hetero.sagemaker import canary, prepare, record  # noqa: E402


def forecast_of(account: Account, folder: Path, **more: Any) -> Any:
    return canary(
        account.estimator(),
        {"train": "s3://bucket/train/"},
        output_dir=folder,
        catalogue=CATALOGUE,
        sleep=lambda seconds: None,
        **{"repeats": 2, **more},
    )


@pytest.fixture(autouse=True)
def _without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write pages without plots. tests/decide/canary looks at plots, and drawing takes a third of the time here."""
    monkeypatch.setattr("hetero.decide.pages.page.has_matplotlib", lambda: False)


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
    assert set(linear.asked) == {"ListObjectsV2", "GetMetricData"}


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
    monkeypatch.setattr("tests.support.sagemaker.canary_account.NUM_FILES", 3)
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


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return an entry point."""
    path = tmp_path / "src" / "train.py"
    path.parent.mkdir()
    path.write_text("print('train')\n")
    return path


def scripted(account: Account, script: Path, **more: Any) -> Any:
    """Return an estimator with an entry point, prepared as by a new process."""
    values = {"entry_point": script.name, "source_dir": str(script.parent), "hyperparameters": {"epochs": 1}}
    return prepare(account.estimator(**values | more))


def identity(account: Account, script: Path, **more: Any) -> dict[str, Any]:
    return identity_of(record(scripted(account, script, **more), {"train": "s3://bucket/train/"}))


def test_identity_is_that_of_the_job_and_not_of_the_process(linear: Account, script: Path) -> None:
    first = identity(linear, script)
    stat = script.stat()
    os.utime(script, (stat.st_atime, stat.st_mtime + 60))
    assert identity(linear, script, base_job_name="other") == first  # with another token, time and name of the job
    for more in ({"hyperparameters": {"epochs": 10}}, {"image_uri": "other"}, {"environment": {"THREADS": "1"}}):
        assert identity(linear, script, **more) != first
    script.write_text("print('other')\n")
    assert identity(linear, script)["content of the sources"] != first["content of the sources"]


@pytest.mark.parametrize("changes", [{"hyperparameters": {"epochs": "10"}}, {"image_uri": "other"}])
def test_jobs_of_another_estimator_are_not_used(linear: Account, tmp_path: Path, changes: dict[str, Any]) -> None:
    inputs = {"train": "s3://bucket/train/"}
    options = {"output_dir": tmp_path, "catalogue": CATALOGUE, "repeats": 2, "sleep": lambda seconds: None}
    canary(linear.estimator(hyperparameters={"epochs": "1"}), inputs, **options)
    manifests = dict(linear.objects)
    with pytest.raises(ConfigError, match="belongs to a study that differs"):
        canary(linear.estimator(**{"hyperparameters": {"epochs": "1"}, **changes}), inputs, **options)
    assert linear.objects == manifests
    assert len(linear.jobs) == 6


def test_manifests_of_two_canaries_have_different_uris(linear: Account, tmp_path: Path) -> None:
    forecast_of(linear, tmp_path / "one")
    first = dict(linear.objects)
    forecast_of(linear, tmp_path / "two", seed=1)
    assert len(linear.objects) == 12
    assert first.items() <= linear.objects.items()


def test_estimator_of_the_user_does_not_change(linear: Account, tmp_path: Path, script: Path) -> None:
    estimator = scripted(linear, script)
    before = state_of(estimator)
    canary(
        estimator,
        {"train": "s3://bucket/train/"},
        candidates=["ml.m5.4xlarge:1"],
        output_dir=tmp_path / "out",
        catalogue=CATALOGUE,
        repeats=2,
        sleep=lambda seconds: None,
    )
    assert len(linear.jobs) == 6
    assert state_of(estimator) == before


def test_figures_that_cloudwatch_does_not_have_yet_are_asked_for_again(linear: Account, tmp_path: Path) -> None:
    linear.cpu_percent = None
    assert forecast_of(linear, tmp_path).candidates[0].figure("CPU mean") is None
    linear.cpu_percent = 350.0
    assert forecast_of(linear, tmp_path).candidates[0].figure("CPU mean") is not None


@pytest.mark.parametrize("has_report", [True, False])
def test_memory_is_that_of_the_hosts_that_train(
    linear: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_report: bool
) -> None:
    from sagemaker.instance_group import InstanceGroup

    groups = [InstanceGroup("data_group", "ml.m5.large", 2), InstanceGroup("dnn_group", "ml.p3.16xlarge", 1)]
    report, ranks = report_of(), (RankFacts(rank=0, host="algo-2", loaders=()),)
    content = json_text(replace(report, run=replace(report.run, ranks=ranks))).encode()

    def download(session: Any, uri: str, target: Path) -> bool:
        with tarfile.open(target, mode="w:gz") as archive:
            member = tarfile.TarInfo("report.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        return has_report

    monkeypatch.setattr("hetero.sagemaker.study_executor._from_s3", download)
    (shown,) = canary(
        linear.estimator(instance_type=None, instance_count=None, instance_groups=groups),
        {"train": "s3://bucket/train/"},
        output_dir=tmp_path,
        catalogue=CATALOGUE,
        repeats=2,
        sleep=lambda seconds: None,
    ).candidates
    memory = shown.figure("memory peak")
    assert linear.watched == ({"algo-2"} if has_report else set())
    assert (memory is not None) == has_report
    if memory is not None:
        assert memory.value == pytest.approx(0.4 * 488 * 2**30, rel=0.05)
        assert shown.out_of_memory is not None
        assert shown.out_of_memory < 0.01


def test_budget_that_ends_the_study_leaves_a_forecast(linear: Account, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="raise budget_usd and start again"):
        forecast_of(linear, tmp_path, budget_usd=0.2, at_most=1)
    assert 1 <= len(load_canary(tmp_path).candidates[0].points) < 6


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
    after = record(estimator, sdk_inputs(2, channels_of(before, without=()), manifests)).request.document[
        "InputDataConfig"
    ]
    expected = copy.deepcopy(before.document["InputDataConfig"])
    expected[0]["DataSource"]["S3DataSource"] |= {"S3Uri": "s3://bucket/a.manifest", "S3DataType": "ManifestFile"}
    assert after == expected
    assert {"InputMode", "CompressionType", "RecordWrapperType", "ShuffleConfig"} <= set(after[0])


def test_channels_that_the_sdk_adds_are_no_inputs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    estimator = Account(lambda files, kind: 1.0).estimator(
        enable_network_isolation=True,
        entry_point="train.py",
        source_dir=str(tmp_path),
        model_uri="s3://bucket/model/model.tar.gz",
    )
    request = record(estimator, {"train": "s3://bucket/train/"}).request
    assert {channel.name for channel in request.channels} == {"train", "code", "model"}
    own = channels_of_sdk(estimator, version=2)
    assert own == {"code", "model"}
    channels = channels_of(request, without=own)
    assert [channel.name for channel in channels] == ["train"]
    manifests = {"train": "s3://bucket/a.manifest"}
    again = record(estimator, sdk_inputs(2, channels, manifests)).request
    assert [channel.name for channel in again.channels] == [channel.name for channel in request.channels]
    assert next(channel.uri for channel in again.channels if channel.name == "train") == manifests["train"]


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
            one_gpu_bytes=None,
        )
        stubber.assert_no_pending_responses()
    assert found.cpu_percent_mean == 200.0
    assert (found.memory_peak_bytes, found.memory_mean_bytes) == (32e9, pytest.approx(19.2e9))
    assert found.gpu_percent_mean is None

"""launchers/submit_job.py: from options to a request, a rehearsal and a job. moto replaces the service."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetero.errors import CapacityError, ExitCode

pytest.importorskip("sagemaker", reason="needs a SageMaker SDK")
IS_VERSION_2 = importlib.util.find_spec("sagemaker.train") is None
needs_version_2 = pytest.mark.skipif(not IS_VERSION_2, reason="needs version 2 of the SageMaker SDK")

SUBMIT_JOB = Path(__file__).parents[2] / "launchers" / "submit_job.py"
ROLE = "arn:aws:iam::123456789012:role/training"
GROUPS = ["--group", "data_group=ml.c5.9xlarge:2", "--group", "dnn_group=ml.g5.xlarge:1"]
PYTORCH = ["--framework", "pytorch", "--framework-version", "2.5", "--py-version", "py311"]
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.5.1-gpu-py311-cu124-ubuntu22.04-sagemaker"
QUIET = "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def submit_job() -> ModuleType:
    spec = importlib.util.spec_from_file_location("submit_job", SUBMIT_JOB)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "src" / "train.py"
    path.parent.mkdir()
    path.write_text("import hetero\n\n\n@hetero.dataset\ndef numbers():\n    return range(4)\n")
    return path


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An account at moto's, which takes every job and says that it has completed."""
    moto = pytest.importorskip("moto")
    boto3 = pytest.importorskip("boto3")
    (tmp_path / "config.yaml").write_text(QUIET)
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with moto.mock_aws():
        yield boto3.client("sagemaker")


def dry_run(module: ModuleType, capsys: Capture, *flags: str) -> dict[str, Any]:
    """Return the request that is printed."""
    at = flags.index("--") if "--" in flags else len(flags)
    assert module.main([*flags[:at], "--dry-run", *flags[at:]]) == 0
    request: dict[str, Any] = json.loads(capsys.readouterr().out)
    return request


@needs_version_2
def test_dry_run_prints_the_request_of_the_options(submit_job: ModuleType, script: Path, capsys: Capture) -> None:
    flags = [str(script), *GROUPS, *PYTORCH, "--job-name", "photos-1", "--max-run", "7200", "--option"]
    flags += ["endpoints_per_host=8", "--environment", "NCCL_DEBUG=INFO", "--input", "training=s3://bucket/photos"]
    flags += ["--input-groups", "training=data_group", "--input-mode", "FastFile", "--encrypt-traffic"]
    flags += ["--checkpoint-path", "s3://bucket/checkpoints", "--output-path", "s3://bucket/out"]
    request = dry_run(submit_job, capsys, *flags, "--", "--epochs", "3", "--lr=0.1")
    assert request["TrainingJobName"] == "photos-1"
    assert request["ResourceConfig"]["InstanceGroups"] == [
        {"InstanceGroupName": "data_group", "InstanceType": "ml.c5.9xlarge", "InstanceCount": 2},
        {"InstanceGroupName": "dnn_group", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
    ]
    parameters = {name: json.loads(value) for name, value in request["HyperParameters"].items()}
    assert parameters["hetero_script"] == "train.py"
    assert str(parameters["hetero_endpoints_per_host"]) == "8"
    assert (str(parameters["epochs"]), str(parameters["lr"])) == ("3", "0.1")
    (channel,) = request["InputDataConfig"]
    assert channel["DataSource"]["S3DataSource"]["InstanceGroupNames"] == ["data_group"]
    assert channel["InputMode"] == "FastFile"
    assert request["Environment"]["NCCL_DEBUG"] == "INFO"
    assert request["StoppingCondition"]["MaxRuntimeInSeconds"] == 7200
    assert request["EnableInterContainerTrafficEncryption"] is True
    assert request["CheckpointConfig"] == {"S3Uri": "s3://bucket/checkpoints"}
    assert request["OutputDataConfig"]["S3OutputPath"] == "s3://bucket/out"


def test_standard_output_has_the_request_and_nothing_of_the_sdk_s(script: Path) -> None:
    command = [sys.executable, str(SUBMIT_JOB), str(script), *GROUPS, "--image", IMAGE, "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(SUBMIT_JOB.parents[1])}  # hetero is not installed everywhere
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["HyperParameters"]["hetero_script"].strip('"') == "train.py"


@pytest.mark.skipif(IS_VERSION_2, reason="needs version 3 of the SageMaker SDK")
def test_dry_run_with_version_3_prints_the_request_of_the_options(
    submit_job: ModuleType, script: Path, capsys: Capture
) -> None:
    flags = [str(script), *GROUPS, "--image", IMAGE, "--input", "training=s3://bucket/photos", "--input-groups"]
    flags += ["training=data_group", "--max-run", "7200", "--output-path", "s3://bucket/out"]
    request = dry_run(submit_job, capsys, *flags, "--", "--epochs", "3")
    groups = request["ResourceConfig"]["InstanceGroups"]
    assert [group["InstanceGroupName"] for group in groups] == ["data_group", "dnn_group"]
    assert request["HyperParameters"]["hetero_script"].strip('"') == "train.py"
    assert request["HyperParameters"]["epochs"].strip('"') == "3"
    channel = next(each for each in request["InputDataConfig"] if each["ChannelName"] == "training")
    assert channel["DataSource"]["S3DataSource"]["InstanceGroupNames"] == ["data_group"]
    assert request["StoppingCondition"]["MaxRuntimeInSeconds"] == 7200


@needs_version_2
def test_errors_are_said_and_end_it_unless_they_are_to_be_ignored(
    submit_job: ModuleType, script: Path, capsys: Capture
) -> None:
    flags = [str(script), *GROUPS, *PYTORCH, "--input", "a=s3://bucket/a", "--input", "b=s3://bucket/b"]
    flags += ["--input-groups", "a=data_group"]
    assert submit_job.main([*flags, "--dry-run"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "SM-03 error: " in captured.err
    assert "not submitted, because of errors; correct them, or add --ignore-errors" in captured.err
    request = dry_run(submit_job, capsys, *flags, "--ignore-errors")
    assert len(request["InputDataConfig"]) == 2


@needs_version_2
@pytest.mark.integration
def test_job_is_rehearsed_and_then_submitted(
    submit_job: ModuleType, script: Path, service: Any, tmp_path: Path, capsys: Capture
) -> None:
    flags = [str(script), *GROUPS, *PYTORCH, "--iam-role", ROLE, "--job-name", "digits-7", "--rehearse"]
    flags += ["--rehearsal-dir", str(tmp_path / "rehearsal"), "--option", "endpoints_per_host=1", "--option"]
    flags += ["nproc_per_node=1"]
    assert submit_job.main(flags) == 0
    assert capsys.readouterr().out == "digits-7 Completed\n"
    assert (tmp_path / "rehearsal" / "report.json").is_file()
    job = service.describe_training_job(TrainingJobName="digits-7")
    assert job["RoleArn"] == ROLE
    assert [group["InstanceCount"] for group in job["ResourceConfig"]["InstanceGroups"]] == [2, 1]


@needs_version_2
@pytest.mark.integration
def test_dry_run_with_a_rehearsal_prints_the_request_after_it_and_needs_no_account(
    submit_job: ModuleType, script: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = [str(script), "--group", "dnn_group=ml.g5.xlarge:1", *PYTORCH, "--rehearse", "--option", "nproc_per_node=1"]
    flags += ["--rehearsal-dir", str(tmp_path / "rehearsal"), "--input", f"training={tmp_path / 'src'}"]
    request = dry_run(submit_job, capsys, *flags)
    assert request["ResourceConfig"]["InstanceGroups"][0]["InstanceGroupName"] == "dnn_group"
    assert (tmp_path / "rehearsal" / "hosts" / "algo-1" / "ml" / "input" / "data" / "training" / "train.py").is_file()


@needs_version_2
@pytest.mark.integration
def test_printed_request_is_rehearsed_with_the_code_as_it_was(
    submit_job: ModuleType, script: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = [str(script), "--group", "dnn_group=ml.g5.xlarge:1", *PYTORCH, "--option", "nproc_per_node=1"]
    (tmp_path / "request.json").write_text(json.dumps(dry_run(submit_job, capsys, *flags)))
    command = [sys.executable, "-m", "hetero.cli", "simulate", "--request", str(tmp_path / "request.json")]
    command += ["--source-dir", str(script.parent), "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.json").is_file()


@needs_version_2
@pytest.mark.integration
def test_job_whose_rehearsal_fails_is_not_submitted(
    submit_job: ModuleType, script: Path, service: Any, tmp_path: Path, capsys: Capture
) -> None:
    script.write_text("raise FileNotFoundError('labels.csv')\n")
    flags = [str(script), "--group", "dnn_group=ml.g5.xlarge:1", *PYTORCH, "--iam-role", ROLE, "--rehearse"]
    flags += ["--rehearsal-dir", str(tmp_path / "rehearsal"), "--option", "nproc_per_node=1", "--ignore-errors"]
    assert submit_job.main(flags) == ExitCode.SCRIPT_FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not submitted, because the rehearsal failed: HET-30" in captured.err
    assert service.list_training_jobs()["TrainingJobSummaries"] == []


@needs_version_2
def test_job_without_instances_ends_with_its_code(
    submit_job: ModuleType, script: Path, service: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def short(estimator: Any, inputs: Any, **options: Any) -> None:
        del estimator, inputs
        assert (options["max_attempts"], options["first_wait_s"], options["wait"]) == (2, 5.0, False)
        raise CapacityError("no instances for the job")

    monkeypatch.setattr("hetero.sagemaker.submit", short)
    flags = [str(script), *GROUPS, *PYTORCH, "--iam-role", ROLE, "--attempts", "2", "--first-wait", "5", "--no-wait"]
    assert submit_job.main(flags) == ExitCode.CAPACITY
    assert "error HET-25: no instances for the job" in capsys.readouterr().err


@needs_version_2
def test_refusal_of_aws_is_said_without_a_traceback(
    submit_job: ModuleType, script: Path, service: Any, capsys: Capture
) -> None:
    flags = [str(script), *GROUPS, "--image", IMAGE, "--iam-role", "no-arn", "--max-run", "0"]
    assert submit_job.main([*flags, "--ignore-errors"]) == ExitCode.USAGE
    assert "submit_job: error HET-02: " in capsys.readouterr().err.splitlines()[-1]
    assert service.list_training_jobs()["TrainingJobSummaries"] == []


@needs_version_2
def test_interrupt_says_that_the_job_goes_on(
    submit_job: ModuleType, script: Path, service: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetero.sagemaker.submit", interrupted)
    assert submit_job.main([str(script), *GROUPS, *PYTORCH, "--iam-role", ROLE]) == 130
    assert "continues and is billed. To stop it, run: aws sagemaker stop-training-job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--group is missing"),
        (["--group", "a=b"], "expected NAME=TYPE:COUNT"),
        ([*GROUPS], "--iam-role is missing"),
        ([*GROUPS, "--dry-run"], "--image is" if not IS_VERSION_2 else "--framework and --image are missing"),
        ([*GROUPS, "--dry-run", "--image", IMAGE, "--input", "training"], "--input 'training': expected NAME=VALUE"),
        ([*GROUPS, "--dry-run", "--image", IMAGE, "--option", "no_such=1"], "no_such"),
        (
            [*GROUPS, "--dry-run", "--image", IMAGE, "--option", "script=a.py"],
            "--option script is not allowed; use SCRIPT",
        ),
        (
            [*GROUPS, "--dry-run", "--image", IMAGE, "--input-groups", "a=b"],
            "names the unknown channel 'a'; add --input a=URI",
        ),
        ([*GROUPS, "--iam-role", ROLE, "--image", IMAGE, "--input", "a=photos"], "For a rehearsal, add --data a=DIR"),
        pytest.param(
            [*GROUPS, "--dry-run", "--framework", "pytorch"],
            "HET-02: ValueError: framework_version",
            marks=needs_version_2,
        ),
        ([*GROUPS, "--dry-run", "--image", IMAGE, "--", "3"], "'3' after --: expected --name value"),
        ([*GROUPS, "--dry-run", "--image", IMAGE, "--", "--flag", "--other", "1"], "'--flag' after --"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options_end_with_a_message(
    submit_job: ModuleType, script: Path, capsys: Capture, flags: list[str], words: str
) -> None:
    assert submit_job.main([str(script), *flags]) == ExitCode.USAGE
    assert words in capsys.readouterr().err


def test_script_that_is_not_there_or_not_in_its_folder_is_said(
    submit_job: ModuleType, script: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = [*GROUPS, "--image", IMAGE, "--dry-run"]
    assert submit_job.main(["no-such.py", *flags]) == ExitCode.USAGE
    assert "the training script 'no-such.py' does not exist" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert submit_job.main([str(script), "--source-dir", str(tmp_path / "other"), *flags]) == ExitCode.USAGE
    assert "is not in --source-dir" in capsys.readouterr().err


def test_script_in_a_folder_of_the_source_is_named_from_there(
    submit_job: ModuleType, script: Path, capsys: Capture
) -> None:
    flags = ["src/train.py", "--source-dir", str(script.parents[1]), *GROUPS, "--image", IMAGE]
    request = dry_run(submit_job, capsys, *flags)
    assert request["HyperParameters"]["hetero_script"].strip('"') == "src/train.py"

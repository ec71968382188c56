"""Submitting, with botocore's own stub in place of the service: attempts, waits, and the lines about each type."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from hetero.errors import CapacityError, ConfigError, ExitCode
from hetero.sagemaker import TrainingRequest, submit
from hetero.sagemaker.submission.shortages import shortage_in

boto3 = pytest.importorskip("boto3")
sdk = pytest.importorskip("sagemaker.estimator", reason="needs version 2 of the SageMaker SDK")

from botocore.exceptions import ClientError  # noqa: E402
from botocore.stub import ANY, Stubber  # noqa: E402

QUIET = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
"""A configuration in which the SDK reports nothing."""
ROLE = "arn:aws:iam::000000000000:role/training"
GROUPS = (("data_group", "ml.c5.9xlarge", 2), ("dnn_group", "ml.p4d.24xlarge", 1))
NO_CAPACITY = "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different type."
QUOTA = (
    "The account-level service limit 'ml.p4d.24xlarge for training job usage' is {limit} Instances, with current "
    "utilization of {used} Instances and a request delta of {delta} Instances. Please use AWS Service Quotas."
)
REQUEST = TrainingRequest.parse(
    {
        "ResourceConfig": {
            "InstanceGroups": [
                {"InstanceGroupName": name, "InstanceType": kind, "InstanceCount": count}
                for name, kind, count in GROUPS
            ]
        }
    }
)


class Service:
    """The service, as scripted: what it answers, call by call, and what waits were asked for."""

    def __init__(self) -> None:
        from sagemaker.instance_group import InstanceGroup
        from sagemaker.session import Session

        boto_session = boto3.Session(aws_access_key_id="none", aws_secret_access_key="none", region_name="us-east-1")
        client = boto_session.client("sagemaker")
        self.stubber = Stubber(client)
        self.waits_s: list[float] = []
        self.estimator = sdk.Estimator(
            image_uri="image",
            role=ROLE,
            instance_groups=[InstanceGroup(*group) for group in GROUPS],
            output_path="s3://bucket/out",
            max_run=3600,
            debugger_hook_config=False,
            sagemaker_session=Session(boto_session=boto_session, sagemaker_client=client, sagemaker_config=QUIET),
        )

    def takes(self, name: Any = ANY) -> Service:
        expected = dict.fromkeys(
            (
                *("AlgorithmSpecification", "OutputDataConfig", "ResourceConfig", "RoleArn"),
                *("StoppingCondition", "ProfilerConfig"),
            ),
            ANY,
        )
        answer = {"TrainingJobArn": "arn:aws:sagemaker:us-east-1:000000000000:training-job/job"}
        self.stubber.add_response("create_training_job", answer, {"TrainingJobName": name, **expected})
        return self

    def refuses(self, code: str, message: str) -> Service:
        self.stubber.add_client_error("create_training_job", code, message, 400)
        return self

    def describes(self, status: str, stage: str, reason: str = "") -> Service:
        answer: dict[str, Any] = {
            "TrainingJobName": "job",
            "TrainingJobArn": "arn:aws:sagemaker:us-east-1:000000000000:training-job/job",
            "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/out"},
            "TrainingJobStatus": status,
            "SecondaryStatus": stage,
            "AlgorithmSpecification": {"TrainingInputMode": "File"},
            "ResourceConfig": {"VolumeSizeInGB": 30},
            "StoppingCondition": {},
            "CreationTime": 0,
        }
        if reason:
            answer["FailureReason"] = reason
        self.stubber.add_response("describe_training_job", answer, {"TrainingJobName": ANY})
        return self

    def submit(self, **options: Any) -> Any:
        with self.stubber:
            return submit(self.estimator, sleep=self.waits_s.append, **options)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.stubber.assert_no_pending_responses()


@pytest.fixture(autouse=True)
def _lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hetero.sagemaker.submission.submit")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_job_that_gets_its_instances_is_submitted_once(service: Service) -> None:
    service.takes().describes("InProgress", "Starting").describes("InProgress", "Training")
    service.describes("Completed", "Completed")
    done = service.submit()
    assert (done.status, done.failure, done.num_attempts, done.exit_code) == ("Completed", "", 1, 0)
    assert service.waits_s == [10, 10]


def test_without_waiting_it_returns_once_there_are_instances(service: Service) -> None:
    service.takes().describes("InProgress", "Pending").describes("InProgress", "Downloading")
    done = service.submit(wait=False)
    assert (done.status, done.exit_code) == ("InProgress", 0)


def test_job_without_capacity_is_submitted_again_under_another_name(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.takes("train").describes("Failed", "Failed", NO_CAPACITY)
    service.refuses("InsufficientCapacityException", "no ml.p4d.24xlarge")
    service.takes("train-3").describes("Completed", "Completed")
    done = service.submit(job_name="train", first_wait_s=7)
    assert (done.job_name, done.num_attempts) == ("train-3", 3)
    assert service.waits_s == [7, 14]
    assert warnings_of(caplog) == [
        "ml.c5.9xlarge (2 for data_group): CapacityError: the platform has no free instances",
        "ml.p4d.24xlarge (1 for dnn_group): CapacityError: the platform has no free instances",
        "attempt 2 of 5 starts in 7 s",
        "ml.p4d.24xlarge (1 for dnn_group): InsufficientCapacityException: the platform has no free instances",
        "attempt 3 of 5 starts in 14 s",
    ]


def test_attempts_and_waits_are_bounded_and_the_error_says_what_is_short(service: Service) -> None:
    for _ in range(6):
        service.refuses("ResourceLimitExceeded", QUOTA.format(limit=2, used=2, delta=1))
    with pytest.raises(CapacityError) as caught:
        service.submit(max_attempts=6, first_wait_s=300)
    assert service.waits_s == [300, 600, 600, 600, 600]
    why = "the account's quota is 2, 2 are in use and the job needs 1"
    assert str(caught.value).splitlines() == [
        "no instances for the job, after 6 of at most 6 attempts",
        f"  ml.p4d.24xlarge (1 for dnn_group): ResourceLimitExceeded: {why}",
        "  to do: try again later, or change the group's instance type or the job's region",
    ]
    assert caught.value.exit_code is ExitCode.CAPACITY


def test_quota_that_no_waiting_changes_is_not_waited_for(service: Service) -> None:
    service.refuses("ResourceLimitExceeded", QUOTA.format(limit=0, used=0, delta=1))
    with pytest.raises(CapacityError, match="so waiting does not help") as caught:
        service.submit()
    assert service.waits_s == []
    assert "request a larger quota from Service Quotas" in str(caught.value)


def test_other_refusals_are_the_caller_s(service: Service) -> None:
    service.refuses("ValidationException", "no such role; ml.p4d.24xlarge CapacityErrorX")
    with pytest.raises(ClientError, match="ValidationException"):
        service.submit()


def test_long_name_has_room_for_the_number_of_the_attempt(service: Service) -> None:
    service.refuses("InsufficientCapacityException", "none").takes("x" * 60 + "-2").describes("Completed", "Completed")
    assert service.submit(job_name="x" * 60 + "-yz").job_name == "x" * 60 + "-2"


def test_stopped_job_has_the_code_of_sigterm(service: Service) -> None:
    service.takes().describes("Stopped", "MaxRuntimeExceeded")
    assert service.submit().exit_code == 143


REFUSED_CALL = (
    "AlgorithmError: ExecuteUserScriptError: ExitCode 1 botocore.exceptions.ClientError: An error occurred "
    "(ResourceLimitExceeded) when calling the CreateEndpoint operation, exit code: 1"
)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("AlgorithmError: HET-31 every endpoint was lost on algo-1, exit code: 1", 31),
        ("ClientError: no data", 30),
        (REFUSED_CALL, 30),  # it ran and was billed: the script met a quota, and the job lacked nothing
        ("AlgorithmError: HET-30 algo-2: the script raised CapacityError: shard is full, exit code: 1", 30),
    ],
)
def test_job_that_fails_for_another_reason_is_not_repeated(service: Service, reason: str, code: int) -> None:
    service.takes().describes("InProgress", "Training").describes("Failed", "Failed", reason)
    done = service.submit()
    assert (done.status, done.failure, done.exit_code) == ("Failed", reason, code)


def test_job_is_followed_on_where_its_state_cannot_be_asked_for_a_while(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.takes()
    service.stubber.add_client_error("describe_training_job", "ExpiredTokenException", "too old", 400)
    service.describes("Completed", "Completed")
    assert service.submit().status == "Completed"
    (warning,) = warnings_of(caplog)
    assert warning.endswith("trying again: ExpiredTokenException: too old")


def test_job_that_cannot_be_followed_for_long_is_given_up_but_not_called_ended(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.takes().describes("InProgress", "Training")
    for _ in range(61):
        service.stubber.add_client_error("describe_training_job", "ExpiredTokenException", "too old", 400)
    with pytest.raises(Exception, match="too old"):
        service.submit()
    assert "The job was submitted and continues" in caplog.messages[-1]


def test_number_of_attempts_below_1_is_refused(service: Service) -> None:
    with pytest.raises(ConfigError, match="max_attempts is 0; expected 1 or more"):
        service.submit(max_attempts=0)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (NO_CAPACITY, "CapacityError"),
        ("InsufficientCapacityError: no", "InsufficientCapacityError"),
        ("ThrottlingException: Rate exceeded", None),
        ("AlgorithmError: MyCapacityErrorHandler failed", None),
        ("", None),
    ],
)
def test_shortage_is_told_by_the_service_s_own_words(text: str, kind: str | None) -> None:
    found = shortage_in(text, REQUEST)
    assert (found and found.kind) == kind


def test_types_of_one_group_each_get_their_line() -> None:
    groups = [("a", "ml.c5.xlarge", 1), ("b", "ml.c5.xlarge", 2), ("c", "ml.g5.xlarge", 1)]
    listed = [dict(zip(("InstanceGroupName", "InstanceType", "InstanceCount"), group, strict=True)) for group in groups]
    request = TrainingRequest.parse({"ResourceConfig": {"InstanceGroups": listed}})
    found = shortage_in(NO_CAPACITY, request)
    assert found is not None
    assert [line.partition(":")[0] for line in found.lines(request)] == [
        "ml.c5.xlarge (3 for a, b)",
        "ml.g5.xlarge (1 for c)",
    ]

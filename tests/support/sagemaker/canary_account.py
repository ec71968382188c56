"""An account for canary jobs: buckets, jobs and figures, which botocore's event handlers answer from."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Callable
from typing import Any

from hetero.pricing import Catalogue

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
        import boto3
        from sagemaker.session import Session

        boto_session = boto3.Session(aws_access_key_id="none", aws_secret_access_key="none", region_name="us-east-1")
        self._lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.watched: set[str] = set()
        """Hosts whose figures were asked for, without the names of their jobs."""
        self.status = "Completed"
        self._seconds = seconds
        self.cpu_percent = cpu_percent
        boto_session.events.register("before-call", self.answer)
        self.session = Session(
            boto_session=boto_session, sagemaker_client=boto_session.client("sagemaker"), sagemaker_config=QUIET
        )

    def estimator(self, **more: Any) -> Any:
        from sagemaker.estimator import Estimator

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
        return Estimator(**values | more)

    def answer(self, *, event_name: str, params: dict[str, Any], **_: Any) -> tuple[Any, dict[str, Any]]:
        """Return the response of a call, which botocore has validated before."""
        operation = event_name.split(".")[-1]
        with self._lock:  # jobs start in several threads
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
        kind = request["ResourceConfig"].get("InstanceType", "")
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
        return {"Error": {"Code": "404", "Message": "a job without hetero lacks a report"}}

    def GetMetricData(self, params: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        body = params["body"]
        queries = json.loads(body)["MetricDataQueries"] if isinstance(body, str | bytes) and body else []
        for each in queries:
            (dimension,) = each["MetricStat"]["Metric"]["Dimensions"]
            self.watched.add(dimension["Value"].rpartition("/")[2])
        values = {"cpu": self.cpu_percent, "memory": 40.0}
        return {
            "MetricDataResults": [
                {"Id": each["Id"], "Values": [values[each["Id"].partition("_")[0]]] * 5}
                for each in queries
                if self.cpu_percent is not None and each["Id"].partition("_")[0] in values
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

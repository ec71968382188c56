"""Objects of the SageMaker SDK for tests, and requests without one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from hetero.sagemaker import offline_session

ROLE = "arn:aws:iam::000000000000:role/training"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.5.1-gpu-py311-cu124-ubuntu22.04-sagemaker"


def channel(name: str, *groups: str, **source: Any) -> dict[str, Any]:
    """Return an input of a request, for these groups if there are any."""
    s3 = {"S3DataType": "S3Prefix", "S3Uri": f"s3://bucket/{name}", "S3DataDistributionType": "FullyReplicated"}
    if groups:
        s3["InstanceGroupNames"] = list(groups)  # type: ignore[assignment]
    return {"ChannelName": name, "DataSource": {"S3DataSource": s3 | source}}


CLEAN: dict[str, Any] = {
    "TrainingJobName": "train",
    "RoleArn": ROLE,
    "AlgorithmSpecification": {"TrainingImage": IMAGE, "TrainingInputMode": "FastFile"},
    "HyperParameters": {"hetero_script": '"train.py"', "epochs": "3"},
    "Environment": {"OMP_NUM_THREADS": "1"},
    "InputDataConfig": [channel("training", "data_group"), channel("labels", "data_group", "dnn_group")],
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
    "ResourceConfig": {
        "VolumeSizeInGB": 30,
        "InstanceGroups": [
            {"InstanceGroupName": "data_group", "InstanceType": "ml.c5.9xlarge", "InstanceCount": 2},
            {"InstanceGroupName": "dnn_group", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1},
        ],
    },
    "StoppingCondition": {"MaxRuntimeInSeconds": 7200},
}
"""A heterogeneous job that nothing is wrong with."""


def clean() -> dict[str, Any]:
    """Return a copy of `CLEAN` to change."""
    return copy.deepcopy(CLEAN)


def groups() -> list[Any]:
    """Return the groups of `CLEAN` for an estimator of version 2."""
    from sagemaker.instance_group import InstanceGroup

    return [InstanceGroup("data_group", "ml.c5.9xlarge", 2), InstanceGroup("dnn_group", "ml.g5.xlarge", 1)]


def pytorch(source_dir: Path, **arguments: Any) -> Any:
    """Return an estimator of version 2 with two groups. Arguments beat what it would have, and None takes it away."""
    from sagemaker.pytorch import PyTorch

    given = {
        "entry_point": "launcher.py",
        "source_dir": str(source_dir),
        "role": ROLE,
        "sagemaker_session": offline_session(),
        "instance_groups": groups(),
        "framework_version": "2.3",
        "py_version": "py311",
        "max_run": 7200,
    }
    return PyTorch(**{name: value for name, value in (given | arguments).items() if value is not None})

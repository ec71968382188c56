"""Figures of CloudWatch as resources of a host."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from hetero.pricing import Catalogue
from hetero.sagemaker.canaries.canary import _Hosts
from hetero.sagemaker.canaries.watching import resources_of_job
from hetero.sagemaker.request import RequestGroup

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class CloudWatch:
    """Answers every query with the values of its metric."""

    def __init__(self, **values: list[float]) -> None:
        self._values = values

    def get_metric_data(self, **request: Any) -> dict[str, Any]:
        names = [(each["Id"], each["MetricStat"]["Metric"]["MetricName"]) for each in request["MetricDataQueries"]]
        return {"MetricDataResults": [{"Id": key, "Values": self._values.get(name, [])} for key, name in names]}


@pytest.mark.parametrize(
    ("instance_type", "percent", "gib"),
    [
        ("ml.p3.8xlarge", 200.0, 32.0),  # four GPUs of 16 GiB, half full
        ("ml.p3.8xlarge", 400.0, 64.0),
        ("ml.p3.2xlarge", 50.0, 8.0),
    ],
)
def test_memory_of_gpus_is_a_sum_over_the_gpus(instance_type: str, percent: float, gib: float) -> None:
    groups = [RequestGroup(name="training", instance_type=instance_type, count=1)]
    hosts = _Hosts.of(groups, {}, Catalogue.load())
    found = resources_of_job(
        CloudWatch(CPUUtilization=[100.0], GPUUtilization=[300.0], GPUMemoryUtilization=[percent / 2, percent]),
        "job",
        ["algo-1"],
        began=NOW,
        ended=NOW,
        memory_bytes=hosts.memory_bytes,
        one_gpu_bytes=hosts.one_gpu_bytes,
    )
    assert found.gpu_memory_peak_bytes == gib * 2**30
    assert found.gpu_memory_mean_bytes == 0.75 * gib * 2**30

"""A finished training job as a point of a forecast: its phases, and what CloudWatch has of its instances.

CloudWatch has one value per minute, in percent. It may lack a job of less than two minutes. Then the time is
forecast, and the resources are not. The percentages of GPUs and of their memory are sums over the GPUs of an instance:
four GPUs that are half full have 200 %.

Source: https://docs.aws.amazon.com/sagemaker/latest/dg/monitoring-cloudwatch.html
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

from hetero.decide.canary.points import CanaryPoint, Part, Resources
from hetero.decide.studies.runs import FINISHED, RunResult
from hetero.report.model import Report
from hetero.sagemaker.request import RequestGroup

__all__ = ["names_of_trainers", "point_of_job", "resources_of_job"]

_NAMESPACE = "/aws/sagemaker/TrainingJobs"
_NAMES = {
    "cpu": "CPUUtilization",
    "memory": "MemoryUtilization",
    "gpu": "GPUUtilization",
    "gpu_memory": "GPUMemoryUtilization",
}
_PERIOD_S = 60
# Two periods. One, because a value has the time at which its period begins. One, because the clock of this machine may
# differ from that of the service.
_MARGIN = dt.timedelta(seconds=2 * _PERIOD_S)
"""Time before the begin and after the end of a job for which values are requested too."""
_GROWING = ("downloading", "training")
"""Phases of a job that may grow with its data. The service names them."""


def point_of_job(result: RunResult, *, fraction: float, resources: Resources) -> CanaryPoint:
    """Return the point of a job.

    Args:
        result: The job's result, with the seconds of each phase that the service states.
        fraction: Share of the data that the job had.
        resources: What CloudWatch has of the job.
    """
    # The forecast extrapolates the time of the parts that grow with the data. All other time of the job is fixed, also
    # the upload.
    phases = {name: seconds for name, seconds in result.phases.items() if name in (*_GROWING, "uploading")}
    parts = [Part(name=name, seconds=seconds, grows=name in _GROWING) for name, seconds in phases.items()]
    # If the service described none of the phases that grow, the whole job is one part that grows.
    if not any(part.grows for part in parts):
        parts = [Part(name="job", seconds=result.wall_s, grows=True)]
    return CanaryPoint(
        run_id=result.run_id,
        fraction=fraction,
        replicate=result.replicate,
        # `result.wall_s` is the billed time, which may be shorter than all phases together. But the parts of a point
        # together may not be longer than the whole.
        wall_s=max(result.wall_s, sum(part.seconds for part in parts)),
        parts=tuple(parts),
        resources=resources,
        failure="" if result.state == FINISHED else result.cause or result.state,
    )


def names_of_trainers(
    groups: Sequence[RequestGroup], trainers: Sequence[RequestGroup], report: Report | None
) -> list[str]:
    """Return the names of the hosts that train, such as ``algo-1``. Empty if they are not known.

    If some hosts do not train, the names come from the job's report, because the platform does not specify which names
    a group gets.
    """
    if len(trainers) == len(groups):
        return [f"algo-{number}" for number in range(1, sum(group.count for group in groups) + 1)]
    return [] if report is None else sorted({rank.host for rank in report.run.ranks})


def resources_of_job(
    client: Any,
    job_name: str,
    hosts: Sequence[str],
    *,
    began: dt.datetime,
    ended: dt.datetime,
    memory_bytes: float | None,
    one_gpu_bytes: float | None,
) -> Resources:
    """Return the resources of a job's instances, from CloudWatch. CPU and GPU use are those of the mean instance.

    Args:
        client: boto3's CloudWatch client.
        job_name: Name of the job.
        hosts: Names of its instances that train, such as ``algo-1``.
        began: Begin of the time to ask for.
        ended: End of that time.
        memory_bytes: Memory of an instance. None leaves out its memory.
        one_gpu_bytes: Memory of one GPU. None leaves out the memory of the GPUs.
    """
    queries = [
        {
            "Id": f"{key}_{number}",
            "MetricStat": {
                "Metric": {
                    "Namespace": _NAMESPACE,
                    "MetricName": name,
                    "Dimensions": [{"Name": "Host", "Value": f"{job_name}/{host}"}],
                },
                "Period": _PERIOD_S,
                "Stat": "Average",
            },
        }
        for key, name in _NAMES.items()
        for number, host in enumerate(hosts)
    ]
    found: dict[str, list[float]] = {}
    # The service takes at most 500 queries in a call.
    for begin in range(0, len(queries), 500):
        arguments: dict[str, Any] = {
            "MetricDataQueries": queries[begin : begin + 500],
            "StartTime": began - _MARGIN,
            "EndTime": ended + _MARGIN,
            "ScanBy": "TimestampAscending",
        }
        while True:
            answer = client.get_metric_data(**arguments)
            for each in answer.get("MetricDataResults", ()):
                found.setdefault(str(each["Id"]), []).extend(float(value) for value in each.get("Values", ()))
            if not answer.get("NextToken"):
                break
            arguments["NextToken"] = answer["NextToken"]
    return _resources(found, len(hosts), memory_bytes, one_gpu_bytes)


def _resources(
    found: dict[str, list[float]], num_hosts: int, memory_bytes: float | None, one_gpu_bytes: float | None
) -> Resources:
    """Return CPU, memory and GPU of a job from CloudWatch's values, by metric and number of the host."""
    # For each metric: the values of each host, in percent, one per minute.
    by_host = {key: [found.get(f"{key}_{number}", []) for number in range(num_hosts)] for key in _NAMES}
    if not any(by_host["cpu"]):
        return Resources()
    fields: dict[str, Any] = {}
    for key in ("cpu", "gpu"):
        percents = [percent for host in by_host[key] for percent in host]
        if percents:
            fields |= {f"{key}_percent_mean": sum(percents) / len(percents), f"{key}_percents": tuple(percents)}
    # The host with the highest peak decides whether the memory is enough. For GPUs, 100 % is the memory of one GPU:
    # four GPUs that are half full have 200 %. So multiply by the memory of one GPU. With that of all four, 16 GiB each,
    # the peak was once 128 GiB.
    for key, total_bytes in (("memory", memory_bytes), ("gpu_memory", one_gpu_bytes)):
        fullest = sorted(max(by_host[key], key=lambda host: max(host, default=0.0)))
        if fullest and total_bytes is not None:
            p99 = fullest[min(len(fullest) - 1, int(0.99 * len(fullest)))]
            percents_of = {"mean": sum(fullest) / len(fullest), "p99": p99, "peak": fullest[-1]}
            fields |= {f"{key}_{name}_bytes": percent / 100 * total_bytes for name, percent in percents_of.items()}
    # CloudWatch does not show how much memory a host uses before it reads data. So state 0 bytes, and the forecast lets
    # the whole memory grow with the data.
    if "memory_peak_bytes" in fields:
        fields["memory_base_bytes"] = 0.0
    return Resources(**fields)

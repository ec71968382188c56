"""Logs the metrics of a job as lines that a platform's metric definitions match, see `hetero.metrics.lines`.

Only the first trainer host logs them. A platform that reads the logs of all hosts would count every copy of a line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from hetero.control.status import HostStatus
from hetero.launch.reporting.summaries import longest_summary
from hetero.launch.wanted_hosts import Estimate
from hetero.metrics.figures import Figure
from hetero.metrics.lines import metric_text
from hetero.report.model import Report

__all__ = ["log_metrics", "progress_metrics", "result_metrics"]

logger = logging.getLogger(__name__)


def log_metrics(metrics: Mapping[str, float]) -> None:
    """Log one line for each metric with a finite value."""
    for name, value in metrics.items():
        text = metric_text(name, value)
        if text is not None:
            logger.info("%s", text)


def progress_metrics(
    trainers: Sequence[HostStatus], *, num_endpoints: int, wanted: Estimate | None = None
) -> dict[str, float]:
    """Return the metrics of a running job, from the last reports of its ranks. Empty before the first step.

    Args:
        trainers: Last status of each trainer host.
        num_endpoints: Number of endpoints that serve.
        wanted: How many data hosts the job could use. None if it is not known.
    """
    of_ranks = [longest_summary(report.summaries_json) for status in trainers for report in status.ranks]
    summaries = [summary for summary in of_ranks if summary is not None]
    if not summaries:
        return {}
    # All ranks take part in each step. Therefore the rank with the fewest steps gives the steps of the job, and the
    # slowest rank gives the times.
    metrics: dict[str, float] = {"steps": min(summary.num_steps for summary in summaries)}
    metrics |= _largest("step_time_ms", (summary.step_time_mean_s for summary in summaries), factor=1000)
    metrics |= _largest("data_wait_ms", (summary.data_wait_mean_s for summary in summaries), factor=1000)
    wait_shares = (None if summary.utilisation is None else 1 - summary.utilisation for summary in summaries)
    metrics |= _largest("data_wait_percent", wait_shares, factor=100)
    # The sum is right only if every rank has measured its rate.
    rates = [summary.samples_per_s for summary in summaries]
    if None not in rates:
        metrics["samples_per_second"] = sum(rate for rate in rates if rate is not None)
    if num_endpoints:
        metrics["endpoints"] = num_endpoints
    if wanted is not None:
        metrics |= {
            "wanted_data_hosts": wanted.hosts,
            "wanted_data_hosts_low": wanted.low,
            "wanted_data_hosts_high": wanted.high,
        }
    return metrics


def result_metrics(report: Report) -> dict[str, float]:
    """Return the metrics of a finished job, taken from its report."""
    cost = report.cost
    figures: dict[str, Figure | None] = {
        "usd": cost.run,
        "usd_per_1k_steps": cost.per_1k_steps,
        "usd_per_million_samples": cost.per_million_samples,
    }
    return {
        "wall_seconds": report.run.wall_s,
        **{name: figure.value for name, figure in figures.items() if figure is not None},
        "job_restarts": report.run.events.get("job restarts", 0),
        "endpoint_restarts": report.run.events.get("endpoint restarts", 0),
    }


def _largest(name: str, values: Iterable[float | None], factor: float) -> dict[str, float]:
    """Return a metric with the largest known value, multiplied by a factor. Empty if no value is known."""
    measured = [value for value in values if value is not None]
    return {name: factor * max(measured)} if measured else {}

"""Log lines with one figure each, ``hetero_metric NAME=VALUE``, from which a platform can make charts.

This is a separate module because the preparation of a SageMaker job needs the names and must not import the launcher.
"""

from __future__ import annotations

import math

__all__ = ["METRIC_MARK", "METRIC_NAMES", "metric_text"]

METRIC_MARK = "hetero_metric"
METRIC_NAMES = {
    "steps": "steps of the loader that is used longest, on the rank with the fewest steps among those that have begun",
    "step_time_ms": "mean time of a step after the warm-up, on the slowest rank",
    "data_wait_ms": "mean time per step that a rank waits for its next batch, on the rank that waits longest",
    "data_wait_percent": "data_wait_ms as a share of that rank's step time",
    "samples_per_second": "of all ranks together",
    "endpoints": "endpoints that serve, or workers of tf.data.service with their dispatcher",
    "wanted_data_hosts": "data hosts that would keep the ranks from waiting, estimated from the latest two minutes",
    "wanted_data_hosts_low": "lower end of the 90 % interval of wanted_data_hosts",
    "wanted_data_hosts_high": "upper end of the 90 % interval of wanted_data_hosts",
    "wall_seconds": "from the start of the first trainer host's launcher to the report",
    "usd": "list prices of all hosts for that time",
    "usd_per_1k_steps": "list prices of all hosts for 1,000 steps, without start-up",
    "usd_per_million_samples": "list prices of all hosts for a million samples, without start-up",
    "job_restarts": "restarts of the trainer group",
    "endpoint_restarts": "endpoints that crashed and were started again",
}
"""All figures with their meanings. ``wall_seconds`` and the figures after it are logged once, with the report."""


def metric_text(name: str, value: float) -> str | None:
    """Return the log line of a figure, written without an exponent. Return None if the value is not finite."""
    if not math.isfinite(value):
        return None
    assert name in METRIC_NAMES
    number = f"{value:.6f}".rstrip("0").rstrip(".")
    return f"{METRIC_MARK} {name}={number}"

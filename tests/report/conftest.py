"""Runs as the published tables describe them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hetero.metrics.hosts import HostUsage
from hetero.metrics.steps import StepSummary
from hetero.report import GroupFacts, RankFacts, RunFacts

FactsMaker = Callable[..., RunFacts]


def make_summary(step_time_s: float | None, utilisation: float = 0.4, **changes: Any) -> StepSummary:
    num_measured = 0 if step_time_s is None else 100
    step_s = step_time_s or 0.0
    wait_s = step_s * (1 - utilisation)
    known = step_time_s is not None
    values: dict[str, Any] = {
        "name": "photos/train",
        "num_steps": num_measured + 5,
        "num_samples": 64 * (num_measured + 5),
        "batch_samples": 64,
        "warmup_steps": 5,
        "num_steps_measured": num_measured,
        "num_samples_measured": 64 * num_measured,
        "compute_total_s": num_measured * (step_s - wait_s),
        "data_wait_total_s": num_measured * wait_s,
        "step_time_mean_s": step_time_s,
        "step_time_p50_s": step_time_s,
        "step_time_p95_s": step_s * 1.5 if known else None,
        "data_wait_mean_s": wait_s if known else None,
        "data_wait_p50_s": wait_s if known else None,
        "data_wait_p95_s": wait_s * 1.5 if known else None,
        "utilisation": utilisation if known else None,
        "samples_per_s": 64 / step_s if known else None,
    }
    return StepSummary(**values | changes)


def make_usage(host: str, **changes: Any) -> HostUsage:
    values: dict[str, Any] = {
        "host": host,
        "scope": "tree",
        "duration_s": 60.0,
        "num_readings": 60,
        "num_cpus": 2,
        "cpu_seconds": 30.0,
        "cpu_percent_mean": 50.0,
        "cpu_percent_peak": 120.0,
        "memory_basis": "rss",
        "memory_mean_bytes": 1e9,
        "memory_peak_bytes": 2 * 10**9,
        "memory_total_bytes": 8 * 10**9,
        "network_sent_bytes": None,
        "network_received_bytes": None,
    }
    return HostUsage(**values | changes)


@pytest.fixture
def make_facts() -> FactsMaker:
    """A run of the published PyTorch pair. Keyword arguments change it."""

    def make(*, is_heterogeneous: bool = False, step_time_s: float | None = None, **changes: Any) -> RunFacts:
        groups = [GroupFacts(name="dnn_group", role="trainer", instance_type="ml.p3.2xlarge", count=1)]
        if is_heterogeneous:
            groups.append(GroupFacts(name="data_group", role="data", instance_type="ml.c5.9xlarge", count=1))
        step_s = step_time_s or (0.184 if is_heterogeneous else 1.193)
        values: dict[str, Any] = {
            "run_id": "r-2" if is_heterogeneous else "r-1",
            "command": "train.py --epochs 2",
            "started_at": "2026-03-01T12:00:00+00:00",
            "wall_s": 130.0,
            "exit_code": 0,
            "placement": "heterogeneous" if is_heterogeneous else "homogeneous",
            "groups": tuple(groups),
            "ranks": (RankFacts(rank=0, host="algo-1", loaders=(make_summary(step_s),)),),
            "hosts": (make_usage("algo-1"),),
            "simulated": ("Hosts share one machine.",),
        }
        return RunFacts(**values | changes)

    return make


@pytest.fixture
def summary_of() -> Callable[..., StepSummary]:
    return make_summary


@pytest.fixture
def usage_of() -> Callable[..., HostUsage]:
    return make_usage

"""The jobs of bench_plan_runs.py, and what becomes of their step times. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from hetero import cli, config

Load = Callable[[str], ModuleType]


@pytest.fixture
def plan_runs(load: Load) -> ModuleType:
    """The benchmark."""
    return load("bench_plan_runs")


def test_at_least_twelve_clusters_are_run(plan_runs: ModuleType) -> None:
    assert sum(len(job.clusters) for job in plan_runs.JOBS) >= 12


def test_commands_of_all_jobs_are_understood(plan_runs: ModuleType) -> None:
    for job in plan_runs.JOBS:
        for cluster in job.clusters:
            for is_profile in (False, True):
                command = plan_runs.command(job, cluster, "runs/x", num_steps=100, is_profile=is_profile)
                arguments = command[command.index("simulate") : command.index("--")]
                assert config.parse(cli._make_parser(), arguments).profile is (True if is_profile else None)


def test_emulated_trainer_endpoints_are_all_vcpus_of_the_host(plan_runs: ModuleType) -> None:
    for job in plan_runs.JOBS:
        for cluster in job.clusters:
            if job.sample_s and cluster.trainer_endpoints:
                assert cluster.trainer_endpoints == plan_runs.machine_of(job, plan_runs.TRAINER, None).vcpus


def test_measured_steps_are_whole_rounds_of_the_endpoints(plan_runs: ModuleType) -> None:
    job = next(job for job in plan_runs.JOBS if job.name == "hosts")
    cluster = next(cluster for cluster in job.clusters if cluster.name == "two-types")
    candidate = plan_runs.candidate_of(job, cluster)
    assert [(group.machine.vcpus, group.count) for group in candidate.data] == [(8, 1), (4, 1)]
    num_steps = plan_runs.steps_of(job, cluster, candidate, 0.04)
    assert num_steps % 12 == 0
    assert num_steps * 0.04 >= plan_runs.SECONDS


def test_table_has_errors_and_compares_them_with_the_bounds(plan_runs: ModuleType) -> None:
    outcomes = [
        plan_runs.Outcome(
            job="hosts",
            cluster=f"c{index}",
            predicted_s=0.1,
            low_s=0.09,
            high_s=0.11,
            bottleneck="preprocessing",
            real_s=real_s,
            num_steps=100,
            load=0.5,
        )
        for index, real_s in enumerate((0.1, 0.1, 0.1, 0.08))
    ]
    text = plan_runs.render(outcomes)
    assert "| hosts | c3 | preprocessing | 100.0 | 90.0 to 110.0 | 80.0 | +25.0 % | **no** | 0.5 |" in text
    assert "- absolute error, median: 0.000, at most 0.1 wanted: met" in text
    assert "- absolute error, 95th percentile: 0.250, at most 0.2 wanted: **MISSED**" in text
    assert (
        "- share of the intervals that contain the real step time: 0.750 of 4, 0.8 to 0.97 wanted: **MISSED**" in text
    )

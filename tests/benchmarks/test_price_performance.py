"""What price_performance.py has the launchers do, for both backends. Nothing runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hetero import cli, config
from hetero.errors import ConfigError

Load = Callable[[str], ModuleType]


@pytest.fixture
def price_performance(load: Load) -> ModuleType:
    """The benchmark."""
    return load("price_performance")


def option(arguments: Any, name: str) -> str:
    """Return the value of a flag."""
    return str(arguments[arguments.index(name) + 1])


@pytest.mark.parametrize("backend", ["grpc", "tf"])
@pytest.mark.parametrize("name", ["seed-pt", "seed-tf"])
def test_jobs_of_a_profile_are_understood(price_performance: ModuleType, name: str, backend: str) -> None:
    profile = price_performance.load_profile(name)
    for configuration in (profile.baseline, *profile.candidates):
        job = price_performance.BACKENDS[backend].job(profile, configuration)
        command = price_performance.command(profile, configuration, job, "runs/x")
        end = command.index("--")
        assert config.parse(cli._make_parser(), command[:end]).run is not None
        # Whole turns of all vCPUs after the warm-up, and one more step.
        steps, warmup_steps = int(option(command[end:], "--steps")), int(option(command, "--warmup-steps"))
        per_turn = price_performance.num_vcpus(profile, configuration) // profile.num_ranks
        assert (steps - 1 - warmup_steps) == profile.cycles * per_turn


def test_endpoints_emulate_samples_on_the_hosts_that_a_configuration_names(price_performance: ModuleType) -> None:
    profile = price_performance.load_profile("seed-tf")
    job = price_performance.endpoint_job(profile, profile.candidates[1])
    assert float(option(job.flags, "--emulate-sample-seconds")) == pytest.approx(0.576)
    assert option(job.flags, "--trainer-endpoints") == "1"
    assert job.script == "scripts/train_emulated.py"


@pytest.mark.parametrize(
    ("index", "flags", "per_pipeline", "num_pipelines"),
    [
        (0, ["--framework", "tensorflow"], 12, 8),  # each of 8 ranks its own
        (1, ["--data-service", "tf", "--tf-workers-per-host", "1", "--trainer-tf-workers", "0"], 72, 2),
        # Hosts of 72 and of 96 vCPUs run the same pipeline, so it stands for 24 of them.
        (2, ["--data-service", "tf", "--tf-workers-per-host", "3", "--trainer-tf-workers", "4"], 24, 2 * 3 + 4),
    ],
)
def test_tf_pipelines_have_a_branch_for_every_vcpu(
    price_performance: ModuleType, index: int, flags: list[str], per_pipeline: int, num_pipelines: int
) -> None:
    profile = price_performance.load_profile("seed-tf")
    configuration = (profile.baseline, *profile.candidates)[index]
    job = price_performance.tf_job(profile, configuration)
    assert list(job.flags) == flags
    assert option(job.script_args, "--vcpus") == str(per_pipeline)
    assert float(option(job.script_args, "--sample-seconds")) == pytest.approx(0.576)
    assert num_pipelines * per_pipeline == price_performance.num_vcpus(profile, configuration)


def test_tf_pipelines_that_cannot_stand_for_the_hosts_are_refused(price_performance: ModuleType) -> None:
    profile = price_performance.load_profile("seed-tf")
    with pytest.raises(ConfigError, match=r"multiple of the number of ranks, 7"):
        price_performance.tf_job(dataclasses.replace(profile, num_ranks=7), profile.baseline)
    groups = ("data_a=ml.c5.9xlarge:1", "data_b=ml.c5.18xlarge:1", "dnn_group=ml.p4d.24xlarge:1")
    with pytest.raises(ConfigError, match=r"data hosts of one size"):
        price_performance.tf_job(profile, price_performance.Configuration(name="two sizes", groups=groups))


@pytest.mark.parametrize(("backend", "expected"), [("grpc", "; 2 batches took longer than emulated"), ("tf", "ms)")])
def test_overruns_are_told_where_real_work_is_part_of_the_emulated_time(
    price_performance: ModuleType, backend: str, expected: str
) -> None:
    profile = price_performance.load_profile("seed-tf")
    made = price_performance.BACKENDS[backend]
    outcome = price_performance.Outcome(
        configuration=profile.baseline,
        step_times_s=(0.192,),
        hourly_usd=37.688,
        num_overruns=2 if made.counts_overruns else None,
    )
    text = price_performance.render(profile, [outcome], made)
    assert text.splitlines()[0] == f"# {profile.title}{made.title}"
    (line,) = [line for line in text.splitlines() if line.startswith("- homogeneous")]
    assert line.endswith(expected)

"""`hetero profile` of real scripts: what it measures, what it leaves, and what it says of scripts that it cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest

from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.plan import make_plan
from hetero.errors import ConfigError
from hetero.metrics.profile.profile import Profile, load_profile
from hetero.metrics.profile.text import first_sentence
from hetero.pricing import Catalogue
from hetero.sample_costs.measuring import burst_sizes
from hetero.system.cgroups import usable_cpus
from tests.support.integration.harness import Job, Start, StartJob, StartLauncher

SCRIPT = Path(__file__).parent / "scripts" / "profiled.py"
IMAGE_BYTES = 3 * 8 * 8 * 4 + 8
"""Bytes of a sample's tensors."""
EMULATED = ["--emulate-sample-seconds", "0.01", "--emulate-step-seconds", "0.02"]
"""Flags of a job whose hosts do not measure samples, which takes every CPU for many seconds."""
WITHOUT_WORK = ["--step-s", "0", "--cpu-s", "0"]
"""Arguments of a script whose job is emulated."""


class StartProfile(Protocol):
    """Starts ``hetero profile``."""

    def __call__(self, *flags: str, args: Sequence[str] = ()) -> Job: ...


@pytest.fixture
def start_profile(start: Start, tmp_path: Path) -> StartProfile:
    """Return a function that profiles the script."""

    def run(*flags: str, args: Sequence[str] = ()) -> Job:
        command = [sys.executable, "-m", "hetero.cli", "profile", "--output-dir", str(tmp_path / "run"), *flags]
        return start([*command, str(SCRIPT), "--", "--output", str(tmp_path), *args], tmp_path, {})

    return run


def load(job: Job) -> Profile:
    assert not (job.directory / "checkpoint").exists()
    assert not (job.directory / "run" / "report.json").exists()
    return load_profile(job.directory / "run")


def test_profile_measures_the_steps_and_the_samples_of_a_script(start_profile: StartProfile) -> None:
    job = start_profile("--instance-type", "ml.g5.2xlarge")
    assert job.wait(300.0) == 0, job.output
    profile = load(job)
    training, supply = profile.training, profile.supply[0]
    # The script waits for data in the first phase, and for nothing in the second.
    assert training.step_s.mean > 0.055
    assert 0.02 <= training.headspace_s.p50 < 0.9 * training.step_s.mean
    assert training.data_wait_s.mean == pytest.approx(training.step_s.mean - 0.02, rel=0.35)
    assert training.headspace_s.num_measured >= 50
    assert (training.batch_samples, training.num_local_processes, training.steps_per_epoch) == (16, 1, 6250)
    assert training.rank_cpu_cores is not None
    assert training.receive_cpu_s_per_gb is not None
    assert (training.headspace_s.basis, supply.sample_cpu_s.basis, profile.simulated) == ("measured", "measured", ())
    # Samples cost what the script says.
    assert (supply.instance_type, training.instance_type) == ("ml.g5.2xlarge", "ml.g5.2xlarge")
    assert supply.sample_cpu_s.p50 == pytest.approx(0.004, rel=0.3)
    assert supply.sample_wait_s.p50 < 0.004
    points = supply.concurrency
    # On a busy machine the samples also wait, so there may be larger bursts.
    sizes = [point.num_processes for point in points if point.num_processes <= usable_cpus()]
    assert sizes == burst_sizes(usable_cpus())
    assert points[0].cpu_s_per_sample == pytest.approx(0.004, rel=0.5)
    assert supply.endpoint_private_bytes is not None
    assert supply.endpoint_private_bytes.value > 1e6
    # The bytes are those of the tensors.
    assert [(leaf.dtype, leaf.fits_uint8) for leaf in profile.leaves] == [("float32", True), ("int64", True)]
    assert profile.wire_bytes_per_sample is not None
    assert IMAGE_BYTES < profile.wire_bytes_per_sample.value < IMAGE_BYTES + 40
    # The page is printed, with the progress before it.
    assert "# Profile" in job.output
    assert first_sentence(profile) in job.output
    assert "profiling: headspace" in job.output
    assert "all steps are measured: the training ends now, and writes no checkpoint" in job.output
    assert "the stop callbacks are not called" in job.output
    assert not (job.directory / "finished").exists()


def test_profile_of_a_script_that_ends_early_uses_what_was_measured(start_profile: StartProfile) -> None:
    # The real work of a step takes three times the emulated time.
    work = ["--step-s", "0.06", "--cpu-s", "0", "--max-steps", "40"]
    job = start_profile(*EMULATED, "--emulate-vcpus", "4", args=work)
    assert job.wait(300.0) == 0, job.output
    profile = load(job)
    training, (supply,) = profile.training, profile.supply
    assert (training.vcpus, training.num_local_processes, supply.vcpus) == (4, 4, 4)
    assert (supply.sample_cpu_s.mean, supply.concurrency[-1].samples_per_s) == (0.01, 400.0)
    assert (training.step_s.num_measured, training.headspace_s.num_measured) == (29, 29)
    assert 0.5 < training.excess_share < 0.9
    assert "of the measured times may be due to other work of the machine, so the profile gives no answer" in job.output
    assert "so their times are upper bounds: the profile run (a step took" in job.output
    with pytest.raises(ConfigError, match="so no plan follows from the profile"):
        make_plan(profile, Catalogue.load(), PlanOptions(trainer_type="ml.p3.2xlarge"))
    assert "ended before batches were repeated" in job.output
    assert (job.directory / "finished").read_text() == "40"


def test_profile_of_too_few_steps_fails_with_what_to_do(start_profile: StartProfile) -> None:
    job = start_profile(args=["--max-steps", "8"])
    assert job.wait(300.0) == 2, job.output
    assert (
        "the script ended after 7 complete steps of loader images on rank 0, 0 of them after the warm-up" in job.output
    )
    assert not (job.directory / "run" / "profile.json").exists()


def test_profile_of_a_data_set_object_measures_it_in_the_rank(start_profile: StartProfile) -> None:
    job = start_profile(args=["--object", "--cpu-s", "0.001"])
    assert job.wait(300.0) == 0, job.output
    profile = load(job)
    assert not profile.has_registered_dataset
    assert profile.supply[0].sample_cpu_s.p50 == pytest.approx(0.001, rel=0.5)
    assert profile.supply[0].concurrency == ()
    assert profile.training.receive_cpu_s_per_gb is not None
    assert [leaf.dtype for leaf in profile.leaves] == ["float32", "int64"]


def test_profile_of_a_simulated_job_has_both_types_of_host_and_is_labelled(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(
        ["dnn_group=ml.p3.2xlarge:2", "data_group=ml.c5.xlarge:2"],
        *("--profile", "--nproc-per-node", "2", *EMULATED),
        script=SCRIPT,
        args=["--output", str(tmp_path), *WITHOUT_WORK],
    )
    assert job.wait(300.0) == 0, job.output
    profile = load(job)
    hosts = [(each.instance_type, each.vcpus) for each in profile.supply]
    assert hosts == [("ml.p3.2xlarge", 8), ("ml.c5.xlarge", 4)], job.output
    training = profile.training
    assert (training.num_hosts, training.ranks_per_host) == (2, 2)
    assert (training.num_local_processes, training.has_data_hosts) == (0, True)
    bases = {training.headspace_s.basis, training.step_s.basis, *(each.sample_cpu_s.basis for each in profile.supply)}
    assert bases == {"simulated"}
    assert training.headspace_s.p50 == pytest.approx(0.02, rel=0.5)
    assert training.step_s.mean == pytest.approx(4 * 16 * 0.01 / 8, rel=0.3)  # on the four vCPUs of each data host
    assert len(profile.simulated) == 3  # also that the hosts are processes of one machine
    assert len(profile.leaves) == 2
    assert json.loads((job.directory / "run" / "profile.json").read_text())["schema_version"] == 1


@pytest.mark.long
def test_profile_of_two_hosts_measures_samples_on_both(start_launcher: StartLauncher, tmp_path: Path) -> None:
    flags, args = ("--profile", "--endpoints-per-host", "1"), ["--output", str(tmp_path), "--cpu-s", "0.002"]
    data_host = start_launcher("algo-1", *flags, script=SCRIPT, args=args)
    trainer = start_launcher("algo-2", *flags, script=SCRIPT, args=args)
    assert trainer.wait(300.0) == 0, trainer.output
    assert data_host.wait(300.0) == 0, data_host.output
    profile = load_profile(trainer.directory / "ml" / "output" / "data" / "algo-2")
    assert [each.instance_type for each in profile.supply] == ["ml.p3.2xlarge", "ml.c5.xlarge"]
    for supply in profile.supply:
        assert supply.sample_cpu_s.p50 == pytest.approx(0.002, rel=0.3)
        assert supply.concurrency[0].num_processes == 1
    assert profile.training.num_local_processes == 0
    assert profile.training.has_data_hosts
    assert not (tmp_path / "checkpoint").exists()


def test_profile_that_is_interrupted_writes_none(start_profile: StartProfile) -> None:
    job = start_profile()
    job.wait_line("profiling: as it runs")
    job.interrupt()
    assert job.wait(300.0) == 143, job.output
    assert not (job.directory / "run" / "profile.json").exists()
    assert not (job.directory / "checkpoint").exists()

"""Profiles of scripts that train with TensorFlow, in `fit` and in a loop of their own, and a plan from one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hetero.metrics.profile.profile import load_profile
from tests.support.integration.harness import DNN, Start, StartJob

SCRIPT = Path(__file__).parent / "scripts" / "tf_profiled.py"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install 'tensorflow>=2.16'"
    ),
]


def test_plan_from_a_profile_of_fit_adds_data_hosts_that_end_the_wait(
    start_job: StartJob, start: Start, tmp_path: Path
) -> None:
    flags = ["--framework", "tensorflow", "--profile"]
    emulated = ["--emulate-sample-seconds", "0.1", "--emulate-step-seconds", "0.1"]
    job = start_job([DNN], *flags, *emulated, script=SCRIPT, args=["--output", str(tmp_path), "--way", "fit"])
    assert job.wait(300.0) == 0, job.output
    assert "the training ends now, and writes no checkpoint" in job.output
    assert not (tmp_path / "checkpoint").exists()
    training = load_profile(job.directory / "run").training
    assert (training.batch_samples, training.num_local_processes, training.steps_per_epoch) == (16, 8, 6250)
    assert {training.headspace_s.basis, training.step_s.basis, training.data_wait_s.basis} == {"simulated"}
    # 8 emulated vCPUs need 0.2 s for the 16 samples of a step, and the emulated accelerator 0.1 s.
    assert training.headspace_s.p50 == pytest.approx(0.1, rel=0.3)
    assert training.step_s.mean == pytest.approx(0.2, rel=0.4)
    assert training.data_wait_s.mean == pytest.approx(training.step_s.mean - 0.1, abs=0.05)
    speeds = ["--vcpu-speed", "ml.c5.9xlarge=1", "--vcpu-speed", "ml.c5.18xlarge=1"]
    command = ["plan", str(job.directory / "run"), "--price-profile", "seed-2022", "--json", *speeds]
    planned = start([sys.executable, "-m", "hetero.cli", *command], tmp_path, {})
    assert planned.wait(300.0) == 0, planned.output
    plan = json.loads(planned.output)
    assert (plan["reason"], plan["chosen"]["groups"][0]["instance_type"]) == ("data hosts pay", "ml.c5.9xlarge")
    assert plan["chosen"]["step_time"]["value"] == pytest.approx(training.headspace_s.mean, rel=0.15)


@pytest.mark.long
def test_profile_of_a_loop_over_prefetched_batches_tells_waits_from_steps(start: Start, tmp_path: Path) -> None:
    flags = ["--framework", "tensorflow", "--instance-type", "ml.g5.2xlarge", "--output-dir", str(tmp_path / "run")]
    arguments = ["--output", str(tmp_path), "--way", "loop", "--cpu-s", "0.004", "--step-s", "0.02"]
    command = [sys.executable, "-m", "hetero.cli", "profile", *flags, str(SCRIPT), "--", *arguments]
    job = start(command, tmp_path, {})
    assert job.wait(300.0) == 0, job.output
    profile = load_profile(tmp_path / "run")
    training = profile.training
    # One process needs 0.064 s for the 16 samples of a step, and the step itself 0.02 s.
    assert training.step_s.mean > 0.06
    assert 0.02 <= training.headspace_s.p50 < 0.8 * training.step_s.mean
    assert training.data_wait_s.mean == pytest.approx(training.step_s.mean - 0.02, rel=0.35)
    assert training.headspace_s.num_measured >= 50
    assert (training.batch_samples, training.num_local_processes, training.steps_per_epoch) == (16, 1, 6250)
    assert {training.headspace_s.basis, training.data_wait_s.basis} == {"measured"}
    assert profile.supply[0].sample_cpu_s.p50 == pytest.approx(0.004, rel=0.3)
    assert [leaf.dtype for leaf in profile.leaves] == ["float32", "float64"]
    assert not (tmp_path / "finished").exists()

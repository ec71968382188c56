from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hetero.decide.planning.candidates import Candidate, DataGroup
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.steps.model import Prediction, StepModel
from hetero.metrics.profile.profile import CodecProfile, ConcurrencyPoint, Profile, Spread
from hetero.report.plan import UINT8
from tests.support.planning import make_profile, measured

TRAINER = Machine(instance_type="ml.p3.2xlarge", vcpus=8, network_bytes_per_s=1.25e9, memory_bytes=64e9)
DATA = Machine(instance_type="ml.c5.4xlarge", vcpus=16, network_bytes_per_s=0.6e9, memory_bytes=32e9)
EQUAL_SPEED = {"ml.c5.4xlarge": 1.0}


def predict(
    profile: Profile, *, hosts: int = 0, local: int = 0, form: str = "as is", trainer: Machine = TRAINER
) -> Prediction:
    groups = (DataGroup(machine=DATA, count=hosts),) if hosts else ()
    candidate = Candidate(trainer=trainer, num_trainer_hosts=1, local_endpoints=local, data=groups, form=form)
    (found,) = StepModel(profile, vcpu_speeds=EQUAL_SPEED).predict([candidate])
    return found


@pytest.mark.parametrize(
    ("hosts", "local", "step_s", "bottleneck"),
    [
        (1, 0, 64 * 0.1 / 16, "preprocessing"),
        (2, 0, 64 * 0.1 / 32, "preprocessing"),
        (1, 4, 64 * 0.1 / 20, "preprocessing"),
        (8, 0, 0.1, "accelerator"),
        (0, 4, 64 * 0.1 / 4, "preprocessing"),
        (0, 0, 0.1 + 64 * 0.1, "preprocessing"),  # the rank fetches between its steps
    ],
)
def test_step_time_is_that_of_the_slowest_part(hosts: int, local: int, step_s: float, bottleneck: str) -> None:
    found = predict(make_profile(headspace_s=0.1, cpu_s=0.1, sample_bytes=1000.0), hosts=hosts, local=local)
    assert found.step_s == pytest.approx(step_s, rel=0.02)
    assert found.bottleneck == bottleneck
    assert found.low_s <= found.step_s <= found.high_s


def test_network_of_the_data_hosts_limits_them() -> None:
    # 0.6 GB/s carry 60 samples/s of 10 MB. The CPUs make 160.
    found = predict(make_profile(headspace_s=0.01, cpu_s=0.1, sample_bytes=1e7, batch=4), hosts=1)
    assert found.step_s == pytest.approx(4 / 60, rel=0.05)
    assert found.bottleneck == "data network"


def test_network_of_the_trainer_host_limits_all_hosts_together() -> None:
    found = predict(make_profile(headspace_s=0.01, cpu_s=0.1, sample_bytes=1e7, batch=4), hosts=4)
    assert found.step_s == pytest.approx(4 / 125, rel=0.05)
    assert found.bottleneck == "trainer network"


def test_uint8_and_compression_carry_more_samples() -> None:
    codec = CodecProfile(name="zstd", ratio=0.5, encode_cpu_s_per_sample=0.0, decode_cpu_s_per_sample=0.0)
    profile = make_profile(headspace_s=0.001, cpu_s=0.01, sample_bytes=1e7, batch=4, dtype="float32", codecs=(codec,))
    plain = predict(profile, hosts=4).step_s
    assert plain / predict(profile, hosts=4, form=UINT8).step_s == pytest.approx(4, rel=0.1)
    assert plain / predict(profile, hosts=4, form="zstd").step_s == pytest.approx(2, rel=0.1)


def test_window_limits_large_batches() -> None:
    # A batch of 600 MB fits once into 1 GiB. An endpoint needs 6.4 s for it, and the network 1 s.
    found = predict(make_profile(headspace_s=0.1, cpu_s=0.1, sample_bytes=6e8 / 64), hosts=4)
    assert found.bottleneck == "window"
    assert found.step_s == pytest.approx(7.4, rel=0.1)


def test_memory_limits_the_endpoints_of_a_host() -> None:
    found = predict(make_profile(headspace_s=0.1, cpu_s=0.1, private_bytes=7e9, sample_bytes=1000.0), hosts=1)
    assert found.bottleneck == "memory"
    assert found.step_s == pytest.approx(64 * 0.1 / 4, rel=0.02)


def test_receiving_and_ranks_need_cpus_of_the_trainer_host() -> None:
    profile = make_profile(headspace_s=0.1, cpu_s=0.01, sample_bytes=1e6, rank_cores=2.0)
    slow = replace(profile, training=replace(profile.training, receive_cpu_s_per_gb=measured(20.0, "s/GB")))
    found = predict(slow, hosts=8)
    assert found.bottleneck == "trainer CPU"
    assert found.step_s == pytest.approx((2 * 0.1 + 64e6 * 20e-9) / 8, rel=0.05)


def test_measured_contention_lengthens_steps() -> None:
    profile = make_profile(headspace_s=0.05, cpu_s=0.15)
    curve = tuple(
        ConcurrencyPoint(num_processes=number, samples_per_s=number / cost, cpu_s_per_sample=cost)
        for number, cost in ((1, 0.15), (4, 0.15), (8, 0.25))
    )
    bent = make_profile(headspace_s=0.05, cpu_s=0.15, step_s=64 * 0.25 / 8)
    bent = replace(bent, supply=(replace(profile.supply[0], concurrency=curve),))
    assert predict(bent, hosts=1).step_s / predict(profile, hosts=1).step_s == pytest.approx(0.25 / 0.15, rel=0.02)


def test_slow_batches_are_not_hidden_by_a_short_window() -> None:
    profile = make_profile(headspace_s=0.01, cpu_s=0.1, batch=1, sample_bytes=1000.0)
    values = [0.05] * 99 + [5.05]
    skewed = replace(profile, supply=(replace(profile.supply[0], sample_cpu_s=Spread.of(values, "s", "measured")),))
    # The eight loader processes make batches in turn, so each slow batch holds up the others.
    skewed = with_steps(skewed, [0.056] * 100, [0.046] * 100)
    assert predict(skewed, hosts=1).step_s > 1.1 * predict(profile, hosts=1).step_s


def test_step_time_of_the_profiled_cluster_is_the_measured_one() -> None:
    profile = make_profile(headspace_s=0.1, cpu_s=0.1, step_s=0.95)
    found = predict(profile, local=8)
    assert found.is_measured
    assert found.step_s == pytest.approx(0.95)


def test_interval_of_the_measured_step_is_that_of_a_mean_of_bursts() -> None:
    # Every eighth step waits for the batches of all eight processes, and the next ones find theirs ready.
    steps = [0.73 if index % 8 == 0 else 0.01 for index in range(256)]
    job = make_profile(headspace_s=0.01, cpu_s=0.0125, step_s=0.1)
    job = replace(job, training=replace(job.training, step_s=Spread.of(steps, "s", "measured")))
    found = StepModel(job).predict([Candidate(trainer=TRAINER, num_trainer_hosts=1, local_endpoints=8)])[0]
    assert found.is_measured
    assert found.step_s == pytest.approx(0.1)
    assert (found.low_s, found.high_s) == pytest.approx((0.0975, 0.1025), rel=0.01)


def test_unknown_bandwidth_widens_the_interval() -> None:
    profile = make_profile(headspace_s=0.01, cpu_s=0.02, sample_bytes=4e6, batch=4)
    unknown = replace(TRAINER, network_bytes_per_s=None)
    known, open_ended = (predict(profile, hosts=4, trainer=trainer) for trainer in (TRAINER, unknown))
    assert open_ended.high_s / open_ended.low_s > 2 * known.high_s / known.low_s


def test_begin_of_short_epochs_is_not_hidden() -> None:
    profile = make_profile(headspace_s=0.1, cpu_s=0.01, sample_bytes=1000.0)
    short = replace(profile, training=replace(profile.training, steps_per_epoch=10))
    assert predict(short, hosts=2).step_s == pytest.approx(0.1 + 0.64 / 10, rel=0.3)
    ahead = replace(short, training=replace(short.training, requests_ahead=True))
    assert predict(ahead, hosts=2).step_s == pytest.approx(0.1, rel=0.02)


# What the measured step time says about the cost of samples


def with_steps(profile: Profile, steps_s: Sequence[float], waits_s: Sequence[float]) -> Profile:
    """Return the profile with other measured steps."""
    training = profile.training
    steps, waits = Spread.of(steps_s, "s", "measured"), Spread.of(waits_s, "s", "measured")
    return replace(profile, training=replace(training, step_s=steps, data_wait_s=waits))


def test_many_even_steps_correct_the_cost_of_samples() -> None:
    job = make_profile(headspace_s=0.05, cpu_s=0.02)  # eight processes make a batch in 0.16 s
    slower = with_steps(job, [0.19] * 200, [0.14] * 200)
    assert predict(slower, hosts=1).step_s == pytest.approx(1.15 * predict(job, hosts=1).step_s, rel=0.05)


def test_few_uneven_steps_hardly_correct_the_cost_of_samples() -> None:
    job = make_profile(headspace_s=0.05, cpu_s=0.02)
    uneven = with_steps(job, [0.05, 0.05, 0.05, 0.61] * 3, [0.0, 0.0, 0.0, 0.56] * 3)  # mean 0.19
    assert predict(uneven, hosts=1).step_s == pytest.approx(predict(job, hosts=1).step_s, rel=0.02)


def test_steps_that_wait_long_now_and_then_show_slow_batches() -> None:
    # Samples say that the accelerator limits the step. But every tenth step waits a second.
    job = make_profile(headspace_s=0.1, cpu_s=0.01)
    job = with_steps(job, ([0.1] * 9 + [1.1]) * 40, ([0.0] * 9 + [1.0]) * 40)
    model = StepModel(job, vcpu_speeds=EQUAL_SPEED)
    assert model.timelines.correction > 1.02
    assert model.timelines.residual_s == 0


def test_steps_that_take_long_without_a_wait_show_no_slow_batches() -> None:
    # The script saves a checkpoint every ten steps.
    job = make_profile(headspace_s=0.1, cpu_s=0.01)
    job = with_steps(job, ([0.1] * 9 + [1.1]) * 40, [0.0] * 400)
    assert StepModel(job, vcpu_speeds=EQUAL_SPEED).timelines.correction == 1

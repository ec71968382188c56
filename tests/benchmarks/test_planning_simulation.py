"""The simulated truth of the planner's benchmark, in cases that can be computed by hand."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Load = Callable[[str], ModuleType]

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planning"
LONG = 1_000_000


@pytest.fixture(scope="module")
def truth(load: Load) -> SimpleNamespace:
    """The classes and functions of the simulation."""
    load("planning")
    workload, simulation = load("planning.workload"), load("planning.simulation")
    processors, readers = load("planning.processors"), load("planning.readers")
    return SimpleNamespace(
        Workload=workload.Workload,
        Host=workload.Host,
        Cluster=workload.Cluster,
        simulate=simulation.simulate,
        progress=processors.progress,
        fair_share=processors.fair_share,
        window_capacity=readers.window_capacity,
    )


def make_workload(truth: Any, **changes: Any) -> Any:
    """Return a job of one rank: steps of 100 ms, batches of 1.6 CPU seconds and 10 MB. Nothing is random."""
    values = {
        "num_ranks": 1,
        "batch_samples": 10,
        "steps_per_epoch": LONG,
        "step_s": 0.1,
        "sample_cpu_s": 0.16,
        "bytes_per_sample": 1e6,
        "receive_cpu_s_per_gb": 0.0,
        "rank_cpu_cores": 0.0,
    }
    return truth.Workload(**{**values, **changes})


def make_host(truth: Any, endpoints: int = 0, **changes: Any) -> Any:
    values = {"name": "host", "vcpus": 64, "nic_bytes_per_s": 1e12, "memory_bytes": 1e12, "endpoints": endpoints}
    return truth.Host(**{**values, **changes})


def make_cluster(truth: Any, *data: Any, trainer: Any = None, **changes: Any) -> Any:
    return truth.Cluster(trainers=(trainer or make_host(truth),), data=data, latency_s=0.0, **changes)


def test_simulation_imports_nothing_of_hetero() -> None:
    names = ("workload", "draws", "processors", "readers", "hosts", "simulation")
    for name in names:
        tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {module for module in imported if module.partition(".")[0] == "hetero"}, name


def test_step_with_enough_endpoints_takes_the_accelerators_time(truth: Any) -> None:
    # 32 endpoints could make a batch every 50 ms.
    found = truth.simulate(make_workload(truth), make_cluster(truth, make_host(truth, 32)), num_steps=2000)
    assert found.step_s == pytest.approx(0.1, rel=1e-3)
    assert found.headspace_s == pytest.approx(0.1)
    assert found.data_cpu_share == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_step_with_few_endpoints_takes_the_time_of_its_batches(truth: Any, num_ranks: int) -> None:
    # 8 endpoints make 5 batches a second.
    workload = make_workload(truth, num_ranks=num_ranks)
    found = truth.simulate(workload, make_cluster(truth, make_host(truth, 4), make_host(truth, 4)))
    assert found.step_s == pytest.approx(max(0.1, num_ranks * 1.6 / 8), rel=0.01)
    assert found.data_cpu_share > 0.95 or num_ranks == 1


def test_epoch_begins_with_one_batch_time(truth: Any) -> None:
    # Each epoch of 20 steps waits 1.6 s for its first batch and 20 ms for its transfer.
    workload = make_workload(truth, steps_per_epoch=20)
    found = truth.simulate(workload, make_cluster(truth, make_host(truth, 64, nic_bytes_per_s=0.5e9)), num_steps=40)
    assert found.step_s == pytest.approx(0.1 + 1.62 / 20, rel=0.02)


def test_long_epoch_is_extrapolated_to_its_end(truth: Any) -> None:
    cluster = make_cluster(truth, make_host(truth, 8))
    short = truth.simulate(make_workload(truth, steps_per_epoch=2000), cluster, num_steps=2000)
    long = truth.simulate(make_workload(truth, steps_per_epoch=2000), cluster, num_steps=200)
    assert long.num_steps < short.num_steps
    assert long.step_s == pytest.approx(short.step_s, rel=0.005)


def test_faster_vcpus_make_more_batches(truth: Any) -> None:
    found = truth.simulate(make_workload(truth, step_s=0.01), make_cluster(truth, make_host(truth, 8, speed=1.6)))
    assert found.step_s == pytest.approx(1.6 / 8 / 1.6, rel=0.01)


def test_endpoints_beyond_the_vcpus_share_them(truth: Any) -> None:
    found = truth.simulate(make_workload(truth), make_cluster(truth, make_host(truth, 16, vcpus=8)))
    assert found.step_s == pytest.approx(1.6 / 8, rel=0.01)


def test_processes_that_wait_for_storage_need_more_endpoints_than_vcpus(truth: Any) -> None:
    # A batch is 0.1 s of CPU and 1.5 s of waiting. 16 endpoints on 8 vCPUs need 2 of them.
    # The waits of many samples add up to nearly the same time for each batch.
    workload = make_workload(
        truth, batch_samples=1000, sample_cpu_s=1e-4, sample_wait_s=1.5e-3, step_s=0.01, bytes_per_sample=1e3
    )
    eight = truth.simulate(workload, make_cluster(truth, make_host(truth, 8, vcpus=8)))
    sixteen = truth.simulate(workload, make_cluster(truth, make_host(truth, 16, vcpus=8)))
    assert eight.step_s == pytest.approx(1.6 / 8, rel=0.05)
    assert sixteen.step_s == pytest.approx(1.6 / 16, rel=0.05)


def test_curve_slows_the_processes_of_a_busy_host(truth: Any) -> None:
    curve = ((0.0, 1.0), (0.5, 1.0), (1.0, 0.6))
    found = truth.simulate(make_workload(truth), make_cluster(truth, make_host(truth, 8, vcpus=8, curve=curve)))
    assert found.step_s == pytest.approx(1.6 / 8 / 0.6, rel=0.01)


def test_trainers_nic_limits_the_step(truth: Any) -> None:
    trainer = make_host(truth, nic_bytes_per_s=50e6)
    found = truth.simulate(make_workload(truth), make_cluster(truth, make_host(truth, 64), trainer=trainer))
    assert found.step_s == pytest.approx(0.2, rel=0.01)
    assert found.trainer_nic_share > 0.95


def test_data_hosts_nics_limit_the_step(truth: Any) -> None:
    data = [make_host(truth, 32, nic_bytes_per_s=20e6)] * 2
    found = truth.simulate(make_workload(truth), make_cluster(truth, *data))
    assert found.step_s == pytest.approx(10e6 / 40e6, rel=0.01)
    assert found.data_nic_share > 0.95


def test_endpoints_on_the_trainer_host_use_no_nic(truth: Any) -> None:
    trainer = make_host(truth, 8, nic_bytes_per_s=1.0)
    found = truth.simulate(make_workload(truth), make_cluster(truth, trainer=trainer))
    assert found.step_s == pytest.approx(1.6 / 8, rel=0.01)
    assert found.trainer_nic_share == 0.0


def test_large_batches_leave_no_room_for_more_endpoints(truth: Any) -> None:
    # Three batches of 350 MB fit into 1 GiB, so three endpoints compute.
    workload = make_workload(truth, bytes_per_sample=35e6)
    found = truth.simulate(workload, make_cluster(truth, make_host(truth, 64)))
    assert found.step_s == pytest.approx(1.6 / 3, rel=0.02)


def test_window_has_the_bytes_that_the_host_can_spare(truth: Any) -> None:
    assert truth.window_capacity(10e6, memory_bytes=16e9, planned=4) == 6  # four, and 24 MiB beyond the plan
    assert truth.window_capacity(10e6, memory_bytes=16e9, planned=1000) == 107  # 1 GiB
    assert truth.window_capacity(10e6, memory_bytes=0.4e9, planned=1000) == 10  # a quarter of the memory
    assert truth.window_capacity(2e9, memory_bytes=16e9, planned=4) == 1


def test_hosts_without_the_memory_for_their_endpoints_cannot_run(truth: Any) -> None:
    workload = make_workload(truth, endpoint_private_bytes=1e9)
    found = truth.simulate(workload, make_cluster(truth, make_host(truth, 64, memory_bytes=32e9)))
    assert found.step_s == math.inf


def test_late_computations_are_hedged_within_the_budget(truth: Any) -> None:
    workload = make_workload(truth, num_ranks=2)
    hosts = [make_host(truth, 32), make_host(truth, 32)]
    late = make_cluster(truth, *hosts, slow_batch_share=0.01, slow_batch_factor=50.0)
    found = truth.simulate(workload, late, num_steps=2000)
    assert 0 < found.num_hedges <= 2 * (2 + 2000 / 20)
    # Without hedges each of the 40 slow batches would delay the job by most of 80 s.
    assert found.step_s < 2.0 * 0.1


def test_regular_computations_are_not_hedged(truth: Any) -> None:
    found = truth.simulate(make_workload(truth), make_cluster(truth, make_host(truth, 8)))
    assert found.num_hedges == 0


def test_slow_hosts_cost_their_share_of_the_supply(truth: Any) -> None:
    hosts = [make_host(truth, 8)] * 8
    workload = make_workload(truth, step_s=0.001, bytes_per_sample=1e3)
    slow = make_cluster(truth, *hosts, slow_host_share=0.25, slow_host_factor=2.0)
    found = truth.simulate(workload, slow, num_steps=4000)
    # A quarter of the hosts makes half as many batches.
    assert found.step_s == pytest.approx(1.6 / 64 / (0.75 + 0.25 / 2), rel=0.1)


def test_local_processes_compute_without_a_network(truth: Any) -> None:
    workload = make_workload(truth, local_processes=8)
    found = truth.simulate(workload, make_cluster(truth, trainer=make_host(truth, vcpus=8, nic_bytes_per_s=1.0)))
    assert found.step_s == pytest.approx(1.6 / 8, rel=0.01)


def test_ranks_and_loader_processes_share_the_vcpus(truth: Any) -> None:
    # In each step of 0.2 s the rank needs 0.1 s of CPU and the batch 1.6 s, on 8 vCPUs.
    workload = make_workload(truth, local_processes=8, rank_cpu_cores=1.0)
    found = truth.simulate(workload, make_cluster(truth, trainer=make_host(truth, vcpus=8)))
    assert found.step_s == pytest.approx(1.7 / 8, rel=0.03)


def test_step_is_longer_if_the_ranks_threads_lack_cpu_time(truth: Any) -> None:
    # Nine processes always want 8 vCPUs, so each gets 8/9 of one.
    workload = make_workload(truth, local_processes=8, rank_cpu_cores=1.0, step_s=1.0)
    trainer = make_host(truth, vcpus=8)
    starved = dataclasses.replace(workload, sample_cpu_s=0.8)
    assert truth.simulate(workload, make_cluster(truth, trainer=trainer)).step_s < 1.03
    assert truth.simulate(starved, make_cluster(truth, trainer=trainer)).step_s == pytest.approx(9 / 8, rel=0.02)


def test_fair_share_gives_the_rest_to_those_who_need_more(truth: Any) -> None:
    assert truth.fair_share(8.0, ((4, 1.0),)) == 1.0
    assert truth.fair_share(8.0, ((10, 1.0),)) == pytest.approx(0.8)
    assert truth.fair_share(8.0, ((4, 0.5), (12, 1.0))) == pytest.approx(0.5)
    assert truth.fair_share(8.0, ((4, 0.2), (12, 1.0))) == pytest.approx((8.0 - 0.8) / 12)


def test_progress_of_waiting_processes_approaches_the_cpus(truth: Any) -> None:
    def total(num_busy: int) -> float:
        return num_busy * truth.progress(4, ((0.0, 1.0), (1.0, 1.0)), 0.25, num_busy, 0, 0.0, 0.0)[0]

    assert total(4) == pytest.approx(4.0)
    # Four vCPUs serve at most 16 processes that need a quarter of one, and less while they collide.
    assert 13.0 < total(16) < 16.0
    assert total(64) == pytest.approx(16.0, rel=0.01)


def test_result_is_the_same_for_the_same_seed(truth: Any) -> None:
    workload = make_workload(truth, sample_variation=1.0, step_variation=0.05, tail_share=0.01, tail_factor=20.0)
    cluster = make_cluster(truth, make_host(truth, 16))
    first, again = (truth.simulate(workload, cluster, seed=3) for _ in range(2))
    assert first == again
    assert first != truth.simulate(workload, cluster, seed=4)


def test_more_ranks_than_hosts_share_the_nic_of_their_host(truth: Any) -> None:
    trainers = tuple(make_host(truth, nic_bytes_per_s=100e6) for _ in range(2))
    workload = make_workload(truth, num_ranks=4)
    cluster = truth.Cluster(trainers=trainers, data=(make_host(truth, 256, vcpus=256),), latency_s=0.0)
    assert truth.simulate(workload, cluster).step_s == pytest.approx(2 * 10e6 / 100e6, rel=0.01)


def test_workload_out_of_bounds_is_rejected(truth: Any) -> None:
    with pytest.raises(ValueError, match="step_s is 0"):
        make_workload(truth, step_s=0.0)
    with pytest.raises(ValueError, match="bytes_per_sample is -1"):
        make_workload(truth, bytes_per_sample=-1.0)


@pytest.mark.parametrize(
    ("num_ranks", "sample_cpu_s", "endpoints", "step_s"),
    [
        (1, 2.386, (0, 36), 0.265),
        (1, 2.386, (8, 36), 0.217),
        (8, 0.576, (0, 72, 72), 0.127),
        (8, 0.576, (96, 72, 72), 0.076),
    ],
)
def test_step_is_that_of_the_real_data_plane(
    truth: Any, num_ranks: int, sample_cpu_s: float, endpoints: tuple[int, ...], step_s: float
) -> None:
    # The steps that benchmarks/results/price_performance-seed-*.md measured with endpoints, emulated vCPUs and
    # accelerators that cost nothing.
    workload = make_workload(
        truth, num_ranks=num_ranks, batch_samples=4, sample_cpu_s=sample_cpu_s, step_s=1e-6, bytes_per_sample=16.0
    )
    trainer, *data = (make_host(truth, count, vcpus=96) for count in endpoints)
    assert truth.simulate(workload, make_cluster(truth, *data, trainer=trainer)).step_s == pytest.approx(
        step_s, rel=0.015
    )


@pytest.mark.parametrize("num_endpoints", [2, 4, 8, 16])
def test_window_grows_around_slow_batches_as_the_readers_does(truth: Any, num_endpoints: int) -> None:
    # hetero.reader.window_size.WindowGrowth: 5 % of batches 20 times slower cost little while the window can grow,
    # and most of the throughput if the batches are too large for that.
    mean_s = 0.1 * (0.95 + 0.05 * 20) / num_endpoints
    shares = []
    for bytes_per_sample in (1.0, 40e6):
        workload = make_workload(
            truth, batch_samples=1, sample_cpu_s=0.1, sample_variation=0.1, tail_share=0.05, tail_factor=20.0,
            bytes_per_sample=bytes_per_sample, step_s=mean_s,
        )  # fmt: skip
        found = truth.simulate(workload, make_cluster(truth, make_host(truth, num_endpoints)), num_steps=2000)
        shares.append(mean_s / found.step_s)
    grown, fixed = shares
    assert 0.85 < grown < 1.1
    assert 0.2 < fixed < 0.75

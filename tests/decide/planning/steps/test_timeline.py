from __future__ import annotations

import functools

import pytest

from hetero.decide.planning.steps.sharing import fair_share, pace
from hetero.decide.planning.steps.timeline import Timeline, TimelineHost, TimelineJob

EVEN = (1.0,)


def host(num_endpoints: int, batch_s: float, *, vcpus: int = 64, sending_s: float = 0.0) -> TimelineHost:
    own = functools.partial(pace, vcpus, batch_s, 0.0, ((0.0, 1.0),), 0.0)
    return TimelineHost(num_endpoints=num_endpoints, batch_s=batch_s, pace=own, sending_s=sending_s)


def mean_step_s(
    *hosts: TimelineHost,
    step_s: float = 0.1,
    num_trainers: int = 1,
    ranks_per_host: int = 1,
    relative_s: tuple[float, ...] = EVEN,
    steps_per_epoch: int | None = None,
    window_batches: int = 1 << 30,
    network_s: float = 0.0,
    is_own_loader: bool = False,
    is_long: bool = False,
) -> float:
    job = TimelineJob(
        num_trainers=num_trainers,
        ranks_per_host=ranks_per_host,
        steps_s=(step_s,),
        relative_s=relative_s,
        steps_per_epoch=steps_per_epoch,
        window_batches=window_batches,
        receive_s=0.0,
        network_s=network_s,
        rank_threads=0,
        is_own_loader=is_own_loader,
    )
    return Timeline(job, hosts, is_long=is_long).mean_step_s()


TRAINER = host(0, 1.0)


def test_accelerator_sets_the_pace_if_the_endpoints_are_faster() -> None:
    assert mean_step_s(TRAINER, host(8, 0.4)) == pytest.approx(0.1, rel=0.005)


def test_endpoints_set_the_pace_if_they_are_slower() -> None:
    assert mean_step_s(TRAINER, host(4, 0.8)) == pytest.approx(0.2, rel=0.01)
    assert mean_step_s(TRAINER, host(2, 0.8), host(2, 0.8)) == pytest.approx(0.2, rel=0.01)


def test_endpoints_share_the_cpus_of_their_host() -> None:
    assert mean_step_s(TRAINER, host(8, 0.8, vcpus=4)) == pytest.approx(0.2, rel=0.01)


def test_the_ranks_share_the_endpoints() -> None:
    assert mean_step_s(TRAINER, host(8, 0.8), ranks_per_host=4) == pytest.approx(0.4, rel=0.02)


def test_the_interface_of_the_trainer_host_sets_the_pace() -> None:
    assert mean_step_s(TRAINER, host(16, 0.4), network_s=0.15) == pytest.approx(0.15, rel=0.01)


def test_the_interface_of_a_data_host_sets_the_pace() -> None:
    assert mean_step_s(TRAINER, host(16, 0.4, sending_s=0.15)) == pytest.approx(0.15, rel=0.01)


def test_batches_of_the_own_host_need_no_network() -> None:
    assert mean_step_s(host(8, 0.4), network_s=5.0) == pytest.approx(0.1, rel=0.005)


def test_batches_of_other_trainer_hosts_come_over_the_network() -> None:
    # The second trainer host makes all batches of both ranks. The first one receives a batch per step.
    found_s = mean_step_s(host(0, 0.4), host(16, 0.4), num_trainers=2, network_s=0.15)
    assert found_s == pytest.approx(0.15, rel=0.01)


def test_slow_endpoints_hold_up_fast_ones() -> None:
    # The endpoints together could make a batch in 0.024 s. But each has about as many requests, and batches arrive in
    # order. The bytes of the window let it hold two batches per endpoint and no more.
    together_s = 1 / (4 / 0.1 + 4 / 1.6)
    found_s = mean_step_s(TRAINER, host(4, 0.1), host(4, 1.6), step_s=0.01, window_batches=16, is_long=True)
    assert found_s > 1.5 * together_s


def test_a_window_of_few_batches_makes_steps_wait() -> None:
    # Two batches of 0.8 s at the same time.
    assert mean_step_s(TRAINER, host(16, 0.8), window_batches=2) == pytest.approx(0.4, rel=0.01)


def test_slow_batches_make_steps_wait_although_the_endpoints_are_fast_enough_on_average() -> None:
    skewed = (0.5,) * 97 + (17.0,) * 3  # mean 0.995
    assert mean_step_s(host(6, 0.4), relative_s=skewed, is_own_loader=True, is_long=True) > 0.11
    # The window of a reader grows while a batch is late.
    assert mean_step_s(TRAINER, host(6, 0.4), relative_s=skewed, is_long=True) < 0.105


def test_an_epoch_begins_without_a_ready_batch() -> None:
    # The first batch takes 0.4 s. The other nineteen are ready.
    assert mean_step_s(TRAINER, host(20, 0.4), steps_per_epoch=20) == pytest.approx(0.1 + 0.4 / 20, rel=0.01)


def test_the_beginning_of_a_long_epoch_hardly_counts() -> None:
    assert mean_step_s(TRAINER, host(20, 0.4), steps_per_epoch=100_000) == pytest.approx(0.1, rel=0.005)


def test_loader_processes_of_the_ranks_make_batches_in_turn() -> None:
    trainer = host(4, 0.8)
    assert mean_step_s(trainer, is_own_loader=True) == pytest.approx(0.2, rel=0.01)
    assert mean_step_s(trainer, is_own_loader=True, network_s=5.0, ranks_per_host=2) == pytest.approx(0.4, rel=0.01)


def test_equal_arguments_give_equal_times() -> None:
    skewed = (0.5, 0.7, 1.8)
    both = [mean_step_s(TRAINER, host(4, 0.4), host(3, 0.6), step_s=0.05, relative_s=skewed) for _ in range(2)]
    assert both[0] == both[1]


# How processes share CPUs


def test_cpus_are_shared_equally_and_what_one_leaves_goes_to_the_others() -> None:
    assert fair_share(4, 3, 1.0, 1, 0.5) == 1.0  # enough for all
    assert fair_share(4, 8, 1.0, 0, 0.0) == 0.5
    assert fair_share(4, 6, 1.0, 2, 0.2) == pytest.approx(3.6 / 6)  # the threads leave 0.6 of their shares
    assert fair_share(4, 8, 0.1, 4, 1.0) == pytest.approx(3.2 / 4)


def test_a_step_takes_longer_if_its_threads_get_less_cpu_time() -> None:
    # 8 processes and 2 threads on 4 CPUs: each gets 0.4.
    speed, stretch = pace(4, 0.1, 0.0, ((0.0, 1.0),), 1.0, 8, 2, 0.0)
    assert (speed, stretch) == (pytest.approx(0.4), pytest.approx(2.5))
    assert pace(4, 0.1, 0.0, ((0.0, 1.0),), 1.0, 2, 2, 0.0) == (1.0, 1.0)


def test_contention_slows_processes_and_goes_on_beyond_the_last_measured_share() -> None:
    slower = ((0.0, 1.0), (0.25, 1.0), (0.5, 1.2))
    assert pace(8, 0.1, 0.0, slower, 0.0, 4, 0, 0.0)[0] == pytest.approx(1 / 1.2)
    assert pace(8, 0.1, 0.0, slower, 0.0, 8, 0, 0.0)[0] == pytest.approx(1 / 1.6)


def test_processes_that_wait_for_storage_need_a_cpu_only_now_and_then() -> None:
    # Equal CPU time and wait: two processes keep one CPU busy, and four share it.
    assert pace(1, 0.1, 0.1, ((0.0, 1.0), (1.0, 1.0)), 0.0, 2, 0, 0.0)[0] == pytest.approx(1.0)
    assert pace(1, 0.1, 0.1, ((0.0, 1.0), (1.0, 1.0)), 0.0, 4, 0, 0.0)[0] == pytest.approx(0.5)
    assert pace(8, 0.1, 0.1, ((0.0, 1.0), (1.0, 1.0)), 0.0, 8, 0, 0.0)[0] == pytest.approx(1.0)

"""The choice among the best candidates, by their timelines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.decide.planning.candidates import Candidate, DataGroup
from hetero.decide.planning.finals import Finals
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.ranking import Constraints, Entry, Ranking, simplest
from hetero.decide.planning.steps.model import StepModel
from hetero.errors import ConfigError
from hetero.metrics.profile.profile import ConcurrencyPoint, Profile, Spread
from tests.support.planning import make_profile

TRAINER = Machine(
    instance_type="ml.p3.2xlarge", vcpus=8, network_bytes_per_s=1.25e9, memory_bytes=64e9, hourly_usd=3.825
)
DATA = Machine(instance_type="ml.c5.4xlarge", vcpus=16, network_bytes_per_s=0.6e9, memory_bytes=32e9, hourly_usd=0.8)
BASE = Candidate(trainer=TRAINER, num_trainer_hosts=1, local_endpoints=8)


def with_hosts(count: int) -> Candidate:
    return replace(BASE, local_endpoints=0, data=(DataGroup(machine=DATA, count=count),))


def skewed_job() -> Profile:
    """Return a job whose slow batches hold up others for longer than their mean cost tells."""
    job = make_profile(headspace_s=0.01, cpu_s=0.1, batch=1, sample_bytes=1000.0, step_s=0.056)
    values = Spread.of([0.05] * 99 + [5.05], "s", "measured")
    return replace(job, supply=(replace(job.supply[0], sample_cpu_s=values),))


def finals_of(
    job: Profile, constraints: Constraints, *candidates: Candidate, endpoints_per_host: int | None = None
) -> tuple[Finals, StepModel]:
    speeds = {DATA.instance_type: 1.0}
    quick = StepModel(job, vcpu_speeds=speeds, num_draws=0, endpoints_per_host=endpoints_per_host)
    ranking = Ranking(quick, constraints)
    ranking.add([BASE, *candidates])
    model = StepModel(job, vcpu_speeds=speeds, num_draws=20, endpoints_per_host=endpoints_per_host)
    return Finals(ranking, model, menu=()), model


def test_a_cluster_near_the_best_candidate_may_be_chosen() -> None:
    # Four hosts suffice. The ranking knows only one and eight.
    job = make_profile(headspace_s=0.1, cpu_s=0.1)
    finals, _ = finals_of(job, Constraints(), with_hosts(1), with_hosts(8))
    (group,) = finals.choose().data
    assert 3 <= group.count <= 5


def test_limits_hold_for_the_step_times_of_the_timelines() -> None:
    job = skewed_job()
    one = with_hosts(1)
    model = StepModel(job, vcpu_speeds={DATA.instance_type: 1.0}, num_draws=0)
    (modelled_s,), (simulated,) = model.expected_s([one]), model.predict([one])
    assert simulated.step_s > 1.1 * modelled_s
    # The modelled step is within the limit, and that of the timeline is not.
    limit = Constraints(goal="time", max_step_s=1.05 * modelled_s)
    finals, _ = finals_of(replace(job, has_registered_dataset=True), limit, one)
    chosen = finals.choose()  # another cluster, near that one
    assert chosen != one
    assert model.predict([chosen])[0].step_s <= limit.max_step_s  # type: ignore[operator]


def test_limits_that_no_cluster_keeps_are_an_error_with_the_shortest_step() -> None:
    job = make_profile(headspace_s=0.1, cpu_s=0.1)
    finals, _ = finals_of(job, Constraints(goal="time", max_step_s=0.0999), with_hosts(8))
    with pytest.raises(ConfigError, match=r"the shortest step of all clusters is 0\.1.* s, the limit is 0\.0999 s"):
        finals.choose()


def test_of_clusters_that_cost_about_the_same_the_simpler_one_wins() -> None:
    costs = {8: 0.9, 5: 1 - 1e-9, 3: 1.001, 2: 1.1}
    entries = [Entry(with_hosts(count), "data hosts", 0.1, None, cost) for count, cost in costs.items()]
    assert simplest(entries[1:]).candidate == with_hosts(3)
    assert simplest(entries).candidate == with_hosts(8)


def test_timelines_end_at_their_budget() -> None:
    job = make_profile(headspace_s=0.01, cpu_s=0.3, ranks=1)
    finals, model = finals_of(job, Constraints(), *(with_hosts(count) for count in range(1, 65)))
    finals.choose()
    assert model.timelines.num_batches < 50_000 + 70_000 + 2 * 16_000


def test_endpoints_per_data_host_are_varied_if_they_wait_for_storage() -> None:
    # A sample waits and computes equally long, so a host has about two endpoints per vCPU at first. But so many busy
    # CPUs share too little memory bandwidth, and fewer endpoints are faster.
    job = make_profile(headspace_s=0.1, cpu_s=0.1, wait_s=0.1, batch=16)
    curve = tuple(
        ConcurrencyPoint(num_processes=number, samples_per_s=number / (cost + 0.1), cpu_s_per_sample=cost)
        for number, cost in ((1, 0.1), (10, 0.1), (12, 0.3))
    )
    job = replace(job, supply=(replace(job.supply[0], concurrency=curve),))
    finals, model = finals_of(job, Constraints(), with_hosts(1))
    number = model.variable_endpoints_on(with_hosts(1))
    assert number in (31, 32)
    assert finals.choose().endpoints_per_host in range(1, number)
    assert model.predict([finals.choose()])[0].step_s < model.predict([with_hosts(1)])[0].step_s


def test_number_of_endpoints_that_the_user_states_is_kept() -> None:
    job = make_profile(headspace_s=0.1, cpu_s=0.1, wait_s=0.1, batch=16)
    finals, model = finals_of(job, Constraints(), with_hosts(1), endpoints_per_host=20)
    assert model.variable_endpoints_on(with_hosts(1)) is None
    assert finals.choose().endpoints_per_host is None


def test_endpoints_that_do_not_wait_are_one_per_vcpu() -> None:
    job = make_profile(headspace_s=0.1, cpu_s=0.1)
    finals, model = finals_of(job, Constraints(), with_hosts(4))
    assert model.variable_endpoints_on(with_hosts(4)) is None
    assert finals.choose().endpoints_per_host is None


def test_two_types_that_wait_have_one_number_of_endpoints() -> None:
    small = replace(DATA, instance_type="ml.c5.xlarge", vcpus=4)
    two = replace(with_hosts(1), data=(DataGroup(machine=DATA, count=1), DataGroup(machine=small, count=1)))
    waiting = StepModel(make_profile(headspace_s=0.1, cpu_s=0.1, wait_s=0.1), vcpu_speeds={}, num_draws=0)
    assert waiting.with_common_endpoints(two).endpoints_per_host == 8  # two per vCPU of the smaller type
    assert waiting.with_common_endpoints(with_hosts(1)).endpoints_per_host is None
    busy = StepModel(make_profile(headspace_s=0.1, cpu_s=0.1), vcpu_speeds={}, num_draws=0)
    assert busy.with_common_endpoints(two).endpoints_per_host is None

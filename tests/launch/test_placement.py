"""The endpoints and ranks of each host."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.cluster import ClusterSpec
from hetero.config import LaunchOptions, Timings
from hetero.launch import placement
from hetero.launch.data_services import HostFacts, endpoints, tf_data
from hetero.pool.pool import PoolOptions
from hetero.pool.tf_pool import ServiceOptions
from hetero.system.cgroups import usable_cpus
from hetero.wire.limits import Limits
from tests.support.launch.clusters import cluster


def plan(current: str, *, data: int = 1, **options: Any) -> placement.Placement:
    """Return the placement on ``current``."""
    return placement.plan(LaunchOptions(script="train.py", **options), cluster(current, data=data), num_gpus=2)


def test_data_host_gets_an_endpoint_per_usable_cpu() -> None:
    found = plan("algo-1")
    assert found.servers.number == usable_cpus()
    assert (found.servers.num_slots, found.num_ranks, found.remote) == (1, 0, True)


def test_trainer_host_gets_a_rank_per_gpu_and_no_endpoint_at_the_start() -> None:
    found = plan("algo-9")
    assert (found.servers.num_at_start, found.num_ranks, found.remote) == (0, 2, True)
    assert plan("algo-9", trainer_endpoints=0).servers.number == 0


@pytest.mark.parametrize(
    ("framework", "nproc_per_node", "expected"), [("tensorflow", None, 1), ("tensorflow", 2, 2), ("torch", None, 2)]
)
def test_ranks_of_tensorflow_are_one_per_host_unless_stated(
    framework: str, nproc_per_node: int | None, expected: int
) -> None:
    found = plan("algo-9", framework=framework, nproc_per_node=nproc_per_node)
    assert (found.framework, found.num_ranks) == (framework, expected)


def test_trainer_endpoints_make_placement_hybrid() -> None:
    assert plan("algo-9", trainer_endpoints=3).servers.number == 3


@pytest.mark.fault("F36")
def test_homogeneous_job_loads_locally() -> None:
    found = plan("algo-9", data=0)
    assert (found.servers.number, found.remote) == (0, False)


def test_homogeneous_job_with_trainer_endpoints_loads_from_them() -> None:
    assert plan("algo-9", data=0, trainer_endpoints=1).remote


def test_emulated_vcpus_are_slots_of_one_endpoint() -> None:
    found = plan("algo-1", emulate_sample_s=0.1, emulate_vcpus=36)
    assert (found.servers.number, found.servers.num_slots) == (1, 36)


def test_emulated_homogeneous_job_loads_through_slots_too() -> None:
    found = plan("algo-9", data=0, emulate_sample_s=0.1, emulate_vcpus=8)
    assert (found.servers.number, found.servers.num_slots, found.remote) == (1, 8, True)


def test_emulated_trainer_host_beside_data_hosts_has_no_slots_unless_asked() -> None:
    emulated = {"emulate_sample_s": 0.1, "emulate_vcpus": 8}
    assert plan("algo-9", **emulated).servers.num_at_start == 0
    assert plan("algo-9", **emulated, trainer_endpoints=0).servers.number == 0
    assert plan("algo-9", emulate_sample_s=0.1, emulate_vcpus=8, trainer_endpoints=2).servers.num_slots == 4


@pytest.mark.parametrize(
    ("number", "num_slots"),
    [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (6, 1), (8, 1), (9, 1)],  # 9 endpoints cannot have less than a slot each
)
@pytest.mark.parametrize(
    ("host", "num_data_hosts", "option"),
    [("algo-1", 1, "endpoints_per_host"), ("algo-9", 1, "trainer_endpoints"), ("algo-9", 0, "trainer_endpoints")],
)
def test_slots_of_all_endpoints_of_an_emulated_host_are_at_most_its_vcpus(
    host: str, num_data_hosts: int, option: str, number: int, num_slots: int
) -> None:
    servers = plan(host, data=num_data_hosts, emulate_sample_s=0.1, emulate_vcpus=8, **{option: number}).servers
    assert (servers.number, servers.num_slots) == (number, num_slots)


def test_auto_is_the_default_begins_without_endpoints_and_may_take_every_cpu() -> None:
    found = plan("algo-9", trainer_endpoints="auto")
    assert found == plan("algo-9") != plan("algo-9", trainer_endpoints=0)
    assert (found.servers.number, found.servers.num_at_start, found.remote) == (usable_cpus(), 0, True)
    assert plan("algo-1", trainer_endpoints="auto").servers == plan("algo-1", trainer_endpoints=0).servers


def test_auto_without_data_hosts_loads_locally() -> None:
    assert plan("algo-9", data=0, trainer_endpoints="auto") == plan("algo-9", data=0, trainer_endpoints=0)
    emulated = {"emulate_sample_s": 0.1, "emulate_vcpus": 8}
    fixed = plan("algo-9", data=0, trainer_endpoints=0, **emulated)
    assert plan("algo-9", data=0, trainer_endpoints="auto", **emulated) == fixed


@pytest.mark.parametrize("data", [0, 1])
def test_auto_means_no_endpoints_where_it_cannot_choose(data: int) -> None:
    assert plan("algo-9", data=data, trainer_endpoints="auto", profile=True).servers.num_at_start is None
    assert plan("algo-9", data=data, trainer_endpoints="auto", profile=True).servers.number == 0


@pytest.mark.parametrize(("vcpus", "number", "num_slots"), [(8, 8, 1), (36, 6, 6), (96, 8, 12), (7, 7, 1), (11, 1, 11)])
def test_auto_on_an_emulated_host_has_all_vcpus_as_slots_of_few_endpoints(
    vcpus: int, number: int, num_slots: int
) -> None:
    found = plan("algo-9", trainer_endpoints="auto", emulate_sample_s=0.1, emulate_vcpus=vcpus)
    assert (found.servers.number, found.servers.num_at_start, found.servers.num_slots) == (number, 0, num_slots)


def test_tf_service_has_its_dispatcher_on_the_first_data_host() -> None:
    first = plan("algo-1", data=2, data_service="tf", tf_workers_per_host=3)
    assert (first.servers.number, first.servers.dispatcher_host, first.data_service, first.remote) == (
        4,
        "algo-1",
        "tf",
        False,
    )
    second = plan("algo-2", data=2, data_service="tf", tf_workers_per_host=3)
    assert (second.servers.number, second.servers.dispatcher_host) == (3, "algo-1")


def test_tf_service_has_workers_on_trainer_hosts_if_asked() -> None:
    assert plan("algo-9", data_service="tf").servers.number == 0
    assert plan("algo-9", data_service="tf", trainer_tf_workers=2).servers.number == 2


def test_tf_service_is_nothing_to_a_homogeneous_job() -> None:
    found = plan("algo-9", data=0, data_service="tf", trainer_tf_workers=2)
    assert (found.servers.number, found.data_service, found.remote) == (0, "", False)


def facts(current: str, hosts: ClusterSpec, **options: Any) -> HostFacts:
    """Return what the servers of ``current`` get to know."""
    chosen = LaunchOptions(script="train.py", **options)
    placed = placement.plan(chosen, hosts, num_gpus=0)
    return HostFacts(
        options=chosen,
        servers=placed.servers,
        name=current,
        address="10.0.0.1",
        address_of=lambda host: None if host == "algo-9" else f"10.0.0.{host.removeprefix('algo-')}",
        is_trainer=placed.num_ranks > 0,
        token_path=None,
        job_id="job",
        environment={},
        timings=Timings(),
    )


def pool_options(**options: Any) -> PoolOptions:
    """Return the settings of a data host's pool."""
    return endpoints.pool_options(facts("algo-1", cluster("algo-1", data=1), **options))


def test_endpoints_are_told_how_large_a_batch_may_be() -> None:
    assert pool_options().endpoint.max_batch_bytes == Limits().max_batch_bytes
    assert pool_options(max_batch_bytes=4096).endpoint.max_batch_bytes == 4096


def test_endpoints_that_a_job_adds_on_trainer_hosts_see_no_accelerators() -> None:
    def environment(**options: Any) -> dict[str, str]:
        return dict(endpoints.pool_options(facts("algo-9", cluster("algo-9"), **options)).environment)

    assert environment(trainer_endpoints="auto") == {"CUDA_VISIBLE_DEVICES": "-1"}
    assert environment(trainer_endpoints=1) == {}


def test_host_of_a_job_waits_for_the_next_restart() -> None:
    assert not pool_options().gives_up


def service(current: str) -> ServiceOptions:
    """Return what runs on ``current``, with two data hosts and a worker on the trainer host as well."""
    options = {"data_service": "tf", "tf_workers_per_host": 3, "trainer_tf_workers": 1}
    return tf_data.service_options(facts(current, cluster(current, data=2), **options))


def test_dispatcher_knows_the_workers_to_come() -> None:
    found = service("algo-1")
    assert (found.workers, found.is_trainer) == ({"algo-1": 3, "algo-2": 3, "algo-9": 1}, False)
    assert [found.address_of(host) for host in found.workers] == ["10.0.0.1", "10.0.0.2", None]
    assert not service("algo-2").workers
    trainer = service("algo-9")
    assert (trainer.workers, trainer.is_trainer) == ({}, True)

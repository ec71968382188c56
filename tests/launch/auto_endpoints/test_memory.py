"""Endpoints are added only where the memory holds them."""

from __future__ import annotations

import functools
import os

import pytest

from hetero.control.members.directory import EndpointRecord
from hetero.control.status import HostStatus
from hetero.launch.auto_endpoints.memory import limit_of, limit_of_this_host, size_on_data_hosts
from hetero.metrics.hosts import HostReading, HostSampler

GB = 10**9


@pytest.mark.parametrize(
    ("running", "endpoint_gb", "free_gb", "expected"),
    [
        (0, 2.0, 20.0, 7),  # 70 % of the free memory
        (3, 2.0, 20.0, 10),
        (3, 2.0, 2.5, 3),  # never less than what runs
        (2, None, 25.0, 2),  # none is added while their size is not known
        (0, 0.0, 20.0, 14 * GB),
    ],
)
def test_limit_leaves_a_part_of_the_free_memory(
    running: int, endpoint_gb: float | None, free_gb: float, expected: int
) -> None:
    size = None if endpoint_gb is None else int(endpoint_gb * GB)
    found = limit_of(running, endpoint_bytes=size, free_bytes=int(free_gb * GB), total_bytes=100 * GB)
    assert found.endpoints == expected


def test_limit_names_the_memory_that_was_found() -> None:
    found = limit_of(1, endpoint_bytes=4 * GB, free_bytes=3 * GB, total_bytes=61 * GB)
    assert found.reason == "3,000 MB of 61.0 GB of the host's memory are free, and an endpoint uses 4,000 MB"
    assert "it is not known how much" in limit_of(1, endpoint_bytes=None, free_bytes=1, total_bytes=9).reason


def data_host(*, used_bytes: int, num_endpoints: int) -> HostStatus:
    sampler = HostSampler("algo-1", read=lambda: HostReading(cpu_total_s=0.0, memory_bytes=used_bytes))
    sampler.sample()
    usage = sampler.usage().to_json()
    record = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:1", incarnation="i", num_slots=1)
    return HostStatus(
        host="algo-1",
        incarnation="i",
        version="1",
        script_digest="d",
        usage_json=usage,
        endpoints=(record,) * num_endpoints,
    )


def test_data_hosts_show_the_size_of_the_first_endpoint() -> None:
    hosts = [data_host(used_bytes=8 * GB, num_endpoints=4), data_host(used_bytes=9 * GB, num_endpoints=3)]
    assert size_on_data_hosts(hosts) == 3 * GB
    assert size_on_data_hosts([data_host(used_bytes=8 * GB, num_endpoints=0)]) is None
    found = limit_of_this_host(0, used_pids=(), data_hosts=hosts, free_and_total_bytes=lambda: (10 * GB, 60 * GB))
    assert found.endpoints == 2


def test_own_endpoints_show_the_size_of_later_ones() -> None:
    sizes = {7: 1 * GB, 8: 2 * GB, 9: None}
    limit = functools.partial(
        limit_of_this_host,
        3,
        data_hosts=[data_host(used_bytes=9 * GB, num_endpoints=1)],
        free_and_total_bytes=lambda: (10 * GB, 60 * GB),
        private_bytes=sizes.get,
    )
    assert limit(used_pids=(7, 8, 9)).endpoints == 3 + 3
    assert limit(used_pids=(9,)).endpoints == 3


def test_memory_of_this_machine_is_read() -> None:
    found = limit_of_this_host(0, used_pids=(os.getpid(),), data_hosts=[])
    assert found.endpoints >= 1
    assert "it is not known" not in found.reason

"""Batches whose samples are computed by the hosts that keep them, with real endpoints.

All hosts of a test are on this machine and share the memory of the cache, so the tests look at who loads a sample.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.errors import DatasetError
from hetero.reader.reader import Reader
from hetero.reader.routing import owners_of
from tests.support.wire.job_certificates import folder as certificates
from tests.support.wire.job_certificates import tls

pytestmark = pytest.mark.integration

HOSTS = ["algo-1", "algo-2", "algo-3"]
ENDPOINTS = dict.fromkeys(HOSTS, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where each process notes what it loads."""
    made = tmp_path / "loads"
    made.mkdir()
    return made


def start(job: Any, spec: Any, hosts: list[str] = HOSTS, *, tls: Any = None) -> Any:
    for host in hosts:
        job.pool(host, num_endpoints=2, **({"tls_dir": str(certificates("job"))} if tls else {}))
    fleet = job.fleet(tls=tls)
    fleet.describe(spec)
    return fleet


def read(fleet: Any, wanted: list[Any]) -> list[Any]:
    with Reader(fleet, iter(wanted)) as reader:
        return list(reader)


def test_samples_are_loaded_by_the_hosts_that_keep_them(job: Any, tools: Any, folder: Path) -> None:
    spec = tools.spec("kept", folder=str(folder), load_s=0.005)
    wanted = tools.requests(spec, num_batches=10, batch_size=10)
    fleet = start(job, spec)
    with Reader(fleet, iter(wanted)) as reader:
        found = list(reader)
    loads = {pool: [_noted(folder, pid) for pid in pool.pids] for pool in job.pools}
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.gathered >= 5
    owners = owners_of(np.arange(100), ENDPOINTS)
    at_home, elsewhere = set(), set()
    for host, of_host in zip(HOSTS, loads.values(), strict=True):
        for index in {index for each in of_host for index in each}:
            (at_home if HOSTS[owners[index]] == host else elsewhere).add(index)
    # Each process loads four samples for the fingerprint of the cache, and checks one. On a busy machine, a part may
    # come so late that another host computes it.
    assert len(at_home) > 80
    assert len(elsewhere) < 40


def test_first_batch_of_a_pass_is_gathered(shared_job: Any, tools: Any, folder: Path) -> None:
    spec = tools.spec("kept", folder=str(folder))
    wanted = tools.requests(spec, num_batches=1, batch_size=10)
    fleet = start(shared_job, spec)
    assert tools.digest(read(fleet, wanted)) == tools.digest(tools.local(shared_job.script, wanted))
    assert fleet.stats.gathered == 1


def _noted(folder: Path, pid: int) -> list[int]:
    path = folder / str(pid)
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("changes", [{"on_sample_error": "skip"}, {"verify": True}])
def test_batch_that_one_endpoint_has_to_compute_is_not_gathered(
    shared_job: Any, tools: Any, folder: Path, changes: dict[str, Any]
) -> None:
    spec = tools.spec("kept", folder=str(folder))
    wanted = [dataclasses.replace(each, **changes) for each in tools.requests(spec, num_batches=4, batch_size=10)]
    fleet = start(shared_job, spec, HOSTS[:2])
    with Reader(fleet, iter(wanted)) as reader:
        assert tools.digest(list(reader)) == tools.digest(tools.local(shared_job.script, wanted))
    assert fleet.stats.gathered == 0


def test_endpoint_that_dies_with_a_part_costs_no_batch(job: Any, tools: Any, folder: Path) -> None:
    plain = tools.spec("kept", folder=str(folder))
    wanted = tools.requests(plain, num_batches=6, batch_size=10)
    middle = wanted[3].work.labels[5]
    spec = tools.spec("kept", folder=str(folder), kill_at=middle)
    fleet = start(job, spec, HOSTS[:2])
    with Reader(fleet, iter([dataclasses.replace(each, spec=spec) for each in wanted])) as reader:
        found = list(reader)
    assert Path(f"{folder}-killed").exists()
    assert fleet.stats.gathered
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))


def test_sample_that_raises_on_the_host_that_keeps_it_is_named(job: Any, tools: Any, folder: Path) -> None:
    wanted = tools.requests(tools.spec("kept", folder=str(folder)), num_batches=2, batch_size=10)
    index = wanted[1].work.labels[4]
    spec = tools.spec("kept", folder=str(folder), raise_at=index)
    with Reader(start(job, spec, HOSTS[:2]), iter([dataclasses.replace(each, spec=spec) for each in wanted])) as reader:
        next(reader)
        with pytest.raises(DatasetError, match=f"at sample {index}:"):
            next(reader)


def test_two_ranks_find_the_same_owner_hosts(shared_job: Any, tools: Any, folder: Path) -> None:
    spec = tools.spec("kept", folder=str(folder))
    wanted = tools.requests(spec, num_batches=10, batch_size=10)
    fleets = [start(shared_job, spec, HOSTS[:2]), shared_job.fleet()]
    fleets[1].describe(spec)
    for fleet, part in zip(fleets, (wanted[::2], wanted[1::2]), strict=True):
        with Reader(fleet, iter(part)) as reader:
            assert tools.digest(list(reader)) == tools.digest(tools.local(shared_job.script, part))
        assert fleet.stats.gathered >= 2


def test_hosts_under_tls_compute_for_each_other(job: Any, tools: Any, folder: Path) -> None:
    spec = tools.spec("kept", folder=str(folder))
    wanted = tools.requests(spec, num_batches=6, batch_size=10)
    fleet = start(job, spec, ["algo-1", "algo-2"], tls=tls(host="trainer"))
    assert tools.digest(read(fleet, wanted)) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.gathered


def test_host_that_is_lost_and_comes_back_keeps_its_samples_again(job: Any, tools: Any, folder: Path) -> None:
    spec = tools.spec("kept", folder=str(folder))
    wanted = tools.requests(spec, num_batches=10, batch_size=10)
    local = tools.digest(tools.local(job.script, wanted))
    fleet = start(job, spec, HOSTS[:2])
    assert tools.digest(read(fleet, wanted)) == local
    gathered = [fleet.stats.gathered]
    job.pools[1].stop(0.0)
    assert tools.digest(read(fleet, wanted)) == local
    gathered.append(fleet.stats.gathered)
    job.pool(HOSTS[1], num_endpoints=2)
    fleet.describe(spec)
    tools.wait_for(lambda: _num_serving(fleet, spec) == 4)
    assert tools.digest(read(fleet, wanted)) == local
    gathered.append(fleet.stats.gathered)
    assert gathered[0] > 0
    assert gathered[1] == gathered[0]  # a single host asks no other one
    assert gathered[2] > gathered[1]


def _num_serving(fleet: Any, spec: Any) -> int:
    with fleet.lock:
        return sum(connection.serves(spec) for connection in fleet.router.endpoints)

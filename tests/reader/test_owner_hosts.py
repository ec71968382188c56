"""Which host keeps a sample, and which endpoints a request names for that."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hetero.batches.fetch import Description
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.reader.connection import ConnectionState
from hetero.reader.routing import owners_of
from hetero.spec import DatasetSpec
from tests.support.batch_path.routed import Routed

HOSTS = {f"algo-{number}": 2 for number in range(5)}
INDICES = np.arange(10_000)


def test_each_host_keeps_its_share() -> None:
    counts = np.bincount(owners_of(INDICES, HOSTS), minlength=5)
    assert counts.min() > 1_800
    assert counts.max() < 2_200


def test_host_with_more_endpoints_keeps_more() -> None:
    counts = np.bincount(owners_of(INDICES, {"large": 6, "small": 2}))
    assert 0.73 < counts[0] / len(INDICES) < 0.77


def test_order_of_the_hosts_does_not_matter() -> None:
    backwards = dict(reversed(HOSTS.items()))
    assert (
        np.array([*HOSTS])[owners_of(INDICES, HOSTS)] == np.array([*backwards])[owners_of(INDICES, backwards)]
    ).all()


def test_host_that_leaves_moves_only_its_own_samples() -> None:
    before, after = owners_of(INDICES, HOSTS), owners_of(INDICES, {host: 2 for host in HOSTS if host != "algo-4"})
    assert (before == after)[before != 4].all()
    assert len({*after[before == 4].tolist()}) == 4


class Kept(Routed):
    """A router with endpoints on three hosts, two on each, that keep samples."""

    def __init__(self, spec: DatasetSpec, num_hosts: int = 3) -> None:
        super().__init__([f"algo-{number // 2}" for number in range(2 * num_hosts)], spec=spec)
        self.spec = spec
        for connection in self.table:
            connection.descriptions[spec] = Description(
                num_samples=9, fingerprint="", environment={}, keeps_samples=True
            )
        self.lead = next(iter(self.table))

    def change(self, which: Any, **changes: Any) -> None:
        for connection in filter(which, self.table):
            found = connection.descriptions[self.spec]
            connection.descriptions[self.spec] = dataclasses.replace(found, **changes)

    def owners(self, indices: Any = INDICES) -> tuple[list[str], Any]:
        work = IndexedWork(indices)
        request = BatchRequest(spec=self.spec, work=work, seed=0, epoch=0, position=0)
        helpers, owners = self.router.choose_owners(request, self.lead)
        return [helper.record.endpoint_id for helper in helpers], owners


def test_endpoint_of_the_same_number_is_named_for_each_host(tools: Any) -> None:
    routed = Kept(tools.spec())
    names, owners = routed.owners()
    assert names == ["algo-1/0", "algo-2/0"]
    assert (owners == owners_of(INDICES, {f"algo-{number}": 2 for number in range(3)})).all()
    routed.lead = list(routed.table)[3]
    assert routed.owners()[0] == ["algo-0/1", "algo-2/1"]


def test_host_that_keeps_none_of_the_samples_is_not_named(tools: Any) -> None:
    routed = Kept(tools.spec())
    own = INDICES[routed.owners()[1] != 2]
    names, owners = routed.owners(own)
    assert names == ["algo-1/0"]
    assert owners.max() == 1
    assert routed.owners(INDICES[routed.owners()[1] == 0]) == ([], None)


def test_samples_of_a_host_without_an_endpoint_that_is_ready_are_computed_by_the_lead(tools: Any) -> None:
    routed = Kept(tools.spec())
    before = routed.owners()[1]
    for connection in list(routed.table)[2:4]:
        connection.busy_until_s = 1.0
    names, owners = routed.owners()
    assert names == ["algo-2/0"]
    assert (owners == np.array([0, 0, 1])[before]).all()
    list(routed.table)[2].busy_until_s = 0.0
    assert routed.owners()[0] == ["algo-1/0", "algo-2/0"]


@pytest.mark.parametrize(
    "change",
    [
        lambda routed: routed.change(lambda connection: True, keeps_samples=False),
        lambda routed: routed.change(lambda connection: connection is not routed.lead, environment={"numpy": "1"}),
        lambda routed: [setattr(connection, "state", ConnectionState.DOWN) for connection in list(routed.table)[2:]],
    ],
    ids=["no cache", "other versions", "one host"],
)
def test_nobody_is_named_where_that_would_be_of_no_use(tools: Any, change: Any) -> None:
    routed = Kept(tools.spec())
    change(routed)
    assert routed.owners() == ([], None)


def test_rank_that_uses_some_of_the_hosts_finds_owner_hosts_among_these(tools: Any) -> None:
    routed = Kept(tools.spec(), 4)
    routed.router.endpoints = [each for each in routed.router.endpoints if each.record.host != "algo-3"]
    names, owners = routed.owners()
    assert names == ["algo-1/0", "algo-2/0"]
    assert (owners == owners_of(INDICES, {f"algo-{number}": 2 for number in range(3)})).all()


def test_samples_with_keys_have_no_home(tools: Any) -> None:
    assert Kept(tools.spec()).owners(("a", "b")) == ([], None)


def test_more_hosts_than_a_request_may_name_keep_what_they_compute(tools: Any) -> None:
    assert len(Kept(tools.spec(), 64).owners()[0]) == 63
    assert Kept(tools.spec(), 65).owners() == ([], None)

"""The fixtures of tests that hurt networks and processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos.hosts import Hosts, host_names
from tests.support.chaos.networks import NamespaceNetwork, Network, ProxiedNetwork
from tests.support.chaos.proxy import Chaos

_ALL_NETWORKS = "HETERO_TEST_ALL_NETWORKS" in os.environ


@pytest.fixture
def chaos() -> Iterator[Chaos]:
    """Proxies, which are all closed afterwards."""
    with Chaos() as chaos:
        yield chaos


@pytest.fixture(scope="module", params=["proxies", pytest.param("namespaces", marks=pytest.mark.netns)])
def make_hosts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _repetition: int
) -> Iterator[Callable[..., Hosts]]:
    """Return a function that makes the hosts of a job, on either kind of network. Afterwards nothing may be left.

    The tests of a module share what they make. Where there are namespaces, the short soak alone uses the proxies.
    """
    why_not = NamespaceNetwork.why_not()
    if request.param == "namespaces" and why_not:
        pytest.skip(why_not)
    if request.param == "proxies" and not why_not and not _ALL_NETWORKS:
        pytest.skip("namespaces show the same. Set HETERO_TEST_ALL_NETWORKS=1")
    shared_before = set(Path("/dev/shm").iterdir())
    opened: list[Network | Hosts] = []

    def make(num_data: int = 2, **options: Any) -> Hosts:
        kind = {"proxies": ProxiedNetwork, "namespaces": NamespaceNetwork}[request.param]
        network = kind(host_names(num_data))
        hosts = Hosts(network, tmp_path_factory.mktemp("hosts"), **options)
        opened.extend([network, hosts])
        return hosts

    try:
        yield make
        for hosts in [each for each in opened if isinstance(each, Hosts)]:
            assert hosts.leftovers(shared_before) == [], hosts.tails()
    finally:
        for each in reversed(opened):
            each.__exit__()

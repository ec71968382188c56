"""Whole jobs on networks that are cut, slowed, taken down: on proxies everywhere, in namespaces where root allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hosts import LEASE_S, TRAINER, Hosts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MakeHosts = Callable[..., Hosts]
Measured = Callable[[str, float], None]
STEPS = 160
_expected: dict[str, dict[int, Any]] = {}


def start(make_hosts: MakeHosts, *args: str, **options: Any) -> Hosts:
    """Start a job of two data hosts and a rank that takes its time; return once it trains."""
    given = ["--steps", str(STEPS), "--step-s", "0.05", *args]
    hosts = make_hosts(flags=["--endpoints-per-host", "1"], args=given, **options)
    hosts.start()
    hosts.wait_for(lambda: hosts.step() >= 10, 60.0, "10 steps")
    return hosts


def finish(hosts: Hosts, *, expected: int = 0) -> None:
    """Wait for the job's end; what the rank was fed must be what it is fed without faults."""
    trainer = hosts.launcher(TRAINER)
    hosts.wait_for(lambda: trainer.poll() is not None, 90.0, "the end of the job")
    assert trainer.returncode == expected, hosts.tails()
    (found,) = hosts.results().values()
    assert found == undisturbed()
    for host in hosts.data_hosts:
        launcher = hosts.launcher(host)
        hosts.wait_for(lambda launcher=launcher: launcher.poll() is not None, 20.0, f"{host} leaves")


def undisturbed() -> dict[str, Any]:
    """Return what a rank alone is fed by the script, without any network."""
    import hashlib

    import numpy as np
    import soak_script

    from hetero.torch import DataLoader

    if not _expected:
        loader = DataLoader(soak_script.noisy(num_samples=331), batch_size=4, shuffle=True, seed=17)
        chain, indices = "", []
        while len(indices) < STEPS:
            for batch in loader:
                fed = hashlib.sha256(chain.encode())
                for name in sorted(batch):
                    fed.update(name.encode() + np.asarray(batch[name]).tobytes())
                chain = fed.hexdigest()
                indices.append(np.asarray(batch["index"]).tolist())
                if len(indices) == STEPS:
                    break
        _expected["rank"] = {"chain": chain, "indices": indices}
    return _expected["rank"]


@pytest.mark.fault("F16")
def test_partition_of_every_data_host_is_waited_out(make_hosts: MakeHosts, measured: Measured) -> None:
    hosts = start(make_hosts)
    for host in hosts.data_hosts:
        hosts.network.cut(host)
    time.sleep(2 * LEASE_S)  # the partition itself: longer than the window holds batches for
    for host in hosts.data_hosts:
        hosts.network.heal(host)
    begin_s, step = time.monotonic(), hosts.step()
    hosts.wait_for(lambda: hosts.step() > step + 10, 60.0, "training goes on")
    measured("recovery_s", time.monotonic() - begin_s)
    finish(hosts)


@pytest.mark.fault("F17")
def test_partition_longer_than_the_lease_heals(make_hosts: MakeHosts, measured: Measured) -> None:
    hosts = start(make_hosts, "--steps", str(STEPS))
    hosts.network.cut("algo-1")
    begin_s = time.monotonic()
    time.sleep(1.7 * LEASE_S)  # the partition itself
    hosts.network.heal("algo-1")
    measured("partition_s", time.monotonic() - begin_s)
    finish(hosts)


@pytest.mark.fault("F18")
@pytest.mark.parametrize("cut", ["algo-1", TRAINER])
def test_one_way_partition_changes_nothing(make_hosts: MakeHosts, cut: str) -> None:
    hosts = start(make_hosts)
    hosts.network.cut_one_way(cut)
    time.sleep(0.8 * LEASE_S)  # the partition itself
    hosts.network.heal(cut)
    finish(hosts)


@pytest.mark.fault("F19")
def test_link_that_is_down_for_a_while_is_no_error(make_hosts: MakeHosts) -> None:
    hosts = start(make_hosts)
    hosts.network.down("algo-1")
    time.sleep(0.8 * LEASE_S)  # the outage itself
    hosts.network.heal("algo-1")
    finish(hosts)


@pytest.mark.fault("F20")
def test_slow_link_loses_no_host(make_hosts: MakeHosts) -> None:
    hosts = start(make_hosts, "--width", "64")
    for host in hosts.data_hosts:
        hosts.network.slow(host, 60_000.0)
    time.sleep(2 * LEASE_S)  # heartbeats have to come through all the while
    for host in hosts.data_hosts:
        hosts.network.heal(host)
    finish(hosts)
    for host in hosts.network.hosts:
        assert "fell silent" not in hosts.log(host)


@pytest.mark.fault("F3")
@pytest.mark.fault("F33")
def test_data_host_killed_and_started_again_works_again(make_hosts: MakeHosts, measured: Measured) -> None:
    hosts = start(make_hosts)
    hosts.kill("algo-1")
    step = hosts.step()
    hosts.wait_for(lambda: hosts.step() > step + 10, 60.0, "training goes on without it")
    begin_s = time.monotonic()
    hosts.log_file("algo-1").write_text("")
    hosts.start("algo-1")
    hosts.wait_line("algo-1", "serving with 1 endpoints")
    measured("serves_again_s", time.monotonic() - begin_s)
    hosts.kill("algo-2")  # from here on nobody else is left
    finish(hosts)

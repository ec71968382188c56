"""A whole job on a network that is cut, slowed, taken down: on proxies everywhere, in namespaces where root allows.

The tests hurt the same job in turn, because starting one costs more than all that is done to it. Whatever a test has
hurt is healed after it, and the rank must have been fed what it is fed without faults. A job that is not well then is
killed, and the next test has a new one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.chaos.hosts import LEASE_S, TRAINER, Hosts
from tests.support.chaos.networks import NamespaceNetwork
from tests.support.chaos.undisturbed import undisturbed

pytestmark = pytest.mark.integration

MakeHosts = Callable[..., Hosts]
Measured = Callable[[str, float], None]
REISSUED_S = 20.0
"""From the death of a host, where the kernel tells, to its requests being asked for elsewhere. 2 s are promised on a
machine with idle cores."""
WIDTH = 1024
"""Batches of 33 KB: on a slow link heartbeats have to wait for them."""
SERVING = "serving with 1 endpoint"


@pytest.fixture(scope="module")
def jobs(make_hosts: MakeHosts) -> Iterator[list[Hosts]]:
    """The job that trains. It must end well after the last test."""
    jobs = [start(make_hosts)]
    yield jobs
    for hosts in jobs:
        (hosts.folder / "out" / "enough").touch()
        hosts.wait_for(lambda hosts=hosts: not alive(hosts), 300.0, "every host leaves")
        assert [hosts.launcher(host).returncode for host in hosts.network.hosts] == [0, 0, 0], hosts.tails()
        (found,) = hosts.results().values()
        assert found == undisturbed(len(found["indices"]), width=WIDTH)


@pytest.fixture
def hosts(jobs: list[Hosts], make_hosts: MakeHosts) -> Iterator[Hosts]:
    """A job of two data hosts and a rank that trains. Their logs begin with the test."""
    hosts = jobs.pop() if jobs else start(make_hosts)
    for host in hosts.network.hosts:
        hosts.log_file(host).write_text("")
    with contextlib.ExitStack() as stack:
        stack.callback(hosts.__exit__)
        yield hosts
        mend(hosts)
        saved = hosts.checkpoint()
        assert {"chain": saved["chain"], "indices": saved["indices"]} == undisturbed(saved["step"], width=WIDTH)
        stack.pop_all()
        jobs.append(hosts)


def start(make_hosts: MakeHosts) -> Hosts:
    """Start a job that runs until the test ends it. Return when it trains."""
    args = ["--steps", "1000000", "--step-s", "0.05", "--width", str(WIDTH)]
    # Endpoints on the trainer host, which a slow link may start, would go on while data hosts are cut off.
    flags = ["--endpoints-per-host", "1", "--trainer-endpoints", "0"]
    hosts = make_hosts(flags=flags, args=args)
    hosts.start()
    hosts.wait_for(hosts.step, 120.0, "the first step")
    goes_on(hosts)
    return hosts


def mend(hosts: Hosts) -> None:
    """Heal the links of a job and restart its killed hosts. Return when it trains."""
    for host in hosts.network.hosts:
        hosts.network.heal(host)
    for host in set(hosts.network.hosts) - alive(hosts):
        hosts.start(host)
        hosts.wait_line(host, SERVING)
    goes_on(hosts)


def alive(hosts: Hosts) -> set[str]:
    """Return the hosts whose launchers have not ended."""
    return {host for host in hosts.network.hosts if hosts.launcher(host).poll() is None}


def goes_on(hosts: Hosts, num_steps: int = 10) -> None:
    """Wait until the rank has taken some more steps."""
    step = hosts.step()
    hosts.wait_for(lambda: hosts.step() > step + num_steps, 300.0, f"{num_steps} steps")


def still_at(hosts: Hosts) -> int:
    """Wait until the rank takes no more steps, and return how many it has taken."""
    last = [hosts.step(), time.monotonic()]

    def is_still() -> bool:
        if (step := hosts.step()) != last[0]:
            last[:] = step, time.monotonic()
        return time.monotonic() - last[1] > 1.0

    hosts.wait_for(is_still, 300.0, "the end of the batches that had come")
    return int(last[0])


def wait_silent(hosts: Hosts, *said: tuple[str, str]) -> None:
    """Wait until hosts have said that others fell silent: pairs of who says it and who did."""
    for host, silent in said:
        hosts.wait_line(host, f"{_role(silent)} host {silent} fell silent")


def wait_heard(hosts: Hosts, *said: tuple[str, str]) -> None:
    """Wait until the same hosts have said that they hear the others again."""
    for host, silent in said:
        hosts.wait_line(host, f"{_role(silent)} host {silent} is heard again")


def _role(host: str) -> str:
    return "trainer" if host == TRAINER else "data"


@pytest.mark.fault("F3")
@pytest.mark.fault("F33")
def test_data_host_killed_and_started_again_works_again(hosts: Hosts, measured: Measured) -> None:
    begin_s = time.monotonic()
    hosts.kill("algo-1")
    # More than a window of two endpoints holds: what the host had in work has come from the other one.
    goes_on(hosts)
    reissued_s = time.monotonic() - begin_s
    measured("delivered_by_another_s", reissued_s)
    assert reissued_s < REISSUED_S
    begin_s = time.monotonic()
    hosts.log_file("algo-1").write_text("")
    hosts.start("algo-1")
    hosts.wait_line("algo-1", SERVING)
    measured("serves_again_s", time.monotonic() - begin_s)
    hosts.kill("algo-2")  # from here on the host that joined is the only one
    begin_s = time.monotonic()
    goes_on(hosts)
    measured("joined_host_delivers_s", time.monotonic() - begin_s)


@pytest.mark.fault("F17")
def test_partition_longer_than_the_lease_heals(hosts: Hosts, measured: Measured) -> None:
    hosts.network.cut("algo-1")
    begin_s = time.monotonic()
    wait_silent(hosts, (TRAINER, "algo-1"), ("algo-1", TRAINER))
    measured("detection_s", time.monotonic() - begin_s)
    hosts.network.heal("algo-1")
    begin_s = time.monotonic()
    wait_heard(hosts, (TRAINER, "algo-1"), ("algo-1", TRAINER))
    measured("heard_again_s", time.monotonic() - begin_s)
    # It was not started again: the same launcher and the same endpoints serve on.
    assert SERVING not in hosts.log("algo-1")
    hosts.kill("algo-2")  # from here on the host that was cut off is the only one
    goes_on(hosts)


@pytest.mark.fault("F18")
@pytest.mark.parametrize("cut", ["algo-1", TRAINER])
def test_one_way_partition_changes_nothing(hosts: Hosts, cut: str) -> None:
    both = [("algo-1", TRAINER), (TRAINER, "algo-1")]
    if cut == TRAINER:
        both.reverse()
    # Without acknowledgements TCP carries nothing the other way either, so both sides notice. A proxy acknowledges
    # for the host that is cut off: the others still hear it, and only it hears nothing.
    said = both if isinstance(hosts.network, NamespaceNetwork) else both[:1]
    hosts.network.cut_one_way(cut)
    wait_silent(hosts, *said)
    hosts.network.heal(cut)
    wait_heard(hosts, *said)


@pytest.mark.fault("F19")
def test_link_that_is_down_for_a_while_is_no_error(hosts: Hosts) -> None:
    hosts.network.down("algo-1")
    wait_silent(hosts, (TRAINER, "algo-1"), ("algo-1", TRAINER))
    hosts.network.heal("algo-1")
    wait_heard(hosts, (TRAINER, "algo-1"), ("algo-1", TRAINER))


@pytest.mark.fault("F20")
def test_slow_link_loses_no_host(hosts: Hosts) -> None:
    for host in hosts.data_hosts:
        hosts.network.slow(host, 60_000.0)
    time.sleep(LEASE_S)  # the window holds batches that came before
    step = hosts.step()
    time.sleep(2 * LEASE_S)  # heartbeats have to come through all the while
    assert step < hosts.step() < step + 60  # it goes on, at half of its pace or less
    for host in hosts.network.hosts:
        assert "fell silent" not in hosts.log(host)


@pytest.mark.fault("F16")
def test_partition_of_every_data_host_is_waited_out(hosts: Hosts, measured: Measured) -> None:
    for host in hosts.data_hosts:
        hosts.network.cut(host)
    stalled = still_at(hosts)  # the window holds more batches after a slow link
    time.sleep(LEASE_S)
    assert hosts.step() == stalled  # nothing comes through
    for host in hosts.data_hosts:
        hosts.network.heal(host)
    begin_s = time.monotonic()
    goes_on(hosts)
    measured("recovery_s", time.monotonic() - begin_s)

"""How much of a run's time others may have taken."""

from __future__ import annotations

import dataclasses

import pytest

from hetero.metrics.excess import excess_text, lost_cpu_share
from hetero.metrics.hosts import HostUsage

USAGE = HostUsage(
    host="algo-1",
    scope="host",
    duration_s=10.0,
    num_readings=10,
    num_cpus=2,
    cpu_seconds=5.0,
    cpu_percent_mean=50.0,
    cpu_percent_peak=100.0,
    memory_basis="used",
    memory_mean_bytes=1e9,
    memory_peak_bytes=10**9,
    memory_total_bytes=8 * 10**9,
    network_sent_bytes=None,
    network_received_bytes=None,
)


def usage(others: float | None, pressure: float | None = 0.0, stolen: float | None = 0.0, **more: object) -> HostUsage:
    return dataclasses.replace(USAGE, cpu_others=others, cpu_pressure=pressure, cpu_stolen=stolen, **more)


@pytest.mark.parametrize(
    ("host", "lost"),
    [
        (USAGE, 0.0),  # of an older version, or ranks of mpirun
        (usage(0.0, 1.0), 0.0),  # the job's own processes wait for each other
        (usage(0.6, 0.02), 0.02),  # others use CPUs that the job does not need
        (usage(0.6, 1.0), 0.6),
        (usage(0.6, 1.0, cpu_waited=0.1), 0.1),  # others wait for each other, while the job sleeps
        (usage(0.0, 0.0, 0.91), 0.91),  # the hypervisor gave the time to other machines
        (usage(0.5, 1.0, 0.5), 0.75),
    ],
)
def test_time_is_lost_to_others_that_had_the_cpus_while_processes_waited(host: HostUsage, lost: float) -> None:
    assert lost_cpu_share([host]) == pytest.approx(lost)
    assert lost_cpu_share([usage(0.0, 1.0, host="algo-2"), host]) == pytest.approx(lost)
    assert lost_cpu_share([]) == 0.0


def test_simulated_hosts_of_one_job_are_no_others() -> None:
    hosts = [usage(0.25, 1.0, scope="tree", host=name) for name in ("algo-1", "algo-2")]
    assert lost_cpu_share(hosts) == pytest.approx(0.0)
    with_others = [usage(0.65, 1.0, scope="tree", host=name) for name in ("algo-1", "algo-2")]
    assert lost_cpu_share(with_others) == pytest.approx(0.4)
    hardly_waiting = [dataclasses.replace(each, cpu_waited=0.1) for each in with_others]
    assert lost_cpu_share(hardly_waiting) == pytest.approx(0.2)


def test_text_has_the_share() -> None:
    assert excess_text(0.666) == "Up to 67 % of the measured times may be due to other work of the machine"

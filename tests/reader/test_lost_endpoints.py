"""Endpoints that a reader loses, gets back, gets anew or has to overtake: order and bytes stay the same."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero.batches.request import BatchRequest
from hetero.config import Timings
from hetero.control.members.directory import Directory
from hetero.errors import EndpointUnavailableError, ExitCode
from hetero.reader.connection import ConnectionState
from hetero.reader.reader import Reader
from tests.support.batch_path.calls import Asked, Measured, in_thread

REISSUED_S = 20.0
"""From the death of an endpoint, where the kernel tells, to its requests being asked for elsewhere. 2 s are promised on
a machine with idle cores."""
HELD = 10
"""Position of the batch that the test holds up. Its endpoint works on it meanwhile."""


@pytest.fixture
def hold_flag(tmp_path: Path) -> Path:
    path = tmp_path / "hold"
    path.touch()
    return path


def requests_with_one_held(tools: Any, hold_flag: Path, *, num_batches: int, sample_s: float) -> list[BatchRequest]:
    """Return requests. One of them is answered once the file has gone."""
    index = int(tools.requests(tools.spec(), num_batches=num_batches)[HELD].work.indices[-1])
    wanted = tools.spec(sample_s=sample_s, hold_at=index, hold_flag=str(hold_flag))
    found: list[BatchRequest] = tools.requests(wanted, num_batches=num_batches)
    return found


def held_in_work(tools: Any, asked: list[Asked], hold_flag: Path) -> Asked:
    """Return the held request, once its endpoint computes it."""
    tools.wait_for(hold_flag.with_name(f"{hold_flag.name}-reached").exists)
    return next(each for each in asked if each.position == HELD)


@pytest.mark.fault("F1")
@pytest.mark.fault("F3")
def test_reader_loses_one_of_two_endpoints_and_delivers_the_same(
    job: Any, tools: Any, asked: list[Asked], measured: Measured, hold_flag: Path
) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = requests_with_one_held(tools, hold_flag, num_batches=20, sample_s=0.02)
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(8)]
    victim = held_in_work(tools, asked, hold_flag)
    killed_s = time.monotonic()
    os.kill(pool.pids[int(victim.endpoint[0].rpartition("/")[2])], signal.SIGKILL)
    hold_flag.unlink()
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    in_work = [each for each in asked if each.endpoint == victim.endpoint and each.at_s < killed_s]
    lost = {each.position for each in in_work if not each.is_answered}
    assert victim.position in lost
    assert fleet.stats.failovers >= len(lost)  # the kernel told: no hedge helped out
    elsewhere = [each for each in asked if each.endpoint != victim.endpoint and each.at_s > killed_s]
    reissued_s = max(min(each.at_s for each in elsewhere if each.position == position) for position in lost) - killed_s
    measured("asked_elsewhere_s", reissued_s)
    assert reissued_s < REISSUED_S
    assert fleet.stats.endpoint_losses == 1
    tools.wait_for(lambda: len(pool.records) == 2)
    assert pool.num_restarts == 1


def test_reader_loses_idle_endpoints_and_blames_no_batch(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=5)
    job.fleet().describe(tools.spec())  # the endpoints with the data set have other ports
    published, job.directory = job.directory, Directory(pool.records)  # the reader is not informed
    fleet = job.fleet()
    job.directory = published
    wanted = tools.requests(tools.spec(), num_batches=400)
    fleet.describe(tools.spec())
    tools.wait_for(lambda: all(connection.serves(tools.spec()) for connection in fleet.router.endpoints))
    reader = Reader(fleet, iter(wanted))
    found: list[Any] = []

    def take() -> None:
        """Take a batch, and wait for the one that is asked for instead."""
        found.append(next(reader))
        tools.wait_for(lambda: not reader._window.attempts and not reader._window.missing)

    take()
    for pid in pool.pids[:4]:
        os.kill(pid, signal.SIGKILL)
    tools.wait_for(lambda: pool.num_restarts == 4)
    while fleet.stats.endpoint_losses < 4:  # one after the other is asked, until no batches are left
        take()
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.failovers >= 4


@pytest.mark.fault("F4")
def test_reader_loses_the_only_endpoint_and_goes_on_with_its_successor(job: Any, tools: Any) -> None:
    pool = job.pool()
    before = pool.records[0]
    wanted = tools.requests(tools.spec())
    found = []
    for batch in Reader(job.fleet(), iter(wanted)):
        found.append(batch)
        if len(found) == 4:
            os.kill(pool.pids[0], signal.SIGKILL)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert pool.records[0].endpoint_id == before.endpoint_id
    assert pool.records[0].incarnation != before.incarnation


@pytest.mark.fault("F4")
def test_reader_without_restarts_names_the_lost_endpoint(job: Any, tools: Any, measured: Measured) -> None:
    pool = job.pool(endpoint_restarts=0)
    fleet = job.fleet(data_timeout_s=0.5)
    reader = Reader(fleet, iter(tools.requests(tools.spec(sample_s=0.005), num_batches=1000)))
    next(reader)
    killed_s = time.monotonic()
    os.kill(pool.pids[0], signal.SIGKILL)
    message = r"no endpoint served data set 'numbers' for(?s:.)*algo-1/0"
    with pytest.raises(EndpointUnavailableError, match=message) as caught:
        list(reader)
    waited_s = time.monotonic() - killed_s
    measured("given_up_after_s", waited_s)
    assert waited_s > 0.5  # not before the data timeout
    assert caught.value.exit_code is ExitCode.DATA_PLANE_LOST
    assert next(reader, "closed") == "closed"
    tools.wait_for(lambda: pool.failure is not None)
    assert "SIGKILL" in str(pool.failure)


@pytest.mark.fault("F34")
def test_reader_survives_a_drained_host(job: Any, tools: Any, asked: list[Asked], hold_flag: Path) -> None:
    pools = {f"algo-{number}/0": job.pool(f"algo-{number}") for number in (1, 2)}
    wanted = requests_with_one_held(tools, hold_flag, num_batches=14, sample_s=0.04)
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(8)]
    held = held_in_work(tools, asked, hold_flag)
    pool = pools[held.endpoint[0]]
    stopped = in_thread(lambda: pool.stop(20.0))
    tools.wait_for(lambda: len(job.directory.records()) == 1)
    assert held.is_answered is None
    hold_flag.unlink()
    stopped()
    tools.wait_for(lambda: held.is_answered is not None)
    assert held.is_answered  # finished, not given up
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))


@pytest.mark.fault("F33")
def test_reader_uses_an_endpoint_that_joins_later(job: Any, tools: Any, asked: list[Asked], measured: Measured) -> None:
    job.pool("algo-1")
    fleet = job.fleet()
    reader = Reader(fleet, iter(tools.requests(tools.spec(), num_batches=10_000)))
    next(reader)
    joined_s: list[float] = []
    job.directory.subscribe(lambda: joined_s.append(time.monotonic()))
    job.pool("algo-2")

    def newcomer_served() -> bool:
        next(reader)
        return job.pools[1].statistics().get("num_batches", 0) > 0

    tools.wait_for(newcomer_served)
    first_s = next(each.at_s for each in asked if each.endpoint[0] == "algo-2/0") - joined_s[0]
    measured("gets_work_s", first_s)
    assert first_s < Timings().heartbeat_s


@pytest.mark.fault("F5")
def test_stopped_endpoint_is_overtaken_and_used_again_when_it_goes_on(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = [
        replace(request, position=position, step=position)
        for position, request in enumerate(tools.requests(tools.spec(sample_s=0.002), num_batches=25) * 400)
    ]
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(100)]
    with caplog.at_level(logging.INFO, logger="hetero.reader.fetchers"):
        os.kill(pool.pids[0], signal.SIGSTOP)
        try:
            found += [next(reader) for _ in range(100)]
        finally:
            os.kill(pool.pids[0], signal.SIGCONT)
    # Nothing else can have helped: the endpoint was not lost, no call failed or ran out of time.
    assert fleet.stats.hedges_won >= 1
    assert fleet.stats.hedges <= 1 + (len(found) + reader._window.size) / 20
    assert (fleet.stats.retries, fleet.stats.failovers, fleet.stats.endpoint_losses) == (0, 0, 0)
    assert "requesting it from algo-1/1" in caplog.text
    assert all(connection.state is ConnectionState.READY for connection in fleet.router.endpoints)

    def goes_on() -> bool:
        found.append(next(reader))
        return not any(connection._num_avoided for connection in fleet._table)

    tools.wait_for(goes_on)
    assert [batch["index"].tolist() for batch in found] == [
        request.work.indices.tolist() for request in wanted[: len(found)]
    ]
    assert tools.digest(found[:25]) == tools.digest(tools.local(job.script, wanted[:25]))

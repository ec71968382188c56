"""Real endpoints behind links that lose, hold back, damage and cut: the reader delivers the same."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from hetero.control.members.directory import Directory
from hetero.errors import ExitCode, ProtocolError
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader
from tests.support.batch_path.calls import Measured
from tests.support.chaos.proxy import Chaos, ChaosProxy, Faults, Way

_number = itertools.count(1)


class Links:
    """The links to the endpoints of a job: gRPC's and that of batches, for each endpoint."""

    def __init__(self, chaos: Chaos, job: Any, pools: list[Any]) -> None:
        self._job = job
        self.calls: list[ChaosProxy] = []
        self.batches: list[ChaosProxy] = []
        records = []
        for pool in pools:
            for record, pid in zip(pool.records, pool.pids, strict=True):
                network = f"127.{60 + os.getpid() % 60}.{next(_number) % 256}.1"
                rpc_port = int(record.address.rpartition(":")[2])
                for port in _listening(pid):
                    proxy = chaos.proxy(("127.0.0.1", port), address=network, port=port)
                    (self.calls if port == rpc_port else self.batches).append(proxy)
                records.append(dataclasses.replace(record, address=f"{network}:{rpc_port}"))
        assert len(self.calls) == len(self.batches) == len(records)
        self.directory = Directory(records)

    def fleet(self, **options: Any) -> Fleet:
        given = {"job_id": "test-job", "prepare_timeout_s": 60.0, "data_timeout_s": 60.0, **options}
        fleet = Fleet(self.directory, self._job.token, **given)
        self._job.fleets.append(fleet)
        return fleet

    def of(self, index: int) -> list[ChaosProxy]:
        """Return both links of one endpoint."""
        return [self.calls[index], self.batches[index]]


def _listening(pid: int) -> list[int]:
    found = psutil.Process(pid).net_connections("tcp")
    return [connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN]


@pytest.fixture(scope="module", autouse=True)
def _endpoints(job_of_module: Any) -> None:
    """Start the endpoints of all tests, which hurt only the links to them. Each test is swept on its own."""
    for number in range(2):
        job_of_module.pool(f"algo-{number + 1}")
    job_of_module.forget()


@pytest.fixture
def links(shared_job: Any, tools: Any) -> Iterator[Callable[..., Links]]:
    """Return a function that makes links to so many endpoints."""
    before = threading.active_count()
    chaos = Chaos()
    chaos.__enter__()

    def links(num_endpoints: int = 1) -> Links:
        pools = [shared_job.pool(f"algo-{number + 1}") for number in range(num_endpoints)]
        return Links(chaos, shared_job, pools)

    yield links
    shared_job.disconnect()
    chaos.__exit__()
    tools.wait_for(lambda: threading.active_count() <= before)


class Consumer:
    """Reads in a separate thread. The test hurts links meanwhile."""

    def __init__(self, reader: Reader, step_s: float = 0.0) -> None:
        self.batches: list[Any] = []
        self._error: BaseException | None = None
        self._reader, self._step_s = reader, step_s
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._reader:
                self.batches.append(batch)
                time.sleep(self._step_s)
        except BaseException as error:  # noqa: BLE001 - raised by join
            self._error = error

    def join(self, timeout_s: float = 300.0) -> list[Any]:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the reader hangs"
        if self._error is not None:
            raise self._error
        return self.batches


def _wanted(tools: Any, num_batches: int = 40, **arguments: Any) -> list[Any]:
    return list(tools.requests(tools.spec(**{"sample_s": 0.002, "width": 2000, **arguments}), num_batches))


def _check(tools: Any, job: Any, found: list[Any], wanted: list[Any]) -> None:
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))


@pytest.mark.fault("F16")
@pytest.mark.parametrize("num_cut", [1, 2], ids=["one of two hosts", "both hosts"])
def test_partition_loses_and_repeats_nothing(links: Any, shared_job: Any, tools: Any, num_cut: int) -> None:
    found = links(2)
    wanted = _wanted(tools, 60)
    consumer = Consumer(Reader(found.fleet(), iter(wanted)), 0.01)
    tools.wait_for(lambda: len(consumer.batches) >= 5)
    for proxy in [proxy for index in range(num_cut) for proxy in found.of(index)]:
        proxy.blackhole()
    if num_cut == 1:
        num_delivered = len(consumer.batches)  # and far more than a window of two endpoints holds come from the other
        tools.wait_for(lambda: len(consumer.batches) >= num_delivered + 20)
    else:
        time.sleep(2.0)  # the partition itself
        assert len(consumer.batches) < len(wanted)
    for proxy in [*found.calls, *found.batches]:
        proxy.heal()
    _check(tools, shared_job, consumer.join(), wanted)


@pytest.mark.fault("F16")
def test_batches_of_a_silent_endpoint_come_from_the_other_meanwhile(
    links: Any, shared_job: Any, tools: Any, measured: Measured
) -> None:
    found = links(2)
    wanted = _wanted(tools, 80)
    consumer = Consumer(Reader(found.fleet(), iter(wanted)), 0.005)
    tools.wait_for(lambda: len(consumer.batches) >= 20)
    begin_s = time.monotonic()
    for proxy in found.of(0):
        proxy.blackhole()
    _check(tools, shared_job, consumer.join(), wanted)  # it is never healed
    measured("rest_of_epoch_s", time.monotonic() - begin_s)


@pytest.mark.fault("F18")
@pytest.mark.parametrize("way", list(Way), ids=str)
def test_one_way_partition_loses_and_repeats_nothing(links: Any, shared_job: Any, tools: Any, way: Way) -> None:
    found = links(2)
    wanted = _wanted(tools, 60)
    consumer = Consumer(Reader(found.fleet(), iter(wanted)), 0.01)
    tools.wait_for(lambda: len(consumer.batches) >= 5)
    for proxy in found.of(0):
        proxy.blackhole(way)
    tools.wait_for(lambda: len(consumer.batches) >= 50)
    for proxy in found.of(0):
        proxy.heal()
    _check(tools, shared_job, consumer.join(), wanted)


@pytest.mark.fault("F19")
def test_host_that_refuses_connections_is_tried_again(
    links: Any, shared_job: Any, tools: Any, measured: Measured
) -> None:
    found = links(1)
    wanted = _wanted(tools)
    consumer = Consumer(Reader(found.fleet(), iter(wanted)))
    tools.wait_for(lambda: len(consumer.batches) >= 5)
    for proxy in found.of(0):
        proxy.refuse()
        proxy.reset()
    time.sleep(1.0)  # the outage itself
    begin_s, so_far = time.monotonic(), len(consumer.batches)
    for proxy in found.of(0):
        proxy.heal()
    tools.wait_for(lambda: len(consumer.batches) > so_far)
    measured("recovery_s", time.monotonic() - begin_s)
    _check(tools, shared_job, consumer.join(), wanted)


@pytest.mark.fault("F20")
@pytest.mark.parametrize(
    "faults", [Faults(bytes_per_s=400_000.0), Faults(delay_s=0.03)], ids=["low bandwidth", "latency"]
)
def test_slow_link_is_no_loss(links: Any, shared_job: Any, tools: Any, faults: Faults) -> None:
    found = links(1)
    for proxy in found.of(0):
        proxy.lay(faults)
    wanted = _wanted(tools, 20)
    fleet = found.fleet()
    _check(tools, shared_job, list(Reader(fleet, iter(wanted))), wanted)
    assert fleet.stats.endpoint_losses == 0
    assert fleet.stats.failovers == 0


@pytest.mark.fault("F21")
@pytest.mark.parametrize(
    "faults",
    [
        Faults(reset_after=30_000, times=3),
        Faults(truncate_after=30_000, times=3),
        Faults(half_close_after=30_000, times=3),
    ],
    ids=["reset", "truncated", "half-closed"],
)
def test_answer_cut_in_the_middle_is_asked_for_again(links: Any, shared_job: Any, tools: Any, faults: Faults) -> None:
    found = links(1)
    found.batches[0].lay(faults, Way.TO_CLIENT)
    wanted = _wanted(tools)
    fleet = found.fleet()
    _check(tools, shared_job, list(Reader(fleet, iter(wanted))), wanted)
    assert found.batches[0].num_strikes == 3
    assert fleet.stats.retries >= 1


@pytest.mark.fault("F22")
def test_damaged_answers_are_asked_for_again(links: Any, shared_job: Any, tools: Any) -> None:
    found = links(1)
    found.batches[0].lay(Faults(corrupt_at=40_000, times=2), Way.TO_CLIENT)
    wanted = _wanted(tools)
    fleet = found.fleet()
    _check(tools, shared_job, list(Reader(fleet, iter(wanted))), wanted)
    assert found.batches[0].num_strikes == 2
    assert fleet.stats.checksum_errors == 2
    assert fleet.stats.retries == 2


@pytest.mark.fault("F22")
def test_link_that_damages_everything_is_named(links: Any, tools: Any) -> None:
    found = links(1)
    found.batches[0].lay(Faults(corrupt_p=1.0, seed=1), Way.TO_CLIENT)
    with pytest.raises(ProtocolError, match=r"last from algo-1/0") as caught:
        list(Reader(found.fleet(), iter(_wanted(tools))))
    assert caught.value.exit_code is ExitCode.CORRUPTION


@pytest.mark.fault("F23")
@pytest.mark.parametrize("way", list(Way), ids=str)
def test_part_of_the_stream_that_comes_twice_changes_nothing(links: Any, shared_job: Any, tools: Any, way: Way) -> None:
    found = links(1)
    found.batches[0].lay(Faults(duplicate_chunk=3, times=2), way)
    wanted = _wanted(tools)
    _check(tools, shared_job, list(Reader(found.fleet(), iter(wanted))), wanted)
    assert found.batches[0].num_strikes >= 1

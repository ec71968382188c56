from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hetero.batches.fetch import Description
from hetero.control.members.directory import Directory, EndpointRecord
from hetero.errors import DatasetMismatchError, EndpointUnavailableError, ExitCode, HeteroError, ProtocolMismatchError
from hetero.reader.connection import ConnectionState, EndpointConnection
from hetero.reader.consistency import ServedDataset
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader
from hetero.spec import DatasetSpec
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.limits import PROTOCOL


def offline_fleet(num_hosts: int, per_host: int, **options: Any) -> Fleet:
    """Return a fleet that knows endpoints but talks to none."""
    records = [
        EndpointRecord(endpoint_id=f"algo-{host}/{index}", host=f"algo-{host}", address="127.0.0.1:9", incarnation="a")
        for host in range(1, num_hosts + 1)
        for index in range(per_host)
    ]
    fleet = Fleet(Directory(records), None, job_id="x", **options)
    fleet._table.follow(*fleet._directory.contents())
    fleet.router.update()
    return fleet


def ready(fleet: Fleet, wanted: Any) -> None:
    for connection in fleet.router.endpoints:
        connection.mark_ready()
        connection.prepared.add(wanted)


def preparing(
    fleet: Fleet, spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[EndpointConnection], object]
) -> EndpointConnection:
    """Have the first endpoint prepare, with this happening meanwhile."""
    (connection, *_) = fleet.router.endpoints
    fleet._datasets[spec] = ServedDataset(spec)

    def prepare(*_: Any, **__: Any) -> Description:
        meanwhile(connection)
        return Description(num_samples=1, fingerprint="f", environment={})

    monkeypatch.setattr(connection, "prepare", prepare)
    fleet._prepare(connection, spec)
    return connection


def test_back_off_grows_until_a_batch_came_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.reader.connection._random.uniform", lambda _, bound_s: bound_s)
    with offline_fleet(1, 1) as fleet:
        (connection,) = fleet.router.endpoints
        backoffs_s = []
        for number in range(8):
            connection.mark_ready()
            if number == 6:
                connection.delivered(num_queued=0, now_s=0.0)
            connection.mark_down("reset", 0.0)
            backoffs_s.append(connection.retry_at_s)
            connection.mark_ready()
            assert connection.last_message == "reset"
        assert backoffs_s == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 0.2, 0.4])


def test_back_off_leaves_the_trainers_generator_alone() -> None:
    with offline_fleet(1, 1) as fleet:
        before = random.getstate()
        fleet.router.endpoints[0].mark_down("reset", 0.0)
        assert random.getstate() == before


def test_preparation_that_outlives_its_link_does_not_end_the_back_off(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offline_fleet(1, 1) as fleet:
        connection = preparing(fleet, tools.spec(), monkeypatch, lambda own: own.mark_down("reset", 0.0))
        assert connection.state is ConnectionState.DOWN
        assert connection.last_message == "reset"
        assert not connection.descriptions
        assert not connection.preparing


@pytest.mark.parametrize("fault", [Fault.UNREACHABLE, Fault.LATE, Fault.BUSY])
def test_preparation_that_fails_with_its_link_says_nothing_of_the_next_one(
    tools: Any, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    def meanwhile(connection: EndpointConnection) -> None:
        connection.mark_down("reset", 0.0)
        connection.retry_at_s = 1e9
        connection.mark_ready()  # another data set was prepared on the next link
        connection.prepared.add(tools.spec(length=7))
        raise CallFailedError(fault, "the connection was closed")

    with offline_fleet(1, 1) as fleet:
        connection = preparing(fleet, tools.spec(), monkeypatch, meanwhile)
        assert connection.serves(tools.spec(length=7))
        assert connection.retry_at_s == 1e9
        assert not connection.preparing


@pytest.mark.parametrize("fault", [Fault.LATE, Fault.BROKEN])
def test_endpoint_that_fails_at_a_request_is_not_the_next_to_get_it(tools: Any, fault: Fault) -> None:
    spec = tools.spec()
    with offline_fleet(2, 1) as fleet, fleet.lock:
        ready(fleet, spec)
        one, two = fleet.router.endpoints
        for _ in range(3):
            assert fleet.router.choose(spec) is one
            fleet.router.release(one)
            fleet.call_failed(one, CallFailedError(fault, "x"), one.generation)
            assert [fleet.router.choose(spec), fleet.router.choose(spec)] == [two, two]
            fleet.router.release(two)
            fleet.router.release(two)
            one.delivered(num_queued=0, now_s=0.0)
            one.last_choice = 0


def test_endpoint_that_waits_for_the_first_one_to_answer_is_prepared_once(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = threading.Event()
    prepared: list[str] = []

    description = Description(num_samples=1, fingerprint="f", environment={})

    def prepare(connection: EndpointConnection, _: DatasetSpec, **__: Any) -> Description:
        prepared.append(connection.record.endpoint_id)
        if connection.record.endpoint_id == "algo-1/0":
            assert proceed.wait(100)
        return description

    monkeypatch.setattr(EndpointConnection, "prepare", prepare)
    with offline_fleet(2, 1) as fleet:
        with fleet.lock:
            dataset = fleet.prepare(tools.spec())
        tools.wait_for(lambda: fleet.router.endpoints[1].descriptions)
        for _ in range(5):  # the watcher looks again, and finds nothing to do
            fleet._wake()
            tools.wait_for(lambda: not fleet._has_news)
        assert dataset.reference is None
        fleet._directory.replace(fleet._directory.records()[1:])  # the first leaves, the others do not wait for it
        tools.wait_for(lambda: len(fleet.router.endpoints) == 1)
        proceed.set()
        assert fleet.describe(tools.spec()) == description
        assert sorted(prepared) == ["algo-1/0", "algo-2/0"]


def test_fleet_that_has_described_once_waits_for_no_endpoint_again(tools: Any) -> None:
    spec = tools.spec()
    now_s = 1000.0
    with offline_fleet(2, 1, clock=lambda: now_s) as fleet:
        ready(fleet, spec)
        dataset = fleet._datasets[spec] = ServedDataset(spec)
        for connection in fleet.router.endpoints:
            connection.descriptions[spec] = Description(num_samples=1, fingerprint="f", environment={})
        dataset.update(fleet.router.endpoints)
        assert fleet.describe(spec).num_samples == 1
        fleet.router.endpoints[0].prepared.clear()
        fleet.router.endpoints[0].state = ConnectionState.CONNECTING
        assert fleet.describe(spec).num_samples == 1  # by this clock, waiting would never end


def test_loss_that_a_preparation_notices_first_counts(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(connection: EndpointConnection) -> None:
        connection.mark_ready()
        raise CallFailedError(Fault.UNREACHABLE, "reset")

    with offline_fleet(1, 1) as fleet:
        connection = preparing(fleet, tools.spec(), monkeypatch, meanwhile)
        assert connection.state is ConnectionState.DOWN
        assert fleet.stats.endpoint_losses == 1


def test_watcher_that_ends_with_an_error_is_no_silent_wait(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with offline_fleet(1, 1) as fleet:
        monkeypatch.setattr(fleet._directory, "contents", lambda: 1 / 0)
        with pytest.raises(HeteroError, match="internal error while following the data hosts: ZeroDivisionError"):
            fleet.describe(tools.spec())


def test_fleet_window_follows_the_slots(tools: Any) -> None:
    with offline_fleet(2, 2, world_size=2) as fleet:
        assert Reader(fleet, iter([]), prefetch_factor=2)._window.size == 4
        assert Reader(fleet, iter([]), prefetch_factor=0.1)._window.size == 3


def test_fleet_names_hosts_whose_data_differ(job: Any, tools: Any) -> None:
    job.pool("algo-1")
    other = job.path / "other.py"
    other.write_text(job.script.read_text().replace('f"numbers-{data.length}"', '"numbers-other"'))
    job.pool("algo-2", script=str(other))
    fleet = job.fleet()
    with pytest.raises(DatasetMismatchError, match=r"algo-1/0 has 100 .*algo-2/0 has 100 .*numbers-other"):
        fleet.describe(tools.spec())
    with pytest.raises(DatasetMismatchError):
        list(Reader(fleet, iter(tools.requests(tools.spec()))))


@pytest.mark.fault("F32")
def test_fleet_names_an_endpoint_of_another_protocol(job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.reader.connection.PROTOCOL", PROTOCOL + 1)  # of this process alone
    job.pool()
    words = rf"algo-1/0 \(.*\) speaks another protocol: .* protocol {PROTOCOL + 1}, this endpoint has {PROTOCOL}"
    with pytest.raises(ProtocolMismatchError, match=words) as caught:
        job.fleet().describe(tools.spec())
    assert caught.value.exit_code is ExitCode.DISAGREEMENT


def test_fleet_goes_on_without_a_latecomer_that_differs(job: Any, tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    job.pool("algo-1")
    fleet = job.fleet()
    wanted = tools.requests(tools.spec(), num_batches=100)
    reader = Reader(fleet, iter(wanted))
    found = [next(reader)]
    other = job.path / "other.py"
    other.write_text(job.script.read_text().replace('f"numbers-{data.length}"', '"numbers-other"'))
    pool = job.pool("algo-2", script=str(other))
    tools.wait_for(lambda: "algo-2/0 joined later" in caplog.text)
    found += list(reader)
    assert len(found) == 100
    pool.stop()
    assert pool.statistics().get("num_batches", 0) == 0


def test_fleet_describe_without_endpoints_says_so(job: Any, tools: Any) -> None:
    with pytest.raises(EndpointUnavailableError, match="no endpoint has appeared"):
        job.fleet(prepare_timeout_s=0.1).describe(tools.spec())


def test_fleet_describe_of_a_dead_address_names_it(job: Any, tools: Any) -> None:
    record = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:1", incarnation="a")
    job.directory.replace([record])
    with pytest.raises(EndpointUnavailableError, match=r"algo-1/0 \(127.0.0.1:1\): the connection failed"):
        job.fleet(prepare_timeout_s=1.0).describe(tools.spec())


def test_fleet_closed_refuses_work(job: Any, tools: Any) -> None:
    fleet = job.fleet()
    reader = Reader(fleet, iter(tools.requests(tools.spec())))
    fleet.close()
    fleet.close()
    with pytest.raises(HeteroError, match="closed"):  # and no end of the epoch
        next(reader)
    with pytest.raises(HeteroError, match="closed"):
        fleet.describe(tools.spec())


def test_fleet_describes_a_data_set_once_for_all_readers(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    fleet = job.fleet()
    first = fleet.describe(tools.spec(length=7))
    assert first.num_samples == 7
    assert first.fingerprint == "numbers-7"
    assert "numpy" in first.environment
    assert fleet.describe(tools.spec(length=7)) is first

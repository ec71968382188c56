"""Endpoints that the job adds on trainer hosts while it runs. They may lack files that the data hosts have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetero.batches.fetch import Description
from hetero.batches.request import BatchRequest
from hetero.batches.skips import Skip, Skips
from hetero.control.members.directory import Directory, EndpointRecord
from hetero.errors import DatasetError, SampleFailure
from hetero.reader.connection import EndpointConnection, Fetched
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader

NUM_BATCHES = 20
SKIPS = Skips(num_skipped=1, listed=(Skip(index="7", exception="FileNotFoundError: 7.jpg"),))

Answer = Callable[[EndpointRecord, BatchRequest], Fetched]


def fetched(request: BatchRequest, *, skips: Skips | None = None) -> Fetched:
    return Fetched(batch=request.position, nbytes=10, num_queued=0, skips=skips)


def failure(record: EndpointRecord) -> DatasetError:
    return DatasetError(
        SampleFailure(
            dataset="photos",
            host=record.endpoint_id,
            stage="sample",
            sample_index="7",
            exception="FileNotFoundError: 7.jpg",
            traceback="",
        )
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tools: Any) -> Iterator[Callable[..., Reader]]:
    """Return a function that opens a reader of data hosts and an optional endpoint that answer as the test says."""
    opened: list[Fleet] = []

    def read(answer: Answer, *, num_data_hosts: int = 2) -> Reader:
        class Connection(EndpointConnection):
            def prepare(self, *_: Any, **__: Any) -> Description:
                return Description(num_samples=100, fingerprint="f", environment={})

            def fetch(self, request: BatchRequest, **_: Any) -> Fetched:
                return answer(self.record, request)

        monkeypatch.setattr("hetero.reader.fleet.EndpointConnection", Connection)
        names = ["algo-9/0", *(f"algo-{number}/0" for number in range(1, num_data_hosts + 1))]
        records = [
            EndpointRecord(
                endpoint_id=name,
                host=name.partition("/")[0],
                address="127.0.0.1:9",
                incarnation="a",
                is_optional=name == "algo-9/0",
            )
            for name in names
        ]
        fleet = Fleet(Directory(records), None, job_id="x")
        opened.append(fleet)
        wanted = tools.requests(tools.spec(), num_batches=NUM_BATCHES)
        fleet.describe(wanted[0].spec)
        tools.wait_for(lambda: sum(each.serves(wanted[0].spec) for each in fleet.router.endpoints) == len(records))
        return Reader(fleet, iter(wanted))

    yield read
    for fleet in opened:
        fleet.close()


def test_sample_that_raises_on_an_optional_endpoint_only_comes_from_a_data_host(
    read: Callable[..., Reader], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(record: EndpointRecord, request: BatchRequest) -> Fetched:
        if record.is_optional:
            raise failure(record)
        return fetched(request)

    with read(answer) as reader:
        assert list(reader) == list(range(NUM_BATCHES))
    assert caplog.text.count("endpoint algo-9/0 is no longer used, and another one repeats the batch") == 1


def test_sample_that_raises_everywhere_is_an_error(read: Callable[..., Reader]) -> None:
    def answer(record: EndpointRecord, request: BatchRequest) -> Fetched:
        raise failure(record)

    with read(answer) as reader, pytest.raises(DatasetError, match=r"7\.jpg"):
        next(reader)


def test_batch_with_skipped_samples_of_an_optional_endpoint_is_computed_again(
    read: Callable[..., Reader], caplog: pytest.LogCaptureFixture
) -> None:
    taken: set[int] = set()  # a batch that is late on a busy machine may be asked for twice

    def answer(record: EndpointRecord, request: BatchRequest) -> Fetched:
        if not record.is_optional:
            taken.add(request.position)
        return fetched(request, skips=SKIPS if record.is_optional else None)

    with read(answer) as reader:
        assert list(reader) == list(range(NUM_BATCHES))
    assert taken == set(range(NUM_BATCHES))
    assert caplog.text.count("endpoint algo-9/0 is no longer used") == 1
    assert "it skipped sample 7, and algo-" in caplog.text


def test_optional_endpoint_that_skips_the_same_samples_as_data_hosts_stays_in_use(
    read: Callable[..., Reader], caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[str] = []

    def answer(record: EndpointRecord, request: BatchRequest) -> Fetched:
        taken.append(record.endpoint_id)
        return fetched(request, skips=SKIPS if request.position % 4 == 0 else None)

    with read(answer) as reader:
        assert list(reader) == list(range(NUM_BATCHES))
    assert taken.count("algo-9/0") > 1
    assert "no longer used" not in caplog.text


def test_batch_that_an_optional_endpoint_skipped_comes_from_it_if_the_data_hosts_are_gone(
    read: Callable[..., Reader],
) -> None:
    with read(lambda record, request: fetched(request, skips=SKIPS), num_data_hosts=0) as reader:
        assert list(reader) == list(range(NUM_BATCHES))


def test_optional_endpoint_that_is_alone_decides(read: Callable[..., Reader]) -> None:
    def answer(record: EndpointRecord, request: BatchRequest) -> Fetched:
        raise failure(record)

    with read(answer, num_data_hosts=0) as reader, pytest.raises(DatasetError, match=r"7\.jpg"):
        next(reader)

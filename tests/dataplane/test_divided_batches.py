"""Batches that take long, of which real endpoints compute parts for each other."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.batches.request import BatchRequest, Helper
from hetero.control.security import call_metadata
from hetero.dataplane.endpoint_link import EndpointLink
from hetero.dataplane.reader.reader import Reader
from hetero.errors import DatasetError
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import Limits
from hetero.wire.requests import serialize

pytestmark = pytest.mark.integration


def start(job: Any, spec: Any, num_hosts: int = 2, **options: Any) -> Any:
    """Start two endpoints per host, and wait until all of them serve the data set."""
    for number in range(num_hosts):
        job.pool(f"algo-{number + 1}", num_endpoints=2, **options)
    fleet = job.fleet()
    fleet.describe(spec)
    return fleet


def test_first_batch_is_computed_by_all_endpoints(job: Any, tools: Any) -> None:
    spec = tools.spec("whereabouts", sample_s=0.03)
    wanted = tools.requests(spec, num_batches=3, batch_size=32)
    with Reader(start(job, spec), iter(wanted)) as reader:
        batches = list(reader)
    for request, batch in zip(wanted, batches, strict=True):
        assert batch["index"].tolist() == request.work.labels
    assert len({*batches[0]["endpoint"].tolist()}) == 4
    fleet = reader._fleet
    assert fleet.stats.divided >= 1
    assert fleet.prepare(spec).is_divided
    assert all(connection.num_divided == 0 for connection in fleet._table)
    for pool in job.pools:
        pool.stop(5.0)
    assert sum(pool.statistics()["num_batches"] for pool in job.pools) == 3  # parts do not count
    assert sum(pool.statistics()["num_parts"] for pool in job.pools) >= 3


@pytest.mark.parametrize("verify", [False, True])
def test_divided_batches_have_the_bytes_of_this_process(shared_job: Any, tools: Any, verify: bool) -> None:
    spec = tools.spec(sample_s=0.03)
    wanted = [dataclasses.replace(each, verify=verify) for each in tools.requests(spec, num_batches=5, batch_size=24)]
    with Reader(start(shared_job, spec), iter(wanted)) as reader:
        assert tools.digest(list(reader)) == tools.digest(tools.local(shared_job.script, wanted))


@pytest.mark.parametrize("place", [5, 18])
def test_batch_of_an_endpoint_that_dies_arrives(job: Any, tools: Any, tmp_path: Path, place: int) -> None:
    """A sample of the first endpoint's own part kills it once, or a sample of a helper's."""
    plain = tools.spec(sample_s=0.03)
    index = tools.requests(plain, num_batches=1, batch_size=24)[0].work.labels[place]
    spec = tools.spec(sample_s=0.03, kill_at=index, kill_flag=str(tmp_path / "killed"))
    wanted = tools.requests(spec, num_batches=4, batch_size=24)
    with Reader(start(job, spec), iter(wanted)) as reader:
        found = list(reader)
    assert tools.digest(found) == tools.digest(tools.local(job.script, tools.requests(plain, 4, 24)))
    assert (tmp_path / "killed").exists()


@pytest.mark.parametrize(("name", "num_passes"), [("whereabouts", 1), ("objects", 3)])
def test_data_set_whose_batches_come_undivided_gets_no_helpers_any_more(
    job: Any, tools: Any, name: str, num_passes: int
) -> None:
    """The batches of one take no time, and the samples of the other cannot be sent."""
    spec = tools.spec(name, sample_s=0.03 * (name == "objects"))
    wanted = tools.requests(spec, num_batches=2, batch_size=16)
    fleet = start(job, spec, 1)
    for _ in range(num_passes):
        assert fleet.prepare(spec).is_divided
        with Reader(fleet, iter(wanted)) as reader:
            assert [batch["index"].tolist() for batch in reader] == [request.work.labels for request in wanted]
    assert not fleet.stats.divided
    assert not fleet.prepare(spec).is_divided
    for pool in job.pools:
        pool.stop(5.0)
    assert sum(pool.statistics()["num_parts"] for pool in job.pools) == 0


def test_batches_of_which_samples_may_be_skipped_are_not_divided(shared_job: Any, tools: Any) -> None:
    index = tools.requests(tools.spec(), num_batches=1, batch_size=24)[0].work.labels[18]
    spec = tools.spec(sample_s=0.03, raise_at=index)
    wanted = [
        dataclasses.replace(each, on_sample_error="skip") for each in tools.requests(spec, num_batches=2, batch_size=24)
    ]
    fleet = start(shared_job, spec, 1)
    with Reader(fleet, iter(wanted)) as reader:
        assert tools.digest(list(reader)) == tools.digest(tools.local(shared_job.script, wanted))
    assert not fleet.stats.divided


def test_sample_that_raises_in_a_part_is_named(shared_job: Any, tools: Any) -> None:
    index = tools.requests(tools.spec(), num_batches=1, batch_size=24)[0].work.labels[18]
    spec = tools.spec(sample_s=0.03, raise_at=index)
    wanted = tools.requests(spec, num_batches=1, batch_size=24)
    with (
        Reader(start(shared_job, spec, 1), iter(wanted)) as reader,
        pytest.raises(DatasetError, match=f"at sample {index}:"),
    ):
        next(reader)


@contextlib.contextmanager
def linked(job: Any, record: Any) -> Iterator[EndpointLink]:
    metadata = call_metadata(job.token, "test-job", incarnation=record.incarnation)
    with contextlib.closing(EndpointLink(record, metadata, Limits())) as link:
        link.attend()
        yield link


def test_two_endpoints_that_help_each_other_do_not_wait_for_ever(shared_job: Any, tools: Any) -> None:
    spec = tools.spec(sample_s=0.03)
    start(shared_job, spec, 1)
    records = shared_job.directory.records()
    wanted: list[BatchRequest] = tools.requests(spec, num_batches=2, batch_size=24)
    batches: dict[int, Any] = {}
    num_parts: list[int] = []

    def fetch(number: int) -> None:
        other = records[1 - number]
        helper = Helper(**{field.name: getattr(other, field.name) for field in dataclasses.fields(Helper)})
        message = serialize(dataclasses.replace(wanted[number], helpers=(helper,)))
        decoder = BatchDecoder(request=message)
        with linked(shared_job, records[number]) as link:
            link.fetch(message, decoder, timeout_s=60.0, on_call=lambda call: None)
        batches[number] = decoder.result()
        num_parts.append(decoder.num_parts)

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert tools.digest([batches[0], batches[1]]) == tools.digest(tools.local(shared_job.script, wanted))

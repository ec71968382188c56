"""What the user's code does wrong, or asks of the data plane and cannot have: said in words, with where it was."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.batches.structure.leaves import UnknownTypeError
from hetero.endpoint.service import MAX_DATASETS
from hetero.errors import DatasetError
from hetero.reader.reader import Reader
from hetero.wire.limits import Limits

RECORDS = """
import dataplane_test_records

class Recorded:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return dataplane_test_records.Pair(index, index + 1)

@hetero.dataset(collate_fn=lambda samples: samples[0], fingerprint="recorded")
def recorded():
    return Recorded()
"""


def test_record_type_that_the_trainer_has_not_imported_is_said_at_once(job: Any, tools: Any) -> None:
    (job.path / "dataplane_test_records.py").write_text(
        "import collections\nPair = collections.namedtuple('Pair', 'image label')\n"
    )
    job.script.write_text(job.script.read_text() + RECORDS)
    pool = job.pool()
    fleet = job.fleet()
    wanted = tools.requests(tools.spec("recorded"), num_batches=1)
    with (
        Reader(fleet, iter(wanted)) as reader,
        pytest.raises(
            UnknownTypeError, match=r"not imported\n  Write 'import dataplane_test_records' at the top level"
        ),
    ):
        next(reader)
    assert (fleet.stats.retries, fleet.stats.checksum_errors) == (0, 0)
    pool.stop()
    assert pool.statistics()["num_batches"] == 1


def test_more_data_sets_than_an_endpoint_holds_are_refused_with_advice(job: Any, tools: Any) -> None:
    job.pool()
    fleet = job.fleet()
    specs = [tools.spec(width=width) for width in range(1, MAX_DATASETS + 2)]
    for spec in specs[:-1]:
        assert fleet.describe(spec).num_samples == 100
    with (
        pytest.raises(
            DatasetError, match="was built: this endpoint already holds 64 data sets.*register one"
        ) as caught,
        Reader(fleet, iter(tools.requests(specs[-1], num_batches=1))) as reader,
    ):
        next(reader)
    assert caught.value.record.host == "algo-1/0"
    with Reader(fleet, iter(tools.requests(specs[0], num_batches=1))) as reader:  # the others are served on
        assert len(list(reader)) == 1


@pytest.mark.fault("F2")
def test_sample_that_raises_is_raised_in_its_turn_with_the_remote_traceback(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    fleet = job.fleet()
    wanted = tools.requests(tools.spec(raise_at=17))
    turn = next(number for number, request in enumerate(wanted) if 17 in request.work.indices)
    reader = Reader(fleet, iter(wanted))
    assert len(list(itertools.islice(reader, turn))) == turn
    with pytest.raises(DatasetError, match=r"(?s)algo-1/\d at sample 17: ValueError: sample 17 is broken.*__getitem__"):
        next(reader)
    assert fleet.stats.retries == 0


@pytest.mark.attack("A12")
def test_index_out_of_range_names_index_and_length(job: Any, tools: Any) -> None:
    job.pool()
    request = BatchRequest(spec=tools.spec(), work=IndexedWork(np.array([3, 100])), seed=0, epoch=0, position=0)
    with pytest.raises(DatasetError, match="index 100 is out of range: the data set has 100 samples"):
        next(Reader(job.fleet(), iter([request])))


def test_factory_that_raises_is_raised_with_the_remote_traceback(job: Any, tools: Any) -> None:
    job.pool(script_args=("--data", "/nowhere"))
    fleet = job.fleet()
    with pytest.raises(DatasetError, match="RuntimeError: no such directory: --data /nowhere"):
        fleet.describe(tools.spec("unbuildable"))
    assert fleet.describe(tools.spec()).num_samples == 100


@pytest.mark.attack("A12")
def test_unregistered_data_set_names_those_there_are(job: Any, tools: Any) -> None:
    job.pool()
    with pytest.raises(DatasetError, match=r"nombers(?s:.)*numbers"):
        job.fleet().describe(tools.spec("nombers"))


def test_unsendable_batch_names_the_path_and_type(job: Any, tools: Any) -> None:
    job.pool()
    request = BatchRequest(spec=tools.spec("unsendable"), work=IndexedWork(np.array([1])), seed=0, epoch=0, position=0)
    with pytest.raises(DatasetError, match=r"(?s)while the batch was encoded.*handle.*object"):
        next(Reader(job.fleet(), iter([request])))


@pytest.mark.fault("F24")
def test_batch_over_the_limit_is_an_error_before_anything_is_sent(job: Any, tools: Any) -> None:
    job.pool(max_batch_bytes=20_000)
    # 4 samples of 1,000 doubles, and before them 4 indices of 8 bytes. The lower of the two sides' limits counts.
    for fleet, limit in ((job.fleet(limits=Limits(max_batch_bytes=10_000)), 10_000), (job.fleet(), 20_000)):
        message = rf"was encoded.*batch\['noise'\]: 32000 bytes, but only {limit - 32} are left of the {limit} "
        with pytest.raises(DatasetError, match=message + ".*smaller batches or raise --max-batch-bytes"):
            next(Reader(fleet, iter(tools.requests(tools.spec(width=1000)))))


@pytest.mark.fault("F2")
def test_poisonous_sample_fails_by_name_after_three_deaths(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(kill_at=17))
    turn = next(number for number, request in enumerate(wanted) if 17 in request.work.indices)
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    assert len(list(itertools.islice(reader, turn))) == turn
    with pytest.raises(DatasetError, match=r"died 3 times.*\b17\b"):
        next(reader)
    tools.wait_for(lambda: len(pool.records) == 2)
    assert pool.num_restarts == 3
    # The fleet lives on: the same endpoints serve what is not poisonous.
    with Reader(fleet, iter(tools.requests(tools.spec()))) as healthy:
        assert len(list(healthy)) == 12


@pytest.mark.fault("F2")
def test_sample_that_kills_its_endpoint_once_costs_nothing(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(kill_at=17, kill_flag=str(job.path / "killed")))
    fleet = job.fleet()
    with Reader(fleet, iter(wanted)) as reader:
        found = list(reader)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.endpoint_losses == 1

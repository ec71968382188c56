"""What the user's script asks of the data plane and cannot have: said in words, at once, not tried again."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.batches.leaves import UnknownTypeError
from hetero.dataplane.reader import Reader
from hetero.dataplane.service import MAX_DATASETS
from hetero.errors import DatasetError

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
        pytest.raises(DatasetError, match="in build: this endpoint holds 64 data sets already.*register one") as caught,
        Reader(fleet, iter(tools.requests(specs[-1], num_batches=1))) as reader,
    ):
        next(reader)
    assert caught.value.record.host == "algo-1/0"
    with Reader(fleet, iter(tools.requests(specs[0], num_batches=1))) as reader:  # the others are served on
        assert len(list(reader)) == 1

"""What the user's script asks of the data plane and cannot have: said in words, at once, not tried again."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.batches.structure import UnknownTypeError
from hetero.dataplane.reader import Reader

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

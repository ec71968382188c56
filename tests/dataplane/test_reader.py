from __future__ import annotations

from typing import Any

import pytest

from hetero.dataplane.reader import Reader


@pytest.mark.parametrize("num_endpoints", [1, 2, 3])
def test_reader_delivers_local_bytes_in_order_for_any_number_of_endpoints(
    job: Any, tools: Any, num_endpoints: int
) -> None:
    job.pool(num_endpoints=num_endpoints)
    fleet = job.fleet()
    wanted = tools.requests(tools.spec())
    assert fleet.describe(wanted[0].spec).num_samples == 100
    with Reader(fleet, iter(wanted)) as reader:
        found = list(reader)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.batches == len(wanted)
    assert fleet.stats.received_bytes > 0
    assert fleet.stats.retries == 0

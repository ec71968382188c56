"""Fault schedules over lanes and shards: order, samples and ends are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from tests.lanes.schedules import lanes_schedule, shards_schedule
from tests.support.shards import write_shards


@pytest.mark.parametrize("first", [0, 10, 20])
def test_lanes_deliver_what_one_process_does(first: int) -> None:
    assert [lanes_schedule(seed) for seed in range(first, first + 10)] == [""] * 10


def test_shards_deliver_what_one_process_does(tmp_path: Path) -> None:
    files = write_shards(tmp_path, "parquet", [197] * 4)
    assert [shards_schedule(seed, files) for seed in range(10)] == [""] * 10

"""What a loader knows of its lanes during a pass, without data."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hetero.batches.lanes.pieces import LaneReport, PieceReport
from hetero.errors import ConfigError
from hetero.loaders.lanes.options import LaneOptions
from hetero.loaders.lanes.passes import LanePasses, Lanes, _Lane, _packed
from hetero.loaders.sampling import PlannedBatch, Shard
from hetero.metrics.steps import Extent
from hetero.plans.mixtures import Mixture
from tests.lanes.schedules import Exchange

NUM_LANES = 4
TWO_RANKS = Shard(0, 2)


def lanes_of(
    *, guarantee: Any = "exactly-once", batch: int = 1, shard: Shard = TWO_RANKS, mixture: Mixture | None = None
) -> Lanes:
    """Return a pass over lanes in chunks of 1 sample, or of 2 if a batch has none of them whole."""
    options = LaneOptions(
        guarantee=guarantee,
        end="stop",
        num_lanes=NUM_LANES,
        lanes_per_rank=1,
        chunk_samples=max(1, 2 // batch),
        snapshot_every=1,
        drops_rest=False,
        allow_version_change=False,
        mixture=mixture,
    )
    passes = LanePasses(options, name="x", extent=Extent())
    names = () if mixture is None else mixture.names
    passes.begin(epoch=0, step=0, batch_size=batch, shard=shard, exchange=Exchange(), names=names)
    return passes.of(0)


def planned(lanes: Lanes, *, batch: int, shard: Shard) -> Any:
    ranks = range(shard.rank, shard.rank + 1)
    return lanes.plan(0, batch_size=batch, world_size=shard.world_size, ranks=ranks)


def receive(lanes: Lanes, each: PlannedBatch, *, num_samples: int | None = None) -> None:
    """Record a batch with all of its samples, or with fewer."""
    work: Any = each.work
    reports = [
        PieceReport(
            num_samples=piece.part.num_samples if num_samples is None else num_samples,
            num_left=9,
            chain=bytes(16),
            snapshot=None,
            begun_at=None,
            first=b"",
        )
        for piece in work.pieces
    ]
    lanes.received(work, LaneReport(tuple(reports)), step=each.position)
    lanes.agree(each.position)


def test_end_that_was_not_announced_is_an_error_and_no_rank_waits() -> None:
    lanes = lanes_of(batch=2)
    batches = planned(lanes, batch=2, shard=TWO_RANKS)
    receive(lanes, next(batches))
    with pytest.raises(ConfigError, match=r"lane 0 of loader x ended before sample 2, which it had announced"):
        receive(lanes, next(batches), num_samples=0)


@pytest.mark.parametrize("guarantee", ["exactly-once", "replay"])
def test_ranks_that_share_a_lane_name_the_same_group(guarantee: str) -> None:
    shards = [Shard(rank, 4) for rank in range(4)]
    found = [
        [
            each.lane
            for each in itertools.islice(planned(lanes_of(guarantee=guarantee, shard=shard), batch=1, shard=shard), 4)
        ]
        for shard in shards
    ]
    assert found == [[0, 2, 0, 2], [0, 2, 0, 2], [1, 3, 1, 3], [1, 3, 1, 3]]


def test_lanes_that_would_be_read_twice_are_refused_with_at_most_once() -> None:
    with pytest.raises(ConfigError, match="several ranks would read a lane"):
        lanes_of(guarantee="at-most-once", shard=Shard(0, 4))


def test_state_of_a_mixture_may_be_far_behind_the_requests() -> None:
    shard = Shard(0, 1)
    lanes = lanes_of(batch=2, shard=shard, mixture=Mixture({"a": 1, "b": 2}))
    batches = planned(lanes, batch=2, shard=shard)
    ahead = list(itertools.islice(batches, 1000))
    for each in ahead[:700]:
        receive(lanes, each)
    # The loop of a tool may be some steps behind.
    for step in (700, 690, 600):
        assert lanes.state(2 * step)["mixture"]["chunk"] <= 2 * step
    with pytest.raises(ConfigError, match="is before chunk"):
        lanes.state(2 * 100)


def test_queue_goes_on_where_the_pass_resumes() -> None:
    options = lanes_of(guarantee="at-most-once", batch=2).options
    passes = LanePasses(options, name="x", extent=Extent())
    state = {"num_lanes": NUM_LANES, "chunk_samples": 1, "snapshots": _packed({0: _Lane((), ((5, bytes(16)),))})}
    passes.load(0, state)
    passes.begin(epoch=0, step=8, batch_size=4, shard=Shard(0, 1))
    work: Any = next(passes.of(0).plan(8, batch_size=4, world_size=1, ranks=range(1))).work
    # The state knows lane 0 up to sample 5, and the pass resumes at sample 8 of each lane.
    assert [piece.known for piece in work.pieces] == [(8, b"")] * 4

"""Requests for samples of lanes through their messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.lanes.iterator import Snapshot
from hetero.batches.lanes.pieces import ENDS, GUARANTEES, LanePiece, LaneRules
from hetero.batches.lanes.work import LaneWork
from hetero.batches.request import BatchRequest
from hetero.errors import ConfigError, ProtocolError
from hetero.plans.lanes import LaneLayout, LanePart
from hetero.spec import DatasetSpec
from hetero.wire.limits import MAX_FETCH_BYTES, MAX_PARSED_BYTES, PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.requests import from_proto, parse_request, serialize

SPEC = DatasetSpec("stream", "{}")
CHAIN = b"chain of samples"
STATE = b"state"
NUM_LANES = 2**20 - 1


@st.composite
def pieces(draw: st.DrawFn) -> LanePiece:
    place = draw(st.integers(0, 2**40 - 1))
    part = LanePart(lane=draw(st.integers(0, NUM_LANES - 1)), place=place, num_samples=draw(st.integers(1, 1000)))
    before = st.integers(0, place)
    snapshots = st.builds(Snapshot, place=before, chain=st.binary(), state=st.binary(), library=st.text(max_size=9))
    known = st.tuples(before, st.binary(min_size=1))
    return LanePiece(part=part, snapshot=draw(st.none() | snapshots), known=draw(st.just((0, b"")) | known))


@st.composite
def works(draw: st.DrawFn) -> LaneWork:
    rules = LaneRules(
        layout=LaneLayout(num_lanes=NUM_LANES // 5, chunk_samples=draw(st.integers(1, 2**20)), num_sources=5),
        guarantee=draw(st.sampled_from(GUARANTEES)),  # type: ignore[arg-type]
        end=draw(st.sampled_from(ENDS)),  # type: ignore[arg-type]
        snapshot_every=draw(st.integers(1, 2**32 - 1)),
    )
    return LaneWork(pieces=tuple(draw(st.lists(pieces(), min_size=1, max_size=5))), rules=rules)


def request(work: LaneWork) -> BatchRequest:
    return BatchRequest(spec=SPEC, work=work, seed=-3, epoch=4, position=5)


@given(works())
def test_request_comes_back(work: LaneWork) -> None:
    sent = request(work)
    found = from_proto(parse_request(serialize(sent)))
    assert isinstance(found.work, LaneWork)
    assert (found.work.pieces, found.work.rules) == (work.pieces, work.rules)
    assert (found.spec, found.seed, found.epoch, found.position) == (SPEC, -3, 4, 5)
    assert found.work.key(1, 2, 3) == work.key(1, 2, 3)


def message(*, piece: Any = None, pieces: Any = None, fetch: Any = None, **lanes: Any) -> pb.FetchRequest:
    """Return a valid request of 4 samples of lane 1 from place 8 on, with the given changes."""
    part = {"lane": 1, "place": 8, "num_samples": 4, "known_place": 8, "known_chain": CHAIN}
    rules = {"num_lanes": 2, "chunk_samples": 4, "guarantee": "replay", "end": "stop", "snapshot_every": 1}
    made = pb.Lanes(**{**rules, **lanes}, pieces=[{**part, **(piece or {})}] if pieces is None else pieces)
    dataset = pb.DatasetSpec(name="stream", arguments_json="{}")
    states = STATE * sum(each.HasField("snapshot") for each in made.pieces)
    lanes_of = {"lanes": made.SerializeToString(), "lane_states": states}
    fields = {"protocol": PROTOCOL, "dataset": dataset, "collate": True, **lanes_of}
    return pb.FetchRequest(**{**fields, **(fetch or {})})


def snapshot(place: int) -> dict[str, Any]:
    return {"snapshot": {"place": place, "chain": CHAIN, "state_bytes": len(STATE), "library": ""}}


@pytest.mark.parametrize("changes", [{}, {"piece": snapshot(8)}, {"piece": {"place": 2**40 - 1}}])
def test_request_without_a_mistake_is_read(changes: Any) -> None:
    assert from_proto(message(**changes)).work.num_samples == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"piece": {"place": 2**40}}, "no valid samples 1099511627776 of lane 1"),
        ({"piece": {"lane": 2}}, "no valid samples 8 of lane 2"),
        ({"num_lanes": 0}, "no valid samples"),
        ({"num_lanes": 2**20}, "no valid samples"),
        ({"piece": {"num_samples": 0}}, "no valid samples"),
        ({"piece": {"known_place": 9}}, "no valid samples"),
        ({"piece": snapshot(9)}, "no valid samples"),
        ({"pieces": []}, "0 samples of lanes, expected 1 to"),
        ({"piece": {"num_samples": 2**20 + 1}}, "1048577 samples of lanes, expected 1 to 1048576"),
        ({"pieces": [{"lane": 1, "num_samples": 2**19 + 1}] * 2}, "1048578 samples of lanes"),
        ({"chunk_samples": 0}, "chunks of 0 samples"),
        ({"chunk_samples": 2**20 + 1}, "chunks of 1048577 samples"),
        ({"snapshot_every": 0}, "chunks of 4 samples"),
        ({"guarantee": "sometimes"}, "unknown guarantee 'sometimes'"),
        ({"guarantee": ""}, "unknown guarantee ''"),
        ({"end": "later"}, "or end 'later'"),
        ({"fetch": {"indices": bytes(8)}}, "lanes and indices, expected one of them"),
        ({"fetch": {"keys": b"\x0a\x00"}}, "lanes and indices"),
        ({"fetch": {"occurrences": bytes(4)}}, "lanes and indices"),
        ({"fetch": {"lanes": b"\xff"}}, "not a valid Lanes message"),
        ({"fetch": {"lanes": bytes(MAX_PARSED_BYTES + 1)}}, f"at most {MAX_PARSED_BYTES} a"),
        ({"fetch": {"lane_states": b"more"}}, "4 bytes of states, which are not those of its lanes"),
        ({"piece": snapshot(8), "fetch": {"lane_states": STATE[1:]}}, "4 bytes of states, which are not"),
    ],
)
def test_malformed_request_is_rejected(changes: Any, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        from_proto(message(**changes))


def test_request_above_the_limits_of_the_endpoint_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="4 samples of lanes, expected 1 to 3"):
        from_proto(message(), Limits(max_indices=3))


def test_states_that_an_endpoint_would_reject_are_not_sent() -> None:
    state = Snapshot(place=0, chain=CHAIN, state=bytes(MAX_FETCH_BYTES), library="")
    rules = LaneRules(layout=LaneLayout(num_lanes=1, chunk_samples=1), guarantee="exactly-once", end="stop")
    piece = LanePiece(part=LanePart(lane=0, place=0, num_samples=1), snapshot=state)
    with pytest.raises(ConfigError, match="the states of the lanes of batch"):
        serialize(request(LaneWork(pieces=(piece,), rules=rules)))

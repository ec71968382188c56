"""Converts the work of lanes to its field of a request, and back."""

from __future__ import annotations

from io import BytesIO
from typing import cast

from hetero.batches.lanes.iterator import Snapshot
from hetero.batches.lanes.pieces import ENDS, GUARANTEES, End, Guarantee, LanePiece, LaneRules
from hetero.batches.lanes.work import LaneWork
from hetero.errors import ProtocolError
from hetero.plans.lanes import LaneLayout, LanePart
from hetero.wire.limits import Limits
from hetero.wire.messages import parse_bounded
from hetero.wire.proto import data_pb2 as pb

__all__ = ["read", "write"]


def write(message: pb.FetchRequest, work: LaneWork) -> None:
    """Set the field of a request for its lanes.

    Raises:
        ValueError: If a number is out of range, or a text cannot be encoded in UTF-8.
    """
    rules = work.rules
    lanes = pb.Lanes(
        num_lanes=rules.layout.num_lanes,
        num_sources=rules.layout.num_sources,
        chunk_samples=rules.layout.chunk_samples,
        guarantee=rules.guarantee,
        end=rules.end,
        snapshot_every=rules.snapshot_every,
    )
    for piece in work.pieces:
        place, chain = piece.known
        made = lanes.pieces.add(
            lane=piece.part.lane,
            place=piece.part.place,
            num_samples=piece.part.num_samples,
            known_place=place,
            known_chain=chain,
        )
        if (snapshot := piece.snapshot) is not None:
            made.snapshot.place, made.snapshot.chain = snapshot.place, snapshot.chain
            made.snapshot.state_bytes, made.snapshot.library = len(snapshot.state), snapshot.library
    message.lanes = lanes.SerializeToString()
    message.lane_states = b"".join(piece.snapshot.state for piece in work.pieces if piece.snapshot is not None)


def read(message: pb.FetchRequest, limits: Limits) -> LaneWork:
    """Return the lanes in a request.

    Raises:
        ProtocolError: If `write` could not have made the message.
    """
    if message.indices or message.keys or message.occurrences:
        raise ProtocolError("a request has lanes and indices, expected one of them")
    lanes = parse_bounded(pb.Lanes, message.lanes)
    states = BytesIO(message.lane_states)
    pieces = tuple(_piece(each, lanes, states) for each in lanes.pieces)
    if len(message.lane_states) != sum(each.snapshot.state_bytes for each in lanes.pieces):
        raise ProtocolError(
            f"a request has {len(message.lane_states)} bytes of states, which are not those of its lanes"
        )
    num_samples = sum(piece.part.num_samples for piece in pieces)
    if not 1 <= num_samples <= limits.max_indices:
        raise ProtocolError(f"a request has {num_samples} samples of lanes, expected 1 to {limits.max_indices}")
    if not (1 <= lanes.chunk_samples <= limits.max_indices and lanes.snapshot_every >= 1):
        raise ProtocolError(f"a request has chunks of {lanes.chunk_samples} samples of a lane")
    if lanes.guarantee not in GUARANTEES or lanes.end not in ENDS:
        raise ProtocolError(f"a request has the unknown guarantee {lanes.guarantee!r:.40} or end {lanes.end!r:.40}")
    return LaneWork(
        pieces=pieces,
        rules=LaneRules(
            layout=LaneLayout(
                num_lanes=lanes.num_lanes, chunk_samples=lanes.chunk_samples, num_sources=max(1, lanes.num_sources)
            ),
            guarantee=cast(Guarantee, lanes.guarantee),
            end=cast(End, lanes.end),
            snapshot_every=lanes.snapshot_every,
        ),
    )


def _piece(message: pb.LanePiece, lanes: pb.Lanes, states: BytesIO) -> LanePiece:
    snapshot = None
    if message.HasField("snapshot"):
        found = message.snapshot
        state = states.read(found.state_bytes)
        snapshot = Snapshot(place=found.place, chain=found.chain, state=state, library=found.library)
    places = (message.known_place, 0 if snapshot is None else snapshot.place)
    # Random keys are made of signed 64-bit numbers of lane and place.
    num_lanes = lanes.num_lanes * max(1, lanes.num_sources)
    is_valid = message.lane < num_lanes < 2**20 and message.place < 2**40 and max(places) <= message.place
    if not (is_valid and message.num_samples):
        raise ProtocolError(f"a request has no valid samples {message.place} of lane {message.lane}")
    return LanePiece(
        part=LanePart(lane=message.lane, place=message.place, num_samples=message.num_samples),
        snapshot=snapshot,
        known=(message.known_place, message.known_chain),
    )

"""The samples of a batch of lanes: parts, digests and reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hetero.batches.lanes.iterator import Snapshot
from hetero.batches.lanes.pieces import LanePiece, LaneReport, LaneRules, PieceReport
from hetero.batches.lanes.states import MAX_STATE_BYTES, encode_state
from hetero.batches.lanes.work import LaneWork
from hetero.errors import ProtocolError
from hetero.plans.lanes import LaneLayout, LanePart

RULES = LaneRules(layout=LaneLayout(num_lanes=4, chunk_samples=3), guarantee="exactly-once", end="stop")
SNAPSHOT = Snapshot(place=3, chain=bytes(16), state=b"state", library="datasets 5.2.0")


def work(*parts: tuple[int, int, int], snapshot: Snapshot | None = None) -> LaneWork:
    pieces = [
        LanePiece(part=LanePart(lane=lane, place=place, num_samples=count), snapshot=snapshot)
        for lane, place, count in parts
    ]
    return LaneWork(pieces=tuple(pieces), rules=RULES)


def report(*counts: int, state: bytes = b"state") -> LaneReport:
    snapshot = dataclasses.replace(SNAPSHOT, state=state)
    return LaneReport(
        tuple(
            PieceReport(
                num_samples=count, num_left=3, chain=bytes(16), snapshot=snapshot, begun_at=None, first=bytes(16)
            )
            for count in counts
        )
    )


@pytest.mark.parametrize(("begin", "end"), [(0, 6), (0, 2), (2, 4), (3, 6), (5, 6), (1, 5)])
def test_part_has_the_samples_at_its_positions(begin: int, end: int) -> None:
    whole = work((0, 3, 3), (1, 6, 3))
    assert list(whole.part(range(begin, end)).labels) == list(whole.labels)[begin:end]


def test_digest_and_key_do_not_depend_on_snapshots() -> None:
    one, other = work((0, 3, 3), (1, 3, 3)), work((0, 3, 3), (1, 3, 3), snapshot=SNAPSHOT)
    assert (one.digest(), one.key(1, 0, 2)) == (other.digest(), other.key(1, 0, 2))
    assert one.digest() != work((1, 3, 3), (0, 3, 3)).digest()
    assert one.samples_sum(leave_out_repeats=True) == work((1, 3, 3), (0, 3, 3)).samples_sum(leave_out_repeats=True)


def test_report_comes_back_from_its_bytes() -> None:
    pieces = work((0, 0, 3), (1, 0, 3)).pieces
    assert LaneReport.from_array(report(3, 0).to_array(), pieces) == report(3, 0)


@pytest.mark.parametrize(
    "found",
    [report(3), report(3, 4), report(3, -1), report(3, 3, 3), report(3, 3, state=bytes(MAX_STATE_BYTES + 1))],
)
def test_report_that_does_not_fit_its_request_is_refused(found: LaneReport) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        LaneReport.from_array(found.to_array(), work((0, 0, 3), (1, 0, 3)).pieces)


GOOD = (3, 0, b"", (3, b"", b"state", "library"), 0, b"")


def row(**changes: Any) -> list[Any]:
    return [changes.get(f"at_{number}", value) for number, value in enumerate(GOOD)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        encode_state(3),
        encode_state([3]),
        encode_state([]),
        encode_state([row(), row()]),
        encode_state([row(at_0="3")]),
        encode_state([row(at_1=-1)]),
        encode_state([row(at_2=b"short")]),
        encode_state([row(at_2="0" * 16)]),
        encode_state([row(at_3=(4, b"", b"state", "library"))]),
        encode_state([row(at_3=(-7, b"", b"state", "library"))]),
        encode_state([row(at_3=("3", b"", b"state", "library"))]),
        encode_state([row(at_3=(3, b"", b"state", 5))]),
        encode_state([row(at_3=(3, b"", b"state", 10**7 * "x"))]),
        encode_state([row(at_4=4)]),
        encode_state([row(at_5=None)]),
    ],
)
def test_damaged_report_is_refused(content: bytes) -> None:
    pieces = work((0, 0, 3)).pieces
    assert LaneReport.from_array(np.frombuffer(encode_state([row()]), np.uint8), pieces).pieces[0].num_samples == 3
    with pytest.raises(ProtocolError, match="damaged"):
        LaneReport.from_array(list(content), pieces)

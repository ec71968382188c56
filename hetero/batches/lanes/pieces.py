"""What a request says about lanes, and what the answer says about them."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from hetero.batches.lanes.iterator import Snapshot
from hetero.batches.lanes.states import MAX_STATE_BYTES
from hetero.errors import ProtocolError
from hetero.plans.lanes import LaneLayout, LanePart

__all__ = ["ENDS", "GUARANTEES", "End", "Guarantee", "LanePiece", "LaneReport", "LaneRules", "PieceReport"]

Guarantee: TypeAlias = Literal["exactly-once", "replay", "at-most-once"]
GUARANTEES: tuple[str, ...] = get_args(Guarantee)
End: TypeAlias = Literal["stop", "wrap", "rest"]
"""What happens at the end of a lane: all ranks stop, the lane begins again, or the other lanes go on."""
ENDS: tuple[str, ...] = get_args(End)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRules:
    """What all batches of a loader have in common."""

    layout: LaneLayout
    guarantee: Guarantee
    end: End
    snapshot_every: int = 1
    """A snapshot is taken after every n-th chunk of a lane. Only with ``exactly-once``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePiece:
    """Samples of one lane in a batch, and what is known of the lane before them. Only `part` affects the batch."""

    part: LanePart
    snapshot: Snapshot | None = None
    """Where the lane may be begun anew: at most at the place of the part."""
    known: tuple[int, bytes] | None = None
    """A place up to that of the part, and the chain there (`hetero.batches.lanes.iterator.LaneIterator`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceReport:
    """What became of a `LanePiece`."""

    num_samples: int
    """Samples in the batch. Fewer than in the part only at the end of the lane."""
    num_left: int | None
    """Samples of the lane's next chunk. Fewer than a whole chunk at the end of the lane. None with another end than
    ``stop``."""
    chain: bytes
    """The chain after these samples."""
    snapshot: Snapshot | None
    """The last snapshot up to there. None if the request has it already."""
    begun_at: int | None
    """Place where the iterator was begun for this batch. None if it was there before."""
    first: bytes
    """Digest of the lane's first samples, if the part begins at place 0. Empty if they are all equal."""


@dataclass(frozen=True, slots=True)
class LaneReport:
    """The reports of a batch's pieces. It travels with the batch as an array of bytes."""

    pieces: tuple[PieceReport, ...]

    def to_array(self) -> npt.NDArray[np.uint8]:
        """Return the report as bytes."""
        items = [
            [
                piece.num_samples,
                piece.num_left,
                piece.chain.hex(),
                piece.snapshot
                and [
                    piece.snapshot.place,
                    piece.snapshot.chain.hex(),
                    b64encode(piece.snapshot.state).decode(),
                    piece.snapshot.library,
                ],
                piece.begun_at,
                piece.first.hex(),
            ]
            for piece in self.pieces
        ]
        return np.frombuffer(json.dumps(items).encode(), np.uint8)

    def check(self, pieces: Sequence[LanePiece]) -> None:
        """Check that this can be the report of these pieces.

        Raises:
            ProtocolError: If there are more samples than were requested, or a state is too large.
        """
        counts = [done.num_samples for done in self.pieces]
        wanted = [piece.part.num_samples for piece in pieces]
        states = [len(done.snapshot.state) for done in self.pieces if done.snapshot is not None]
        fits = (
            all(len(done.chain) in (0, 16) for done in self.pieces)
            and len(counts) == len(wanted)
            and all(0 <= count <= most for count, most in zip(counts, wanted, strict=True))
        )
        largest = max(states, default=0)
        if not fits or largest > MAX_STATE_BYTES:
            raise ProtocolError(f"a batch of {wanted} samples of lanes has {counts}, and a state of {largest} bytes")

    @classmethod
    def from_array(cls, content: Any) -> LaneReport:
        """Return the report that `to_array` made these bytes of. Call `check` next.

        Raises:
            ProtocolError: If the bytes are not a report.
        """
        try:
            items = json.loads(np.asarray(content, np.uint8).tobytes())
            return cls(tuple(_piece_report(*item) for item in items))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"the report of a batch of lanes is damaged: {error}") from error


def _piece_report(num_samples: Any, num_left: Any, chain: str, snapshot: Any, begun_at: Any, first: str) -> PieceReport:
    found = None
    if snapshot is not None:
        place, before, state, library = snapshot
        found = Snapshot(
            place=int(place), chain=bytes.fromhex(before), state=b64decode(state, validate=True), library=str(library)
        )
    return PieceReport(
        num_samples=int(num_samples),
        num_left=None if num_left is None else int(num_left),
        chain=bytes.fromhex(chain),
        snapshot=found,
        begun_at=None if begun_at is None else int(begun_at),
        first=bytes.fromhex(first),
    )

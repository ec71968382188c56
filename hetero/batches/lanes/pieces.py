"""What a request says about lanes, and what the answer says about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from hetero.batches.lanes.iterator import Snapshot, checked_chain
from hetero.batches.lanes.states import MAX_STATE_BYTES, decode_state, encode_state
from hetero.errors import ConfigError, ProtocolError
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
    known: tuple[int, bytes] = (0, b"")
    """A place up to that of the part, and the chain there (`hetero.batches.lanes.iterator.LaneIterator`). The chain is
    empty if it is not known. The rank will not ask for samples of earlier chunks."""


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
        rows = [astuple(each) for each in self.pieces]
        return np.frombuffer(encode_state(rows, max_bytes=0), np.uint8)

    @classmethod
    def from_array(cls, content: Any, pieces: Sequence[LanePiece]) -> LaneReport:
        """Return the report that `to_array` made these bytes of.

        Args:
            content: The bytes.
            pieces: What was requested.

        Raises:
            ProtocolError: If the bytes are no report of these pieces. A peer may have made them.
        """
        try:
            # A state of the largest size takes a third more as text.
            rows = decode_state(np.asarray(content, np.uint8).tobytes(), max_bytes=2 * MAX_STATE_BYTES * len(pieces))
            return cls(tuple(_piece_report(piece.part, row) for piece, row in zip(pieces, rows, strict=True)))
        except (ConfigError, ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"the report of a batch of lanes is damaged: {error}") from error


def _piece_report(part: LanePart, row: Sequence[Any]) -> PieceReport:
    """Return the report of a piece with these values, in the order of its fields.

    Raises:
        ValueError, TypeError: If it cannot have them.
    """
    num_samples, num_left, chain, snapshot, begun_at, first = row
    end = part.place + part.num_samples
    found = None if snapshot is None else Snapshot.of_row(snapshot)
    if found is not None and (not 0 <= found.place <= end or len(found.state) > MAX_STATE_BYTES):
        raise ValueError(f"a snapshot at sample {found.place} before sample {end} has {len(found.state)} bytes")
    are_whole = {type(num_samples), type(num_left), type(begun_at)} <= {int, type(None)}
    if not (
        are_whole and 0 <= num_samples <= part.num_samples and (num_left or 0) >= 0 and 0 <= (begun_at or 0) <= end
    ):
        raise ValueError(f"{num_samples} of {part.num_samples} samples, begun at {begun_at}, and {num_left} are left")
    return PieceReport(
        num_samples=num_samples,
        num_left=num_left,
        chain=checked_chain(chain),
        snapshot=found,
        begun_at=begun_at,
        first=checked_chain(first),
    )

"""The iterator of one lane in one pass, with the samples that it has read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from hetero.batches.failures import Cancelled
from hetero.batches.lanes.parts import Opened, as_lane, library_of, open_part
from hetero.batches.lanes.states import decode_state, encode_state
from hetero.batches.purity.comparison import digest
from hetero.batches.seeds import sample_key
from hetero.errors import ConfigError

__all__ = ["LaneIterator", "LaneOrigin", "Snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a lane may be begun anew."""

    place: int
    """Number of samples before it."""
    chain: bytes
    """Digest of these samples, see `LaneIterator`."""
    state: bytes
    """State of the iterator, from `encode_state`."""
    library: str
    """See `library_of`. Empty: any version may load the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOrigin:
    """What the samples of a lane depend on."""

    source: Any
    """The user's iterable. It is not changed."""
    seed_all: Callable[[int], None]
    """Seeds all generators with a key."""
    info_seed: int
    """Seed in torch's worker info."""
    lane: int
    num_lanes: int
    seed: int
    epoch: int
    wraps: bool
    """Whether the lane begins again at its end."""


class _Read(NamedTuple):
    """A sample that was read, and where the lane is after it."""

    sample: Any
    digest: bytes
    chain: bytes
    snapshot: Snapshot | None


class LaneIterator:
    """Reads the samples of one lane in order.

    Before each sample, the generators are seeded with a key of lane and place. So what a source draws from them does
    not depend on where the lane was begun. The *chain* is a digest over all samples up to a place. It shows whether a
    lane that was begun anew gives the same samples as before.

    Args:
        origin: The lane.
        snapshot: Where to begin. None: at place 0.
        every: A snapshot is taken at each multiple of this number of samples. 0: never.

    Raises:
        ConfigError: If the snapshot cannot be loaded.
    """

    def __init__(self, origin: LaneOrigin, snapshot: Snapshot | None, *, every: int) -> None:
        self.origin = origin
        self.place = 0 if snapshot is None else snapshot.place
        """Place of the next sample that `take` returns."""
        self.chain = b"" if snapshot is None else snapshot.chain
        """Digest of all samples before `place`."""
        self.snapshot = snapshot
        """The last snapshot up to `place`."""
        self._every = every
        self._end: int | None = None
        """Number of samples of the lane, once it is known."""
        self._ahead: deque[_Read] = deque()
        self._read_chain = self.chain
        self._round, state = 0, None
        if snapshot is not None:
            self._check_version(snapshot)
            self._round, state = decode_state(snapshot.state)
        with self._as_lane():
            self._opened = self._open(state)

    @property
    def has_state(self) -> bool:
        """Whether snapshots can be taken."""
        return self._opened.has_state

    @property
    def num_ahead(self) -> int:
        """Samples that were read and not taken."""
        return len(self._ahead)

    @property
    def read_place(self) -> int:
        """Samples of the lane that were read."""
        return self.place + len(self._ahead)

    @property
    def read_chain(self) -> bytes:
        """Digest of all samples that were read."""
        return self._read_chain

    @property
    def digests_ahead(self) -> list[bytes]:
        """Digests of the samples that were read and not taken."""
        return [read.digest for read in self._ahead]

    def snapshot_at(self, place: int) -> Snapshot | None:
        """Return the snapshot at a place that was read and not taken. None if none was taken there."""
        found = (read.snapshot for read in self._ahead)
        return next((each for each in found if each is not None and each.place == place), None)

    def read_until(self, place: int, cancelled: Callable[[], bool] | None = None) -> None:
        """Read samples up to a place of the lane, or to its end.

        Raises:
            Cancelled: If ``cancelled()`` was true. What was read stays here.
            ConfigError: If the lane is empty.
        """
        if self.read_place >= place or self._end is not None:
            return
        with self._as_lane():
            while self.read_place < place:
                if cancelled is not None and cancelled():
                    raise Cancelled
                if not self._read():
                    break

    def take(self, count: int) -> list[Any]:
        """Return at most ``count`` of the samples that were read."""
        taken = [self._ahead.popleft() for _ in range(min(count, len(self._ahead)))]
        self.place += len(taken)
        for read in taken:
            self.chain, self.snapshot = read.chain, read.snapshot or self.snapshot
        return [read.sample for read in taken]

    def _read(self) -> bool:
        """Read one sample. Return whether there was one."""
        origin, place = self.origin, self.read_place
        origin.seed_all(sample_key(origin.seed, origin.epoch, (origin.lane, place), 0))
        try:
            sample = next(self._opened)
        except StopIteration:
            if place and self.origin.wraps:
                self._round += 1
                self._opened = self._open(None)
                return self._read_after_wrap()
            self._end = place
            return self._check_not_empty()
        self._note(sample)
        return True

    def _read_after_wrap(self) -> bool:
        """Read the first sample of another round."""
        try:
            self._note(next(self._opened))
        except StopIteration:
            raise ConfigError(
                f"lane {self.origin.lane} yields nothing when it begins again: "
                'end="wrap" needs a source that can be iterated more than once'
            ) from None
        return True

    def _note(self, sample: Any) -> None:
        """Record a sample that was read."""
        # Hash the sample before anyone may change it.
        content = digest(sample)
        self._read_chain = blake2b(self._read_chain + content, digest_size=16).digest()
        place = self.read_place + 1
        snapshot = None
        if self._every and place % self._every == 0 and self._opened.has_state:
            snapshot = Snapshot(
                place=place,
                chain=self._read_chain,
                state=encode_state((self._round, self._opened.state())),
                library=library_of(self.origin.source),
            )
        self._ahead.append(_Read(sample, content, self._read_chain, snapshot))

    def _check_not_empty(self) -> bool:
        """Return False, for the end of the lane.

        Raises:
            ConfigError: If the lane has no samples at all.
        """
        if not self.read_place:
            raise ConfigError(
                f"lane {self.origin.lane} of {self.origin.num_lanes} yields nothing: "
                "the source is empty, or has fewer shards than there are lanes. Pass the loader a smaller lanes=, or "
                "write more shards. If a rank would have no lane, give the source an index: see hetero.shards"
            )
        return False

    def _open(self, state: Any | None) -> Opened:
        origin = self.origin
        origin.seed_all(sample_key(origin.seed, origin.epoch, (origin.lane, -1 - self._round), 0))
        return open_part(origin.source, origin.lane, origin.num_lanes, origin.epoch, state)

    def _as_lane(self) -> Any:
        origin = self.origin
        return as_lane(origin.source, origin.lane, origin.num_lanes, origin.info_seed)

    def _check_version(self, snapshot: Snapshot) -> None:
        found = library_of(self.origin.source)
        if snapshot.library not in ("", found):
            raise ConfigError(
                f"the state of lane {self.origin.lane} is of {snapshot.library}, this host has {found or 'none'}. "
                "Install the version of the state, or pass the loader allow_version_change=True"
            )

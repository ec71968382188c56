"""The iterator of one lane in one pass, with the samples that it has read ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from hetero.batches.failures import Cancelled
from hetero.batches.lanes.parts import Opened, as_lane, library_of, open_part
from hetero.batches.lanes.states import decode_state, encode_state
from hetero.batches.purity.comparison import digest
from hetero.batches.seeds import sample_key
from hetero.errors import ConfigError

__all__ = ["LaneIterator", "LaneOrigin", "Snapshot", "checked_chain"]

_DIGEST_BYTES = 16
"""Length of a chain. The chain of a ledger (`hetero.audit.ledger`) is as long."""


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

    @classmethod
    def of_beginning(cls, source: Any) -> Snapshot | None:
        """Return the snapshot before the first sample. None if the source has no library."""
        library = library_of(source)
        return cls(place=0, chain=b"", state=encode_state((0, None)), library=library) if library else None

    @classmethod
    def of_row(cls, row: Any) -> Snapshot:
        """Return the snapshot with these values, in the order of its fields.

        Raises:
            ValueError, TypeError: If it cannot have them.
        """
        place, chain, state, library = row
        if not (type(place) is int and type(state) is bytes and type(library) is str):
            raise ValueError("a snapshot has other values than a place, a chain, a state and a library")
        return cls(place=place, chain=checked_chain(chain), state=state, library=library)


def checked_chain(value: Any) -> bytes:
    """Return the value if it can be a digest.

    Raises:
        ValueError: If it cannot.
    """
    if type(value) is not bytes or len(value) not in (0, _DIGEST_BYTES):
        raise ValueError(f"a digest of samples is {value!r:.60}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOrigin:
    """What the samples of a lane depend on."""

    source: Any
    """The user's iterable. It is not changed."""
    seed_all: Callable[[int], None]
    """Seeds all generators with a key."""
    info_seed: int
    """Seed in torch's worker info."""
    number: int
    """Number of the lane among those of all sources. Random draws depend on it."""
    lane: int
    """Number of the lane among those of this source."""
    num_lanes: int
    seed: int
    epoch: int
    wraps: bool
    """Whether the lane begins again at its end."""


_TAKEN: Any = object()
_END: Any = object()


class _Read:
    """A sample that was read, and where the lane is after it."""

    __slots__ = ("chain", "digest", "sample", "snapshot")

    def __init__(self, sample: Any, digest: bytes, chain: bytes, snapshot: Snapshot | None) -> None:
        self.sample = sample
        """`_TAKEN` once it was taken, because collation may write to it."""
        self.digest = digest
        self.chain = chain
        self.snapshot = snapshot


class LaneIterator:
    """Reads the samples of one lane in order.

    Before each sample, the generators are seeded with a key of lane and place. So what a source draws from them does
    not depend on where the lane was begun. The *chain* is a digest over all samples up to a place. It shows whether a
    lane that was begun anew gives the same samples as before.

    Samples that were passed over are kept for a while, because requests of a lane may overtake each other.

    Args:
        origin: The lane.
        snapshot: Where to begin. None: at ``place``.
        every: A snapshot is taken at each multiple of this number of samples. 0: never.
        place: Place that the first sample of the iterator counts as.

    Raises:
        ConfigError: If the snapshot cannot be loaded.
    """

    def __init__(self, origin: LaneOrigin, snapshot: Snapshot | None, *, every: int, place: int = 0) -> None:
        self.origin = origin
        self.first_place = place if snapshot is None else snapshot.place
        """Place of the first sample that is kept."""
        self._first_chain = b"" if snapshot is None else snapshot.chain
        self._first_snapshot = snapshot
        """The last snapshot up to `first_place`."""
        self._every = every
        self._has_ended = False
        self._reads: deque[_Read] = deque()
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
    def read_place(self) -> int:
        """Place after the last sample that was read."""
        return self.first_place + len(self._reads)

    def holds(self, place: int, count: int) -> bool:
        """Return whether the samples at some places were not taken, and are kept or come later."""
        return place >= self.first_place and all(read.sample is not _TAKEN for read in self._between(place, count))

    def chain_at(self, place: int) -> bytes:
        """Return the digest of all samples before a place from `first_place` to `read_place`."""
        return self._reads[place - self.first_place - 1].chain if place > self.first_place else self._first_chain

    def snapshot_until(self, place: int) -> Snapshot | None:
        """Return the last snapshot up to a place."""
        reads = list(self._between(self.first_place, place - self.first_place))
        return next((read.snapshot for read in reversed(reads) if read.snapshot is not None), self._first_snapshot)

    def read_until(self, place: int, cancelled: Callable[[], bool] | None = None, *, keep_from: int = 0) -> None:
        """Read samples up to a place of the lane, or to its end.

        Args:
            place: The place.
            cancelled: Returns whether to stop.
            keep_from: Place of the first sample that is kept.

        Raises:
            Cancelled: If ``cancelled()`` was true. What was read stays here.
            ConfigError: If the lane is empty.
        """
        self.forget(keep_from)
        if self.read_place >= place or self._has_ended:
            return
        with self._as_lane():
            while self.read_place < place:
                if cancelled is not None and cancelled():
                    raise Cancelled
                if not self._read():
                    break
                self.forget(keep_from)

    def digests(self, count: int) -> list[bytes]:
        """Return the digests of at most ``count`` of the first samples that are kept."""
        return [read.digest for read in self._between(self.first_place, count)]

    def take(self, place: int, count: int) -> list[Any]:
        """Return at most ``count`` of the samples that were read, from a place on."""
        samples = []
        for read in self._between(place, count):
            samples.append(read.sample)
            read.sample = _TAKEN
        return samples

    def forget(self, place: int) -> None:
        """Keep no sample before a place."""
        while self.first_place < place and self._reads:
            read = self._reads.popleft()
            self.first_place += 1
            self._first_chain, self._first_snapshot = read.chain, read.snapshot or self._first_snapshot

    def go_on_at(self, place: int) -> None:
        """Let the next sample count as the one at a place. Nothing that was read is kept."""
        self._reads.clear()
        self.first_place, self._first_chain, self._first_snapshot = place, b"", None

    def _between(self, place: int, count: int) -> Iterator[_Read]:
        begin = place - self.first_place
        return itertools.islice(self._reads, begin, begin + count)

    def _read(self) -> bool:
        """Read one sample. Return whether there was one."""
        origin, place = self.origin, self.read_place
        origin.seed_all(sample_key(origin.seed, origin.epoch, (origin.number, place), 0))
        sample = next(self._opened, _END)
        if sample is _END and place and origin.wraps:
            self._round += 1
            self._opened = self._open(None)
            sample = next(self._opened, _END)
            if sample is _END:
                raise ConfigError(
                    f"lane {origin.lane} yields nothing when it begins again: "
                    'end="wrap" needs a source that can be iterated more than once'
                )
        if sample is not _END:
            self._note(sample)
            return True
        if not place:
            raise ConfigError(
                f"lane {origin.lane} of {origin.num_lanes} yields nothing: "
                "the source is empty, has fewer shards than there are lanes, or passes over all samples of a lane. "
                "Pass the loader a smaller lanes=, or write more shards. If that is not possible, read the files with "
                "hetero.shards, which needs no lanes"
            )
        self._has_ended = True
        return False

    def _note(self, sample: Any) -> None:
        """Record a sample that was read."""
        # Hash the sample before anyone may change it.
        content = digest(sample)
        chain = blake2b(self.chain_at(self.read_place) + content, digest_size=_DIGEST_BYTES).digest()
        place = self.read_place + 1
        snapshot = None
        if self._every and place % self._every == 0 and self._opened.has_state:
            snapshot = Snapshot(
                place=place,
                chain=chain,
                state=encode_state((self._round, self._opened.state())),
                library=library_of(self.origin.source),
            )
        self._reads.append(_Read(sample, content, chain, snapshot))

    def _open(self, state: Any | None) -> Opened:
        origin = self.origin
        origin.seed_all(sample_key(origin.seed, origin.epoch, (origin.number, -1 - self._round), 0))
        # A lane that begins again has the order of the next epoch.
        epoch = origin.epoch + self._round
        return open_part(origin.source, origin.lane, origin.num_lanes, seed=origin.seed, epoch=epoch, state=state)

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

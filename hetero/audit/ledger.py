"""The ledger of one rank: a record of each batch that it received, as a hash chain in a file that only grows.

The file consists of JSON lines. Each line ends with the value of the hash chain: the hash of the previous line's value
and of the line's text. There are five kinds of line:

- ``{"ledger": 1, ...}``: A process begins to write. The line has the version, job, rank and world size.
- ``{"loader": 0, ...}``: A loader delivers its first batch. The line has facts about the loader, and where it starts.
- ``{"batch": 0, ...}``: Loader 0 delivers a batch. It has an epoch, a position, and digests of indices and content.
- ``{"skip": 200, ...}``: The script passes over batches.
- ``{"end": 99}``: The process closed its ledger after 99 batches.

The kernel receives a batch's line before the script receives the batch, so a killed process loses no line. A process
that finds a ledger of its rank appends to it. This happens after a restart, and when a run is resumed.

The chain shows whether the file was damaged. It also shows whether lines were changed, unless the chain values of all
later lines were computed again. So the chain is not a signature. To protect a ledger, store its last chain value, which
the log contains, in a place that others cannot change.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

from hetero import __version__
from hetero.documents.records import limits
from hetero.epochs import epoch_text

__all__ = [
    "CHAIN_START",
    "DIRECTORY_VARIABLE",
    "FORMAT_VERSION",
    "MAX_LINE_BYTES",
    "BatchEntry",
    "Ledger",
    "LoaderFacts",
    "Writer",
    "chain_value",
    "close_current",
    "current",
    "ledger_name",
    "split_line",
]

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "HETERO_AUDIT_DIR"
"""Environment variable with the folder of the ledgers. Ranks write a ledger only if it is set."""
FORMAT_VERSION = 1
CHAIN_START = bytes(16)
"""Chain value before the first line."""
MAX_LINE_BYTES = 64 * 1024
"""Maximum length of a ledger's line in bytes. A longer line counts as damage."""

_CHAINED = re.compile(rb'(\{.{1,65000}),"chain":"([0-9a-f]{32})"\}')


def ledger_name(rank: int) -> str:
    """Return the file name of a rank's ledger."""
    return f"ledger-rank-{rank}.jsonl"


def chain_value(previous: bytes, body: bytes) -> bytes:
    """Return the chain value after a line.

    Args:
        previous: Chain value before the line.
        body: Text of the line up to its chain value.
    """
    return blake2b(previous + body, digest_size=16, person=b"hetero.chain").digest()


def split_line(line: bytes) -> tuple[bytes, bytes] | None:
    """Return a line's text up to its chain value, and the chain value. Return None if it is not a ledger's line."""
    found = _CHAINED.fullmatch(line)
    return None if found is None else (found[1], bytes.fromhex(found[2].decode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The rank that writes a ledger."""

    job: str
    """Id of the job. Empty without a launcher."""
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """The data that a loader reads, and their order. Loaders with equal facts deliver the same batches."""

    name: str
    dataset: str
    """Registered name of the data set, or the class of a data set object."""
    arguments: str
    """Hexadecimal digest of the data set's arguments. The arguments themselves may be secret."""
    fingerprint: str | None
    """Fingerprint of the data set's content. None if it is unknown."""
    num_samples: int | None
    """Length of the data set. None for a user's sampler."""
    seed: int = field(metadata=limits(minimum=-math.inf, maximum=math.inf))
    global_batch: int | None
    """Samples per step over all ranks. None for a user's batch sampler."""
    order: str
    """See `hetero.loaders.state.LoaderState.order`."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Facts that identify a loader in another process of the run: all but the data set's fingerprint and length."""
        parts = (self.name, self.dataset, self.arguments, self.seed, self.global_batch, self.order)
        return tuple(map(str, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEntry:
    """One delivered batch."""

    epoch: int
    position: int
    """Position of the global batch in the epoch."""
    size: int
    """Number of samples."""
    indices: bytes
    """16-byte digest of the indices in order, see `hetero.batches.indexed`."""
    samples: bytes
    """16-byte sum of a hash of each index. It does not depend on the order.

    The sums of all ranks add up to the sum of the global batch.
    """
    content: bytes
    """16-byte digest of the batch that the script received."""
    by_source: Mapping[str, int] | None = None
    """Samples of each source of a `hetero.Mixture`. None without one."""


class Ledger:
    """Appends to the ledger of one rank. Thread-safe. Does not raise errors of the file system.

    If a line cannot be written, the ledger logs the first such error, counts the lost batches, and training goes on.

    Args:
        directory: Folder of the ledger. Created if missing.
        writer: The rank that writes.
    """

    def __init__(self, directory: Path, writer: Writer) -> None:
        self.path = directory / ledger_name(writer.rank)
        self.num_batches = 0
        """Number of batches that this process wrote."""
        self.num_lost = 0
        """Number of batches that this process could not write."""
        self._lock = threading.Lock()
        self._numbers: dict[LoaderFacts, int] = {}
        """Number of each loader in this ledger, by its facts."""
        self._descriptor: int | None = None
        """The open file. None if it could not be opened or written, and after `close`."""
        self._size = 0
        """Size of the file in bytes."""
        self._chain = CHAIN_START
        """Chain value of the last line."""
        self._is_closed = False
        self._has_given_up = False
        try:
            self._open()
        except OSError as error:
            self._give_up(f"cannot be opened: {error.strerror or error}", "no batch of this process is in it")
        else:
            self._append({"ledger": FORMAT_VERSION, "hetero": __version__, **asdict(writer)}, place="the beginning")

    def add(self, loader: LoaderFacts, entry: BatchEntry) -> None:
        """Append a batch that ``loader`` is about to deliver."""
        place = f"loader {loader.name}, epoch {epoch_text(entry.epoch)}, position {entry.position}"
        with self._lock:
            number = self._numbers.get(loader)
            if number is None:
                number = self._numbers[loader] = len(self._numbers)
                # Describe each loader once. The line of a batch then needs only the number of the loader. Also state
                # where the loader starts, because a resumed run does not start at the first batch.
                start = {"epoch": entry.epoch, "position": entry.position}
                self._append({"loader": number, **asdict(loader), **start}, place)
            is_written = self._append(
                {
                    "batch": number,
                    "epoch": entry.epoch,
                    "position": entry.position,
                    "size": entry.size,
                    "indices": entry.indices.hex(),
                    "samples": entry.samples.hex(),
                    "content": entry.content.hex(),
                    **({} if entry.by_source is None else {"sources": dict(entry.by_source)}),
                },
                place,
            )
            self.num_batches += is_written
            self.num_lost += not is_written

    def skip(self, name: str, epoch: int, position: int, num_batches: int) -> None:
        """Append that the script passes over the last ``num_batches`` batches before a position of a loader."""
        with self._lock:
            place = f"loader {name}, epoch {epoch_text(epoch)}, position {position}"
            self._append({"skip": num_batches, "name": name, "epoch": epoch, "position": position}, place)

    def give_up(self, why: str, what: str) -> None:
        """End the ledger here and log the reason, for example if a digest of a batch cannot be computed.

        Args:
            why: Reason for the log, for example ``has no digest of ...``.
            what: Description of the batches that are missing from here on.
        """
        with self._lock:
            self.num_lost += 1
            self._give_up(why, what)

    def close(self) -> None:
        """Write the last line and log the number of batches. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self.num_lost:
                logger.error("the ledger %s lacks %d batches; it has %d", self.path, self.num_lost, self.num_batches)
            if self._descriptor is None:
                return
            # Write a last line, because the chain alone does not show that its last lines were cut off.
            if self._append({"end": self.num_batches}, place="the end"):
                logger.info("ledger %s: %d batches, chain %s", self.path, self.num_batches, self._chain.hex())
            self._release()

    def abandon(self) -> None:
        """Close the file without a last line or a log message, in a forked process. The parent goes on writing it."""
        self._release()

    def _open(self) -> None:
        """Open and lock the file, and continue after its last complete line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError("another process is writing it") from None
            except OSError as error:
                # The file system lacks locks, so go on without one.
                logger.info("ledger %s: cannot be locked (%s)", self.path, error)
            self._size, self._chain = _resume(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _append(self, entry: dict[str, object], place: str) -> bool:
        """Write one line and return whether this succeeded."""
        if self._descriptor is None:
            return False
        # Cut off the closing bracket, because the chain value is the last key of the line.
        body = json.dumps(entry, separators=(",", ":")).encode()[:-1]
        value = chain_value(self._chain, body)
        line = b'%b,"chain":"%b"}\n' % (body, value.hex().encode())
        try:
            # Write without a buffer, in the thread that delivers. If the process is killed, a queue for another thread
            # would be lost.
            written = os.write(self._descriptor, line)
            # A short write means that the disk is full. The system would report the error only at the next write.
            if written < len(line):
                raise OSError("no space left")
        except OSError as error:
            with contextlib.suppress(OSError):
                # A full disk may have taken a part of the line. Without the cut, the next process would find a damaged
                # line.
                os.ftruncate(self._descriptor, self._size)
            self._give_up(f"cannot be written: {error.strerror or error}", f"it ends before {place}")
            return False
        self._size += len(line)
        self._chain = value
        return True

    def _give_up(self, why: str, what: str) -> None:
        """Log the first reason and close the file. Later batches are only counted as lost."""
        if not self._has_given_up:
            logger.error("the ledger %s %s; %s, and training continues", self.path, why, what)
        self._has_given_up = True
        self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _resume(descriptor: int) -> tuple[int, bytes]:
    """Prepare an existing file for further lines. Return its size and the chain value of its last line.

    If a killed process left an incomplete last line, this line is cut off. If no line remains, the results are 0 and
    `CHAIN_START`.

    Raises:
        OSError: If the file is not a ledger, or if its last complete line is damaged.
    """
    size = os.fstat(descriptor).st_size
    # Read enough for an incomplete last line and the complete line before it.
    start = max(0, size - 2 * MAX_LINE_BYTES)
    tail = os.pread(descriptor, size - start, start)
    # End of the last complete line in `tail`, 0 without a complete line.
    end = tail.rfind(b"\n") + 1
    # Without a complete line, the file must be empty, or a part of a ledger's first line. Do not cut other files. Both
    # are shorter than one line, so `start` is 0. A part may even be shorter than {"ledger":, which begins every ledger.
    if end == 0 and (start or (tail and not b'{"ledger":'.startswith(tail[:10]))):
        raise OSError("the file exists and is not a ledger")
    if end < len(tail):
        os.ftruncate(descriptor, start + end)
    if end == 0:
        return 0, CHAIN_START
    last = split_line(tail[tail.rfind(b"\n", 0, end - 1) + 1 : end - 1])
    if last is None:
        raise OSError("its last line is damaged; move the file away to begin a new one")
    return start + end, last[1]


_current: Ledger | None = None
_current_directory = ""
_current_lock = threading.Lock()


def current(identify: Callable[[], Writer]) -> Ledger | None:
    """Return this process's ledger, or None if `DIRECTORY_VARIABLE` is not set. The first call opens the ledger.

    Args:
        identify: Returns the rank that writes. Called when the ledger is opened.
    """
    global _current, _current_directory
    directory = os.environ.get(DIRECTORY_VARIABLE, "")
    # Test before taking the lock, because this function runs for each batch. Without a ledger, a call takes 0.7 us.
    if directory == _current_directory:
        return _current
    with _current_lock:
        if directory != _current_directory:
            if _current is not None:
                _current.close()
            _current = Ledger(Path(directory), identify()) if directory else None
            _current_directory = directory
    return _current


def close_current() -> None:
    """Close this process's ledger, if it has one. Batches that are delivered later begin a new section."""
    global _current, _current_directory
    with _current_lock:
        if _current is not None:
            _current.close()
        _current, _current_directory = None, ""


def _after_fork_in_child() -> None:
    """Forget the ledger in a forked process, because only the parent may write it."""
    global _current, _current_directory, _current_lock
    # Another thread may have held the lock when the process forked.
    _current_lock = threading.Lock()
    if _current is not None:
        _current.abandon()
    _current, _current_directory = None, ""


atexit.register(close_current)
os.register_at_fork(after_in_child=_after_fork_in_child)

"""The kept samples of one fingerprint, in the files of one folder.

The file ``index`` has a slot for each sample. The slot contains where the sample's entry lies: segment, offset and
size. Each process appends entries to its own segment (``data-N``), and reads entries of all segments. A slot is written
after its entry. Reading and writing need no lock, because each entry has a digest. If a slot points to other bytes than
the wanted sample, these bytes are rejected.

Files are read with system calls and not mapped, because a process that reads a mapped file dies if the file shrinks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from typing import Any

from hetero.cache.entries import DamagedEntryError, EncodedSample, read_entry
from hetero.cache.folders import INDEX, RESERVE, SharedFolder, folder_bytes, lock, remove_unused
from hetero.documents.quantities import bytes_text

__all__ = ["ABSENT", "SampleStore"]

ABSENT = object()
"""Result for a sample that is not kept."""

_SLOT = struct.Struct("<IIQ")
_CHUNK_BYTES = 4 * 2**20
"""Largest number of bytes that a process reserves at once for its next entries."""
_MAX_OPEN = 64
"""Largest number of segments that a process keeps open for reading."""


class SampleStore:
    """Samples of one fingerprint. Processes share the files. One object is for one process and one thread at a time.

    Args:
        folder: The folder.
        fingerprint: What the samples depend on.
        num_samples: Indices are in ``[0, num_samples)``.
        max_bytes: Bound on the files of the data set, over all its fingerprints.
        free_share: Share of the file system that stays free.

    Raises:
        OSError: If the files cannot be opened.
    """

    def __init__(
        self, folder: SharedFolder, fingerprint: bytes, num_samples: int, *, max_bytes: int, free_share: float
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._num_samples = num_samples
        self._max_bytes = max_bytes
        self._free_share = free_share
        self._index = os.open(folder.path / INDEX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        """Descriptor of the file with a slot for each sample. The slot says where the entry of the sample is."""
        self._open_segments: dict[int, int] = {}
        """Descriptors of the segments that are open for reading, by number, the least recently used first."""
        self._own: _OwnSegment | None = None
        """The segment that this process appends to. None before the first sample is kept."""
        self.why_full = ""
        """Why another sample does not fit. Empty if it fits."""
        self.num_damaged = 0
        """Number of damaged entries that were read."""

    def get(self, index: int) -> Any:
        """Return a kept sample in new memory, or `ABSENT`. ``index`` is in ``[0, num_samples)``."""
        try:
            slot = os.pread(self._index, _SLOT.size, _SLOT.size * index)
            # The file may end before the slot of a sample that was never kept.
            if len(slot) < _SLOT.size:
                return ABSENT
            # The slot has the number of the segment plus 1. A slot that was never written has only
            # zeros, so it has no segment.
            segment_plus_1, nbytes, offset = _SLOT.unpack(slot)
            if not segment_plus_1:
                return ABSENT
            descriptor = self._segment(segment_plus_1 - 1)
            return read_entry(descriptor, offset, nbytes, index=index, fingerprint=self._fingerprint)
        except (DamagedEntryError, FileNotFoundError):
            self.num_damaged += 1
        except (OSError, OverflowError):
            pass  # the disk has failed, or all descriptors are in use: the user's code loads the sample
        return ABSENT

    def put(self, index: int, sample: EncodedSample) -> bool:
        """Keep a sample. Return whether there was room for it."""
        # Once a sample did not fit, no other sample is kept, because each attempt looks at all files.
        if self.why_full:
            return False
        try:
            own = self._own
            # After a fork, the child begins its own segment. Otherwise both processes would append at the same place.
            if own is None or own.pid != os.getpid():
                own = self._own = self._begin_segment()
            if own.end + sample.nbytes > own.reserved:
                self._reserve(own, sample.nbytes)
            _write(own.descriptor, sample.pieces, own.end)
            # Write the slot after the entry. If the slot came first, a reader would find a damaged sample. The slot has
            # the number of the segment plus 1, because a slot that was never written has only zeros.
            os.pwrite(self._index, _SLOT.pack(own.number + 1, sample.nbytes, own.end), _SLOT.size * index)
        except (OSError, OverflowError) as error:
            self.why_full = f"{self._folder.parent}: {error}"
            return False
        own.end += sample.nbytes
        return True

    def close(self) -> None:
        """Close the files."""
        own = self._own
        if own is not None and own.pid == os.getpid():
            with contextlib.suppress(OSError):
                # Give back the bytes that were reserved but not used.
                os.ftruncate(own.descriptor, own.end)
            os.close(own.descriptor)
        for descriptor in (self._index, *self._open_segments.values()):
            os.close(descriptor)
        self._folder.close()

    def _segment(self, number: int) -> int:
        """Return the descriptor of a segment for reading. Close the least recently used one if too many are open."""
        descriptor = self._open_segments.pop(number, None)
        if descriptor is None:
            path = self._folder.path / f"data-{number}"
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        # Put the descriptor at the end of the dictionary, which is in the order of use.
        self._open_segments[number] = descriptor
        if len(self._open_segments) > _MAX_OPEN:
            os.close(self._open_segments.pop(next(iter(self._open_segments))))
        return descriptor

    def _begin_segment(self) -> _OwnSegment:
        """Make the segment of this process."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.scandir(self._folder.path) as entries:
            # Begin with the number of segments that exist, because their names are taken.
            number = sum(entry.name.startswith("data-") for entry in entries)
        while True:
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(self._folder.path / f"data-{number}", flags, 0o600)
                break
            number += 1
        return _OwnSegment(number, descriptor)

    def _reserve(self, own: _OwnSegment, nbytes: int) -> None:
        """Reserve bytes at the end of the own segment.

        Raises:
            OSError: If the bound is reached.
        """
        with self._reserving():
            # Double the segment, up to `_CHUNK_BYTES` at once. So a data set with few samples reserves little, and the
            # lock is seldom needed.
            num_reserved = max(nbytes, min(_CHUNK_BYTES, own.end))
            # Near the bound, there may still be room for this one entry.
            if self._why_no_room(num_reserved):
                num_reserved = nbytes
                if why_not := self._why_no_room(num_reserved):
                    raise OSError(why_not)
            os.ftruncate(own.descriptor, own.end + num_reserved)
            own.reserved = own.end + num_reserved

    def _why_no_room(self, wanted: int) -> str:
        """Return why ``wanted`` further bytes do not fit, empty if they fit.

        Remove samples of other fingerprints first if that is needed to make room.
        """
        parent = self._folder.parent
        used = sum(folder_bytes(path) for path in parent.iterdir() if path.is_dir())
        # Bytes that must be removed to stay below the data set's bound, and to keep a share of the disk free. A
        # negative number means that there is room.
        excess_of_dataset = used + wanted - self._max_bytes
        disk = shutil.disk_usage(parent)
        excess_on_disk = int(wanted + self._free_share * disk.total - disk.free)
        if max(excess_of_dataset, excess_on_disk) > 0:
            excess_of_dataset -= remove_unused(parent, enough=max(excess_of_dataset, excess_on_disk))
            disk = shutil.disk_usage(parent)
        if excess_of_dataset > 0:
            return f"the bound of {bytes_text(self._max_bytes)} is reached"
        if disk.free - wanted < self._free_share * disk.total:
            return f"{bytes_text(disk.free)} of {bytes_text(disk.total)} are free, and {self._free_share:.0%} stay free"
        return ""

    @contextlib.contextmanager
    def _reserving(self) -> Iterator[None]:
        """Return a context in which only one process at a time can reserve bytes."""
        path = self._folder.parent / RESERVE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            lock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # Unlock explicitly. Another thread may have forked a process in the meantime, and that process has the
            # descriptor too, so closing it here would not unlock the file.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


class _OwnSegment:
    """The segment that this process appends to."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.pid = os.getpid()
        """The process that appends to the segment. A child of this process has another id and makes its own segment."""
        self.number = number
        self.descriptor = descriptor
        self.end = 0
        """Bytes of the entries in the segment."""
        self.reserved = 0
        """Bytes of the segment's file. The bytes after `end` are for the next entries."""


def _write(descriptor: int, pieces: list[Any], offset: int) -> None:
    """Write buffers one after the other.

    Raises:
        OSError: If the disk is full.
    """
    # memoryview cannot cast empty buffers.
    left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while left:
        # One call may have at most SC_IOV_MAX buffers.
        written = os.pwritev(descriptor, left[: os.sysconf("SC_IOV_MAX")], offset)
        offset += written
        # The call may write a part of the buffers. Drop the buffers that were written, and cut the next one.
        while left and written >= len(left[0]):
            written -= len(left[0])
            del left[0]
        if written:
            left[0] = left[0][written:]

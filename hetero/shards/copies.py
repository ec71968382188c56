"""Copies of shards on this host: parts of files of a store, and the content of compressed files.

All processes of the user share one folder, so a host downloads and decompresses each shard once.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from hetero.errors import ConfigError
from hetero.shards.files import END_BYTES, ShardFile, digest_of_ends, is_compressed, open_content
from hetero.shards.index import ShardRecord
from hetero.shards.stores import facts_of, is_url, read_ranges

__all__ = ["Scratch", "problems_of"]

_PIECE_BYTES = 8 * 2**20
"""What one request to a store asks for. Amazon's performance guidelines for S3 name 8 and 16 MB as usual.
From a store with 30 ms per request, 240 rows of 100 kB took 0.66 s in such pieces, and 7.2 s with a request per row."""


class Scratch:
    """The folder of the copies.

    Args:
        folder: The folder. It is made when it is needed.
        max_bytes: Size of all files in it. The ones that were opened longest ago are removed.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        """Size of all files in the folder."""

    def open(self, path: str, record: ShardRecord, content_bytes: int) -> ShardFile:
        """Return the content of a shard, after a comparison with its index.

        Args:
            path: Path or URL of the shard.
            record: What the index knows of it.
            content_bytes: Length of its content, if it is compressed.

        Raises:
            ConfigError: If the shard has changed, or the folder belongs to another user.
        """
        if not is_url(path) and not is_compressed(path):
            _compare(path, record, facts_of(path).size, digest_of_ends(path))
            return ShardFile(path)
        self.make_folder()
        name = xxhash.xxh3_64_hexdigest(f"{path} {record.size} {record.digest}".encode())
        if is_url(path):
            copy = self._remote_copy(path, record, self._folder / f"{name}-{os.path.basename(path)}.copy")
            if not is_compressed(path):
                return copy
            copy.fetch(0, record.size)
            return ShardFile(self._content(copy.path.removesuffix(".copy"), copy.path, name, content_bytes))
        _compare(path, record, facts_of(path).size, digest_of_ends(path))
        return ShardFile(self._content(path, path, name, content_bytes))

    def _remote_copy(self, path: str, record: ShardRecord, target: Path) -> _RemoteFile:
        """Return the copy of a shard of a store. The first process of the host compares it with the index."""
        pieces = target.with_suffix(".pieces")
        with self._locked():
            if not pieces.exists():
                self._make_room(record.size)
                with target.open("wb") as file:
                    file.truncate(record.size)
                unfinished = target.with_suffix(".unfinished")
                unfinished.write_bytes(bytes(-(-record.size // _PIECE_BYTES)))
                size = facts_of(path).size
                if size != record.size:
                    _compare(path, record, size, "")
                copy = _RemoteFile(path, str(target), str(unfinished))
                copy.fetch(0, min(END_BYTES, size))
                copy.fetch(max(0, size - END_BYTES), size)
                _compare(path, record, size, digest_of_ends(str(target)))
                # The file appears when the comparison was successful.
                unfinished.replace(pieces)
            _note_opened(target)
        return _RemoteFile(path, str(target), str(pieces))

    def _content(self, name_of_packed: str, packed: str, name: str, size: int) -> str:
        """Return a file with the content of a compressed one.

        Args:
            name_of_packed: A name with the ending that says how the file is compressed.
            packed: The file.
            name: Name of the content in the folder.
            size: Length of the content.
        """
        target = self._folder / f"{name}.content"
        with self._locked():
            if not target.exists():
                self._make_room(size)
                temporary = self._folder / "unfinished.content"
                with open_content(packed, name=name_of_packed) as source, temporary.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                if temporary.stat().st_size != size:
                    raise ConfigError(f"the content of {packed} has {temporary.stat().st_size} bytes, expected {size}")
                temporary.replace(target)
            _note_opened(target)
        return str(target)

    def make_folder(self) -> Path:
        """Make the folder, and return it.

        Raises:
            ConfigError: If it belongs to another user.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self._folder.stat()
        # Another user could put samples of his own into it.
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ConfigError(f"{self._folder} can be written by other users; name another folder with scratch=")
        return self._folder

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes out, because each removes files of others."""
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, size: int) -> None:
        """Remove the copies that were opened longest ago until there is room for one more."""
        # A process that has a removed file open can still use it. A copy of a part of a file has holes.
        copies: list[tuple[int, int, Path]] = []
        # The folders in it are those of `Rows.hetero_read_cold`. A process that was killed has left its own.
        for pattern in ("*.copy", "*.content", "cold-*/*.copy", "cold-*/*.content"):
            for name in glob.glob(pattern, root_dir=self._folder):  # ignores a folder that vanishes, as `Path` does not
                file = self._folder / name
                with contextlib.suppress(FileNotFoundError):  # another process has removed its folder
                    copies.append((_opened_ns(file), file.stat().st_blocks * 512, file))
        total = size + sum(nbytes for _, nbytes, _ in copies)
        for _, nbytes, file in sorted(copies):
            if total <= self.max_bytes:
                return
            total -= nbytes
            for each in (file.with_suffix(".pieces"), file.with_suffix(".opened"), file):
                each.unlink(missing_ok=True)


def problems_of(paths: Sequence[str], records: Sequence[ShardRecord]) -> list[str]:
    """Return a text if shards are missing, or are not those that were indexed. Reads only shards with another time."""

    def problem(path: str, record: ShardRecord) -> str:
        try:
            facts = facts_of(path)
            if (facts.size, facts.mark) != (record.size, record.mark):
                _compare(path, record, facts.size, digest_of_ends(path))
        except (ConfigError, OSError) as error:
            return ". ".join(line.strip() for line in str(error).splitlines())
        return ""

    # A store answers many requests at the same time.
    with ThreadPoolExecutor() as pool:
        problems = list(filter(None, pool.map(problem, paths, records)))
    return [f"{len(problems)} of {len(paths)} shards cannot be used. The first: {problems[0]}"] if problems else []


def _note_opened(file: Path) -> None:
    """Note that a copy is used. Its own times stay, because processes that have it open compare them."""
    file.with_suffix(".opened").touch()


def _opened_ns(file: Path) -> int:
    """Return when a copy was used last."""
    note = file.with_suffix(".opened")
    return (note if note.exists() else file).stat().st_mtime_ns


class _RemoteFile(ShardFile):
    """A copy of a shard of a store. Only some of its pieces are filled in.

    Args:
        url: The shard.
        path: The copy. It has the length of the shard.
        pieces: A file with one byte for each piece. It is 1 if the copy has the piece.
    """

    def __init__(self, url: str, path: str, pieces: str) -> None:
        super().__init__(path, flags=os.O_RDWR)
        self._url = url
        self._pieces = os.open(pieces, os.O_RDWR | os.O_CLOEXEC)

    def check(self) -> None:
        """Do nothing, because other processes of the host fill in pieces."""

    def fetch(self, begin: int, end: int) -> None:
        """Fill in the bytes ``[begin, end)``, if the copy lacks them.

        Raises:
            OSError: If the store does not give them.
        """
        first, last = begin // _PIECE_BYTES, -(-end // _PIECE_BYTES)
        if self._has(first, last):
            return
        # Another process may be fetching the same pieces.
        fcntl.flock(self._pieces, fcntl.LOCK_EX)
        try:
            state = os.pread(self._pieces, last - first, first)
            missing = [number for number, is_there in enumerate(state, first) if not is_there]
            ranges = [(number * _PIECE_BYTES, min((number + 1) * _PIECE_BYTES, self.size)) for number in missing]
            for number, (start, _), content in zip(missing, ranges, read_ranges(self._url, ranges), strict=True):
                os.pwrite(self._descriptor, content, start)
                os.pwrite(self._pieces, b"\1", number)
        finally:
            fcntl.flock(self._pieces, fcntl.LOCK_UN)

    def _has(self, first: int, last: int) -> bool:
        return all(os.pread(self._pieces, last - first, first))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._pieces)
        super().__del__()


def _compare(path: str, record: ShardRecord, size: int, digest: str) -> None:
    """Raise an error if a shard is not the one that was indexed."""
    if (size, digest) == (record.size, record.digest):
        return
    found = f"{size} bytes, expected {record.size}" if size != record.size else "other bytes at its ends"
    raise ConfigError(
        f"shard {path} has changed since it was indexed: it has {found}\n"
        "  Copy it again, or run hetero index again and start the training anew."
    )

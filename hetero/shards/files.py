"""Finds the files of a data set, and reads bytes of them."""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

import xxhash

from hetero.errors import ConfigError
from hetero.shards.stores import is_url, matches_of, open_binary

__all__ = [
    "END_BYTES",
    "INDEX_NAME",
    "ShardFile",
    "base_of",
    "digest_of_ends",
    "expand",
    "is_compressed",
    "open_content",
    "patterns_of",
]

INDEX_NAME = "hetero-index.npz"
"""File name of an index beside its shards."""
END_BYTES = 64 * 1024
"""Bytes at each end of a file that its digest covers."""
_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")
_STORE_PARTS = 3
"""Parts of a URL, divided at slashes, that name the store: ``s3:``, an empty one, and the bucket."""
_COMPRESSED = (".gz", ".zst")


class ShardFile:
    """The content of a shard on this host. Reads at positions, so processes that were forked may share it.

    Args:
        path: The file with the content.
        flags: Mode of opening it, as in `os.open`.

    Raises:
        OSError: If the file cannot be opened.
    """

    def __init__(self, path: str, *, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self._descriptor = os.open(path, flags | os.O_CLOEXEC)
        self._opened = self._stat()

    @property
    def size(self) -> int:
        """Length of the content in bytes."""
        return self._opened[0]

    def check(self) -> None:
        """Check that the file is the same as when it was opened.

        Raises:
            ValueError: If it was written to.
        """
        if self._stat() != self._opened:
            raise ValueError("the file has changed while it was open; replace files by renaming new ones")

    def fetch(self, begin: int, end: int) -> None:
        """Copy the bytes ``[begin, end)`` to this host, if the file is only a part of one of a store."""

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes ``[begin, end)``.

        Raises:
            ValueError: If the file ends earlier.
        """
        if not 0 <= begin <= end <= self.size:
            raise ValueError(f"bytes {begin} to {end} are not in the file, which has {self.size}")
        content = os.pread(self._descriptor, end - begin, begin)
        # The kernel reads at most 2 GiB at once.
        while len(content) < end - begin:
            more = os.pread(self._descriptor, end - begin - len(content), begin + len(content))
            if not more:
                raise ValueError(f"the file ends at byte {begin + len(content)}, expected {end}")
            content += more
        return content

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def __del__(self) -> None:
        # An error of the constructor leaves the object without a descriptor.
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._descriptor)


def expand(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the absolute paths and URLs that a user's argument names.

    Args:
        files: A path, or a list of paths. A path may have the wildcards of `glob`, and numbers as in
            ``train-{000..146}.tar``. Paths that wildcards match are sorted. An index does not match.

    Raises:
        ConfigError: If a path matches no file, or a file is named twice.
    """
    found: dict[str, str] = {}
    for path in patterns_of(files):
        # If a path exists, brackets in its name are not a pattern.
        is_pattern = glob.has_magic(path) and (is_url(path) or not os.path.exists(path))
        matches = matches_of(path) if is_pattern else [path]
        matches = [match for match in matches if os.path.basename(match) != INDEX_NAME]
        if not matches:
            raise ConfigError(f"no file matches {path}; expected the paths of shards, or a pattern such as *.tar")
        for match in matches:
            real = match if is_url(match) else os.path.realpath(match)
            if real in found:
                raise ConfigError(
                    f"shard {match} is named twice, so its rows would come twice; the first name is {found[real]}"
                )
            found[real] = match
    if not found:
        raise ConfigError("the list of shards is empty; expected at least one file")
    return list(found.values())


def patterns_of(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Iterator[str]:
    """Yield the absolute paths, URLs and patterns of `glob` in a user's argument, see `expand`."""
    for pattern in [files] if isinstance(files, str | os.PathLike) else files:
        pattern = os.fspath(pattern)
        yield from _numbered(pattern if is_url(pattern) else os.path.abspath(pattern))


def base_of(paths: Sequence[str]) -> str:
    """Return the folder that all files have in common, as a path or URL.

    Raises:
        ConfigError: If they lie in several stores.
    """
    folders = [path.split("/")[:-1] for path in paths]
    common = folders[0]
    for folder in folders[1:]:
        length = min(len(common), len(folder))
        common = common[: next((at for at in range(length) if common[at] != folder[at]), length)]
    if not common or (is_url(paths[0]) and len(common) < _STORE_PARTS):
        raise ConfigError("the shards have no folder in common. Name their index with index= or --output")
    return "/".join(common)


def digest_of_ends(path: str) -> str:
    """Return a digest of the length, the first and the last bytes of a file. A changed file nearly always has another.

    Raises:
        OSError: If the file cannot be read.
    """
    with open_binary(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        hasher = xxhash.xxh3_64(f"{size} ".encode())
        hasher.update(file.read(END_BYTES))
        file.seek(max(0, size - END_BYTES))
        hasher.update(file.read(END_BYTES))
    return hasher.hexdigest()


def is_compressed(path: str) -> bool:
    """Return whether a file is compressed as a whole, by the ending of its name."""
    return path.lower().endswith(_COMPRESSED)


@contextlib.contextmanager
def open_content(path: str, *, name: str | None = None) -> Iterator[IO[bytes]]:
    """Return a context with the content of a file, from its beginning, whether it is compressed or not.

    Reading raises `EOFError` or `OSError` if a compressed file is cut off or damaged.

    Args:
        path: Path or URL.
        name: Name whose ending says how the file is compressed. None for the path.
    """
    name = (name or path).lower()
    with open_binary(path) as file:
        if name.endswith(".gz"):
            yield cast("IO[bytes]", gzip.GzipFile(fileobj=file, mode="rb"))
        elif is_compressed(name):
            content = _ZstdContent(file)
            yield io.BufferedReader(content, content.output_bytes)
        else:
            yield file


class _ZstdContent(io.RawIOBase):
    """The content of a file in zstd. Programs that compress in parallel write many frames into one file.

    The reader of the package ``zstandard`` takes a file that was cut off for a whole one.
    """

    def __init__(self, file: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError("files in zstd need the package zstandard: pip install hetero[compression]") from error
        self._new_frame: Any = zstandard.ZstdDecompressor().decompressobj
        self._error: Any = zstandard.ZstdError
        self._input_bytes: int = zstandard.DECOMPRESSION_RECOMMENDED_INPUT_SIZE
        self.output_bytes: int = zstandard.DECOMPRESSION_RECOMMENDED_OUTPUT_SIZE
        self._file = file
        self._frame: Any = None
        self._content = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            is_between = self._frame is None or self._frame.eof
            # What follows the end of a frame is the beginning of the next one.
            packed = self._frame.unused_data if self._frame is not None and is_between else b""
            packed = packed or self._file.read(self._input_bytes)
            if not packed:
                if not is_between:
                    raise EOFError("the compressed file ends within a frame")
                return 0
            if is_between:
                self._frame = self._new_frame()
            try:
                self._content = self._frame.decompress(packed)
            except self._error as error:
                raise OSError(f"the compressed file is damaged: {error}") from error
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


def _numbered(pattern: str) -> Iterator[str]:
    """Yield the paths of a pattern with numbers: ``a-{08..10}`` is a-08, a-09 and a-10."""
    match = _NUMBERS.search(pattern)
    if match is None:
        yield pattern
        return
    first, last = match.groups()
    if int(first) > int(last):
        raise ConfigError(f"{match.group()} in {pattern} has no numbers, because the first one is the larger one")
    for number in range(int(first), int(last) + 1):
        yield from _numbered(f"{pattern[: match.start()]}{number:0{len(first)}d}{pattern[match.end() :]}")

"""Reads and writes files by path or by URL. URLs are read with fsspec, and with the package of their store."""

from __future__ import annotations

import glob
import os
from typing import IO, Any, NamedTuple, cast

from hetero.errors import ConfigError

__all__ = [
    "Facts",
    "exists",
    "facts_of",
    "is_url",
    "matches_of",
    "open_binary",
    "read_ranges",
    "write_file",
]


class Facts(NamedTuple):
    """What is known of a file without reading it."""

    size: int
    mark: str
    """A text that is different after the file was written again: its time, or the store's tag."""


def is_url(path: str) -> bool:
    """Return whether a path names a file of a store, such as ``s3://bucket/name``."""
    return "://" in path


def _filesystem_of(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. Credentials and endpoints come from fsspec's configuration.

    Raises:
        ConfigError: If a package is missing.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"{url} needs the package fsspec: pip install hetero[remote]") from error
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url} cannot be read: {error}") from error
    return system, path


def matches_of(pattern: str) -> list[str]:
    """Return the paths or URLs that a pattern with wildcards matches, sorted."""
    if not is_url(pattern):
        return sorted(glob.glob(pattern, recursive=True))
    system, path = _filesystem_of(pattern)
    return sorted(str(system.unstrip_protocol(each)) for each in system.glob(path))


def exists(path: str) -> bool:
    """Return whether there is a file."""
    if not is_url(path):
        return os.path.exists(path)
    system, name = _filesystem_of(path)
    return bool(system.exists(name))


def facts_of(path: str) -> Facts:
    """Return what is known of a file.

    Raises:
        ConfigError: If the file is missing, or cannot be read.
    """
    try:
        if not is_url(path):
            stat = os.stat(path)
            return Facts(stat.st_size, str(stat.st_mtime_ns))
        system, name = _filesystem_of(path)
        info = system.info(name)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    # The packages of stores use different names.
    names = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
    return Facts(int(info["size"]), str(next((info[name] for name in names if name in info), "")))


def open_binary(path: str) -> IO[bytes]:
    """Open a file for reading at any position."""
    if not is_url(path):
        return open(path, "rb")
    system, name = _filesystem_of(path)
    return cast("IO[bytes]", system.open(name, "rb"))


def read_ranges(path: str, ranges: list[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of several ranges of a file of a store. The requests are in flight at the same time.

    Raises:
        OSError: If one of them fails.
    """
    system, name = _filesystem_of(path)
    begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
    found: list[bytes] = system.cat_ranges([name] * len(ranges), begins, ends, on_error="raise")
    for content, (begin, end) in zip(found, ranges, strict=True):
        if len(content) != end - begin:
            raise OSError(f"{path} gave {len(content)} bytes from byte {begin} on, expected {end - begin}")
    return found


def write_file(path: str, content: bytes) -> None:
    """Write a small file. A reader sees the whole file or the one before it.

    Raises:
        OSError: If it cannot be written.
    """
    if is_url(path):
        system, name = _filesystem_of(path)
        system.pipe_file(name, content)
        return
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise

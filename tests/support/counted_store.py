"""The local files as a store of fsspec, which notes each request in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["LOG", "CountedFileSystem", "num_read_bytes", "register"]

LOG = "HETERO_TEST_REQUESTS"
"""Environment variable with the path of the file. Each line is ``list PATTERN`` or ``get BYTES FILE``."""


class CountedFileSystem(LocalFileSystem):  # type: ignore[misc]
    """URLs are ``counted://PATH``."""

    protocol = "counted"
    delay_s = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(path.removeprefix("counted://")))

    def unstrip_protocol(self, name: str) -> str:
        return f"counted://{name}"

    def glob(self, path: str, **options: Any) -> Any:
        _note("list", path)
        return super().glob(path, **options)

    def cat_ranges(self, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
        time.sleep(self.delay_s)
        for path, start, end in zip(paths, starts, ends, strict=True):
            _note(f"get {end - start}", path)
        return super().cat_ranges(paths, starts, ends, **options)


def register() -> None:
    """Let fsspec open the URLs of this store in this process."""
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)


def num_read_bytes() -> int:
    """Return the bytes of all requests so far."""
    lines = Path(os.environ[LOG]).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("get "))


def _note(what: str, path: str) -> None:
    with Path(os.environ[LOG]).open("a") as log:
        log.write(f"{what} {Path(path).name}\n")

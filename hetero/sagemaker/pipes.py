"""Pipe mode: a channel's data as the platform streams it, through one FIFO per epoch.

The FIFO of an epoch is there before the one before it has ended; an epoch's data begins to flow when somebody opens
its FIFO, and is everything, in the order of the objects' names, once. What is not read is lost, as on the platform.
Where something cannot be read, the epoch ends there, and the feeder remembers that.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import select
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["PipeFeeder"]

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_CHUNK_BYTES = 1 << 16


class PipeFeeder:
    """Feeds the FIFOs ``<channel>_<epoch>`` of one host; a context manager.

    Args:
        folder: The host's ``input/data``.
        channel: Name of the channel.
        files: Its objects, in order.
        is_compressed: Whether they are gzip files that the platform unpacks on the way.
    """

    def __init__(self, folder: Path, channel: str, files: Sequence[Path], *, is_compressed: bool = False) -> None:
        self.has_failed = False
        """Whether an epoch was not whole."""
        self._prefix = folder / channel
        self._files = files
        self._is_compressed = is_compressed
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hetero-pipe-{channel}")

    def __enter__(self) -> PipeFeeder:
        os.mkfifo(self._path(0))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _path(self, epoch: int) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}_{epoch}")

    def _run(self) -> None:
        epoch = 0
        while (descriptor := self._wait_for_reader(epoch)) is not None:
            try:
                os.mkfifo(self._path(epoch + 1))  # whoever sees the end of this epoch may open the next at once
                self._write(descriptor)
            except BrokenPipeError:
                logger.info("%s was closed before its end", self._path(epoch))
            except (OSError, EOFError, zlib.error):  # the last two are of damaged gzip files
                logger.exception("cannot feed %s", self._path(epoch))
                self.has_failed = True
            finally:
                os.close(descriptor)
            epoch += 1

    def _wait_for_reader(self, epoch: int) -> int | None:
        """Return the FIFO, opened for writing, as soon as somebody reads it; None when this ends."""
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):  # ENXIO: nobody has
                return os.open(self._path(epoch), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._stopped.wait(_POLL_S)
        return None

    def _write(self, descriptor: int) -> None:
        for path in self._files:
            with gzip.open(path) if self._is_compressed else path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    if not self._write_chunk(descriptor, memoryview(chunk)):
                        return

    def _write_chunk(self, descriptor: int, chunk: memoryview) -> bool:
        """Return whether it was written, or this ends."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while chunk:
            if self._stopped.is_set():
                return False
            if poll.poll(_POLL_S * 1000):
                with contextlib.suppress(BlockingIOError):
                    chunk = chunk[os.write(descriptor, chunk) :]
        return True

"""Pipe mode: streams a channel's data through one FIFO per epoch, as the platform does.

The feeder creates the FIFO of the next epoch before the current epoch ends. When a reader opens the FIFO of an epoch,
the feeder begins to write. An epoch consists of all objects, once each, in the order of their names. Data that the
reader does not read is lost, as on the platform. If the feeder cannot read a file, it ends the epoch and sets
`PipeFeeder.has_failed`.
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

from hetero.system.waits import SHORT_POLL_S

__all__ = ["PipeFeeder"]

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16


class PipeFeeder:
    """Context manager that feeds the FIFOs ``<channel>_<epoch>`` of one host from a thread.

    Args:
        folder: The host's folder ``input/data``.
        channel: Name of the channel.
        files: The channel's objects, in order.
        is_compressed: Whether the objects are gzip files, which the feeder unpacks.
    """

    def __init__(self, folder: Path, channel: str, files: Sequence[Path], *, is_compressed: bool = False) -> None:
        self.has_failed = False
        """Whether an epoch ended early because a file could not be read."""
        self._prefix = folder / channel
        """Path of each FIFO without the number of its epoch."""
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
        """Feed one pipe after the other, one for each epoch, until the feeder is stopped."""
        epoch = 0
        while (descriptor := self._wait_for_reader(epoch)) is not None:
            try:
                # Make the pipe of the next epoch first, because a reader may open it as soon as this epoch ends.
                os.mkfifo(self._path(epoch + 1))
                self._write(descriptor)
            except BrokenPipeError:
                logger.info("%s was closed before its end", self._path(epoch))
            # Damaged gzip files raise EOFError and zlib.error. Then the epoch ends and the rehearsal fails, because the
            # reader would wait for ever.
            except (OSError, EOFError, zlib.error):
                logger.exception("cannot feed %s", self._path(epoch))
                self.has_failed = True
            finally:
                os.close(descriptor)
            epoch += 1

    def _wait_for_reader(self, epoch: int) -> int | None:
        """Wait for a reader of an epoch's FIFO, and return a descriptor for writing. None if the feeder stops."""
        while not self._stopped.is_set():
            # Without O_NONBLOCK, `open` would wait for a reader, also after a stop. With it, `open` raises ENXIO until
            # a reader opens the FIFO.
            with contextlib.suppress(OSError):
                return os.open(self._path(epoch), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._stopped.wait(SHORT_POLL_S)
        return None

    def _write(self, descriptor: int) -> None:
        """Write all objects of an epoch, one after the other. Return early if the feeder stops."""
        for path in self._files:
            with gzip.open(path) if self._is_compressed else path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    if not self._write_chunk(descriptor, memoryview(chunk)):
                        return

    def _write_chunk(self, descriptor: int, chunk: memoryview) -> bool:
        """Write a chunk and return True, or return False if the feeder stops first."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while chunk:
            if self._stopped.is_set():
                return False
            # The descriptor does not block, so the feeder notices a stop even if the reader does not read.
            if poll.poll(SHORT_POLL_S * 1000):
                with contextlib.suppress(BlockingIOError):
                    num_written = os.write(descriptor, chunk)
                    chunk = chunk[num_written:]
        return True

"""Ways to move ready-made batches into a trainer process, as competitors of the harness.

Their configuration: ``nbytes`` of a batch and ``num_endpoints``, the processes that send.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
from harness import Competitor

__all__ = ["Transport", "look_at", "merge"]

_PAGE_BYTES = 4096


class Transport(Competitor):
    """Checks the batches that arrive. Subclasses deliver them."""

    def consume(self, batch: Any) -> tuple[int, int]:
        """Read a byte of every page."""
        return 1, look_at(batch, self.config["nbytes"])


class ServedTransport(Transport):
    """A server process per endpoint. With several endpoints, each has a thread here."""

    server = ""
    """Key of the servers."""

    def start(self) -> None:
        """Start the servers."""
        self._children = [harness.server(self.server, self.config) for _ in range(self.config["num_endpoints"])]
        self._facts = [child.ask() for child in self._children]

    def batches(self) -> Iterator[Any]:
        """Yield what any of them sends."""
        return merge([functools.partial(self.receive, facts) for facts in self._facts])

    def receive(self, facts: Any) -> Iterator[Any]:
        """Yield batches of one server, which has said ``facts``."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the servers."""
        for child in self._children:
            child.stop(2.0)


def look_at(batch: Any, nbytes: int) -> int:
    """Check length, first and last byte, and touch every page: what is mapped but never read costs nothing.

    Raises:
        ValueError: It is not that of `ready_batches`.
    """
    if len(batch) != nbytes or int(batch[0]) != 0 or int(batch[-1]) != (nbytes - 1) % 256 or batch[::_PAGE_BYTES].any():
        raise ValueError(f"a batch of {len(batch)} bytes is not the one of {nbytes} that was sent")
    return nbytes


def merge(sources: Sequence[Callable[[], Iterator[Any]]]) -> Iterator[Any]:
    """Yield items from any source. With several sources, each runs in a separate thread."""
    if len(sources) == 1:
        yield from sources[0]()
        return
    ready: queue.Queue[Any] = queue.Queue(2)

    def run(source: Callable[[], Iterator[Any]]) -> None:
        for batch in source():
            ready.put(batch)

    for source in sources:
        threading.Thread(target=run, args=(source,), daemon=True).start()
    while True:
        yield ready.get()

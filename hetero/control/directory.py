"""Which endpoints exist right now: what launchers publish and readers follow."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Directory", "EndpointRecord"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRecord:
    """One endpoint that accepts requests."""

    endpoint_id: str
    """Host and index on it: ``algo-1/0``. Survives a restart."""
    host: str
    """Name of its host."""
    address: str
    """``ip:port``, numeric."""
    incarnation: str
    """Random per process start: tells a restart from a hiccup."""
    num_slots: int = 1
    """Batches that it computes at the same time; more than one only where emulated."""


class Directory:
    """The current endpoints, with a version that grows with every change. Thread-safe."""

    def __init__(self, records: Iterable[EndpointRecord] = ()) -> None:
        self._changed = threading.Condition()
        self._records = _sorted(records)
        self._version = 0
        self._listeners: list[Callable[[], None]] = []

    @property
    def version(self) -> int:
        """Number of changes so far."""
        with self._changed:
            return self._version

    def records(self) -> tuple[EndpointRecord, ...]:
        """Return the endpoints in natural order of their ids (``algo-2/1`` before ``algo-10/0``)."""
        with self._changed:
            return self._records

    def replace(self, records: Iterable[EndpointRecord]) -> None:
        """Set the endpoints; wakes those who wait if anything changed."""
        ordered = _sorted(records)
        with self._changed:
            if ordered == self._records:
                return
            self._records = ordered
            self._version += 1
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have ``listener`` called after every change, in the thread that made it.

        Returns:
            A function that ends this.
        """
        with self._changed:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._changed:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe

    def wait_newer(self, version: int, timeout_s: float) -> int:
        """Block until the version exceeds ``version`` or the time is over.

        Returns:
            The current version.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._version <= version:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            return self._version


def _sorted(records: Iterable[EndpointRecord]) -> tuple[EndpointRecord, ...]:
    return tuple(sorted(records, key=lambda record: _natural_key(record.endpoint_id)))


def _natural_key(text: str) -> list[tuple[int, int, str]]:
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]

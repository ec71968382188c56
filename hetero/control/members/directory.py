"""The directory of the current endpoints and of the hosts in service. Launchers publish it and readers follow it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from hetero.cluster import natural_key
from hetero.errors import ProtocolError
from hetero.wire.records import Wire

__all__ = ["BATCHES", "KINDS", "TF_DISPATCHER", "TF_WORKER", "Directory", "EndpointRecord"]

BATCHES = "batches"
"""Kind of an endpoint of hetero's data plane."""
TF_DISPATCHER = "tf-dispatcher"
"""Kind of a dispatcher of tf.data.service."""
TF_WORKER = "tf-worker"
"""Kind of a worker of tf.data.service."""
KINDS = (BATCHES, TF_DISPATCHER, TF_WORKER)


def _kind(text: str) -> str:
    """Return the kind of an endpoint from its message. An empty text means `BATCHES`, the default."""
    if text and text not in KINDS:
        raise ProtocolError(f"found an endpoint of the unknown kind {text[:100]!r}")
    return text or BATCHES


# The message of an endpoint does not repeat the name of its host, which is in the message around it.
_HOST = Wire(write=lambda _host: {}, read=lambda _message, outer: outer.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRecord:
    """One endpoint that accepts requests."""

    endpoint_id: str
    """The host and an index on it, such as ``algo-1/0``. A restart does not change it."""
    host: Annotated[str, _HOST]
    """Name of its host."""
    address: str
    """``ip:port``, numeric."""
    incarnation: str
    """Random for each start of the process, so readers can tell a restart from a lost connection. A dispatcher that
    continues from a journal keeps its incarnation. The text begins with `launch` and a dash."""
    num_slots: int = 1
    """Number of batches that the endpoint computes at the same time. Above 1 only in emulation."""
    kind: Annotated[str, Wire(decode=_kind)] = BATCHES
    """What the endpoint serves, one of `KINDS`."""
    is_optional: bool = False
    """Whether the job was planned without this endpoint. If it cannot serve a data set, the ranks do without it."""

    @property
    def launch(self) -> str:
        """Part of `incarnation` that changes only if the launcher restarts. All endpoints of the host share it."""
        return self.incarnation.rpartition("-")[0]


class Directory:
    """The current endpoints, and the hosts in service, with or without endpoints. Thread-safe.

    Args:
        records: The endpoints.
        hosts: The hosts in service. None means the hosts of ``records``.
    """

    def __init__(self, records: Iterable[EndpointRecord] = (), *, hosts: Iterable[str] | None = None) -> None:
        self._lock = threading.Lock()
        self._contents = _contents(records, hosts)
        self._listeners: list[Callable[[], None]] = []

    def records(self) -> tuple[EndpointRecord, ...]:
        """Return the endpoints in natural order of their ids (``algo-2/1`` before ``algo-10/0``)."""
        return self.contents()[0]

    def contents(self) -> tuple[tuple[EndpointRecord, ...], frozenset[str]]:
        """Return the endpoints, and the hosts that are in service at the same moment."""
        with self._lock:
            return self._contents

    def replace(self, records: Iterable[EndpointRecord], *, hosts: Iterable[str] | None = None) -> None:
        """Set the endpoints and the hosts. Call the listeners if anything changed.

        Args:
            records: The endpoints.
            hosts: The hosts in service. None means the hosts of ``records``.
        """
        contents = _contents(records, hosts)
        with self._lock:
            if contents == self._contents:
                return
            self._contents = contents
            listeners = tuple(self._listeners)
        # Without the lock, because a listener may read the directory.
        for listener in listeners:
            listener()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change, in the thread that made the change.

        Returns:
            A function that ends the subscription.
        """
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe


def _contents(
    records: Iterable[EndpointRecord], hosts: Iterable[str] | None
) -> tuple[tuple[EndpointRecord, ...], frozenset[str]]:
    """Return the endpoints in natural order, and the hosts in service."""
    ordered = tuple(sorted(records, key=lambda record: natural_key(record.endpoint_id)))
    return ordered, frozenset((record.host for record in ordered) if hosts is None else hosts)

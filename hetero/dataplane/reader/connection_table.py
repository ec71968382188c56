"""The connections to the endpoints in the directory, and the last words of endpoints that left."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from hetero.control.directory import EndpointRecord
from hetero.dataplane.reader.connection import ConnectionState, EndpointConnection

__all__ = ["Roster"]


class Roster:
    """One connection per endpoint, in natural order. Guarded by the fleet's lock.

    Args:
        connect: Makes the connection to an endpoint.
    """

    def __init__(self, connect: Callable[[EndpointRecord], EndpointConnection]) -> None:
        self._connect = connect
        self._connections: dict[str, EndpointConnection] = {}
        self._retired: list[EndpointConnection] = []  # they left, but calls may still be in progress
        self._last_words: dict[str, str] = {}
        self.num_slots = 0
        """Batches that all endpoints together compute at the same time, except foreign endpoints."""

    def __iter__(self) -> Iterator[EndpointConnection]:
        return iter(tuple(self._connections.values()))

    def follow(self, records: Iterable[EndpointRecord], hosts: Container[str]) -> None:
        """Make the connections match the directory. A restarted endpoint gets a new connection.

        Args:
            records: The endpoints.
            hosts: The hosts that are there. An endpoint that leaves together with its host has not died. The host was
                lost with all its endpoints, or it left in order. It may be back by now, with a new launch.
        """
        before, self._connections = self._connections, {}
        launches: dict[str, str] = {}
        for record in records:
            launches[record.host] = record.launch
            known = before.get(record.endpoint_id)
            if known is not None and known.record == record:
                self._connections[record.endpoint_id] = before.pop(record.endpoint_id)
            else:
                self._connections[record.endpoint_id] = self._connect(record)
        for gone in before.values():
            gone.is_retired = True
            is_replaced = launches.get(gone.record.host, gone.record.launch) != gone.record.launch
            gone.has_died = gone.record.host in hosts and not is_replaced
            gone.reserved_by = None
            self._last_words[gone.record.endpoint_id] = f"left ({gone.last_word})"
            self._retired.append(gone)
        self.count_slots()

    def count_slots(self) -> None:
        """Count the slots of all endpoints except foreign ones. Kept, because readers ask several times per batch."""
        self.num_slots = sum(
            connection.record.num_slots for connection in self if connection.state is not ConnectionState.FOREIGN
        )

    def take_ended(self) -> list[EndpointConnection]:
        """Return, once, the connections that left and whose calls have ended. The caller closes them."""
        ended = [connection for connection in self._retired if not connection.num_outstanding]
        self._retired = [connection for connection in self._retired if connection.num_outstanding]
        return ended

    def all(self) -> list[EndpointConnection]:
        """Return all connections, including those that left and are still in use."""
        return [*self._connections.values(), *self._retired]

    def describe(self) -> str:
        """Return all endpoints and their last words, on one line."""
        words = [f"{connection.name}: {connection.last_word}" for connection in self]
        words += [f"{name}: {word}" for name, word in self._last_words.items() if name not in self._connections]
        return "; ".join(words) if words else "no endpoint has appeared in the directory"

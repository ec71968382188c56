"""Which endpoints a rank uses, what they have to prepare, and which one gets the next request. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Sequence

from hetero.dataplane.reader.connection import ConnectionState, EndpointConnection
from hetero.spec import DatasetSpec

__all__ = ["least_loaded", "less_loaded", "next_free_s", "subset", "unprepared"]

_MIN_SUBSET = 8
_LOAD_AGE_S = 1.0


def subset(connections: Iterable[EndpointConnection], rank: int, world_size: int) -> list[EndpointConnection]:
    """Return the endpoints that a rank uses: all endpoints of a small job, some of a large job.

    144 endpoints and 8 ranks need not make 1,152 connections. A rank gets twice its share, at least 8, to have a choice
    even after a host is lost. Neighbours in the list are on different hosts, and each rank starts at another place of
    the list. Endpoints that are down do not count, so others take their place.

    Args:
        connections: All endpoints, in natural order.
        rank: In ``[0, world_size)``.
        world_size: Processes that read.

    Returns:
        The endpoints in order of preference.
    """
    across_hosts = sorted(connections, key=_index_on_host)
    count = len(across_hosts)
    start = rank * count // world_size
    size = max(_MIN_SUBSET, -(-2 * count // world_size))
    used: list[EndpointConnection] = []
    num_up = 0
    for connection in across_hosts[start:] + across_hosts[:start]:
        if num_up < size:
            used.append(connection)
            num_up += connection.state in (ConnectionState.CONNECTING, ConnectionState.READY)
    return used


def unprepared(
    connections: Sequence[EndpointConnection],
    specs: Collection[DatasetSpec],
    *,
    first: EndpointConnection | None,
    now_s: float,
) -> tuple[list[tuple[EndpointConnection, DatasetSpec]], float]:
    """Return which data sets have to be prepared on which endpoints now, and when to look again.

    Args:
        connections: The endpoints in use.
        specs: The data sets that are wanted.
        first: The first endpoint in natural order, in use or not. It gives the reference, so all ranks compare with the
            same one.
        now_s: Monotonic seconds.

    Returns:
        Pairs of endpoint and data set, and the end of the first back-off, infinite if no endpoint is in back-off.
    """
    due = []
    next_due_s = math.inf
    for connection in connections if first is None or first in connections else [first, *connections]:
        # An endpoint that has described a data set waits for the reference.
        known = connection.prepared | connection.preparing | connection.unusable | connection.descriptions.keys()
        missing = [spec for spec in specs if spec not in known]
        if not missing or connection.state is ConnectionState.FOREIGN:
            continue
        if connection.retry_at_s > now_s:
            next_due_s = min(next_due_s, connection.retry_at_s)
        else:
            due += [(connection, spec) for spec in missing]
    return due, next_due_s


def least_loaded(
    connections: Iterable[EndpointConnection],
    spec: DatasetSpec,
    *,
    now_s: float,
    alone_for: object | None,
    avoided: Container[EndpointConnection] = (),
) -> EndpointConnection | None:
    """Return the endpoint for the next request, None if no endpoint can take it now.

    The endpoint with the fewest outstanding requests of this process per slot is chosen. On a tie the lowest reported
    load decides, then the longest time since the last choice. At first the order of ``connections`` decides, which
    differs between ranks.

    Args:
        connections: The endpoints in use.
        spec: The request's data set.
        now_s: Monotonic seconds.
        alone_for: The request that needs an endpoint alone, or None. The endpoint that it has reserved is preferred.
        avoided: Endpoints to choose only if all others are unsuitable.
    """
    ready = [
        connection
        for connection in connections
        if connection.serves(spec) and connection.busy_until_s <= now_s and connection.reserved_by in (None, alone_for)
    ]
    return min(
        ready,
        key=lambda connection: (
            connection.reserved_by is not alone_for,
            connection in avoided,
            *_burden(connection, now_s),
        ),
        default=None,
    )


def less_loaded(
    connections: Iterable[EndpointConnection],
    spec: DatasetSpec,
    overdue_on: EndpointConnection,
    *,
    now_s: float,
    avoided: Container[EndpointConnection] = (),
) -> EndpointConnection | None:
    """Return the endpoint for a second attempt, None if no endpoint can take it now.

    It is ready, not reserved, and has fewer of this process's requests per slot than the endpoint of the first attempt.
    Another host is preferred, because what stops an endpoint may stop its whole host.

    Args:
        connections: The endpoints in use.
        spec: The request's data set.
        overdue_on: The endpoint of the first attempt.
        now_s: Monotonic seconds.
        avoided: Endpoints not to choose.
    """
    load = overdue_on.num_outstanding / overdue_on.record.num_slots
    ready = [
        connection
        for connection in connections
        if connection is not overdue_on
        and connection not in avoided
        and connection.serves(spec)
        and connection.busy_until_s <= now_s
        and connection.reserved_by is None
        and connection.num_outstanding / connection.record.num_slots < load
    ]
    return min(
        ready,
        key=lambda connection: (connection.record.host == overdue_on.record.host, *_burden(connection, now_s)),
        default=None,
    )


def next_free_s(connections: Iterable[EndpointConnection], *, now_s: float) -> float:
    """Return in how many seconds the first busy endpoint may be asked again.

    Args:
        connections: The endpoints in use.
        now_s: Monotonic seconds.

    Returns:
        More than 0, infinite if no endpoint is busy.
    """
    busy_until_s = [each.busy_until_s for each in connections if each.busy_until_s > now_s]
    return min(busy_until_s, default=math.inf) - now_s


def _burden(connection: EndpointConnection, now_s: float) -> tuple[float, float, int]:
    num_slots = connection.record.num_slots
    # Ignore an old report, because it says nothing and must not keep an endpoint idle for ever.
    load = connection.load if connection.load_at_s > now_s - _LOAD_AGE_S else 0
    return connection.num_outstanding / num_slots, load / num_slots, connection.chosen_at


def _index_on_host(connection: EndpointConnection) -> int:
    index = connection.record.endpoint_id.rpartition("/")[2]
    return int(index) if index.isdigit() else 0

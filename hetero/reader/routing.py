"""The endpoints that a rank uses, and which endpoint gets the next request. No threads, no network.

`ConnectionTable` follows the directory. `Router` chooses endpoints for requests. The fleet's lock guards both.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.control.members.directory import EndpointRecord
from hetero.plans.permutations import mixed
from hetero.reader.connection import ConnectionState, EndpointConnection
from hetero.reader.window_size import PREFETCH_FACTOR
from hetero.spec import DatasetSpec
from hetero.wire.limits import MAX_HELPERS

__all__ = ["ConnectionTable", "Router", "owners_of", "subset", "unprepared"]

_MIN_SUBSET = 8
_LOAD_AGE_S = 1.0


class ConnectionTable:
    """The connections to the endpoints in the directory, and to those that left but still have calls in progress.

    There is one connection per endpoint, in natural order.

    Args:
        connect: Makes the connection to an endpoint.
    """

    def __init__(self, connect: Callable[[EndpointRecord], EndpointConnection]) -> None:
        self._connect = connect
        self._connections: dict[str, EndpointConnection] = {}
        self._retired: list[EndpointConnection] = []  # endpoints that left, but calls may still be in progress
        self._last_messages: dict[str, str] = {}
        """Last message about each endpoint that has left, by the endpoint's id."""
        self.num_slots = 0
        """Batches that all endpoints, except foreign ones, can compute at the same time."""

    def __iter__(self) -> Iterator[EndpointConnection]:
        return iter(tuple(self._connections.values()))

    def follow(self, records: Iterable[EndpointRecord], hosts: Container[str]) -> None:
        """Make the connections match the directory. A restarted endpoint gets a new connection.

        Args:
            records: The endpoints.
            hosts: The hosts that are present. If an endpoint left together with its host, it does not count as dead,
                because the host was lost or left in order. The host may be back by now, with a restarted launcher.
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
            # If a host was replaced between two calls of `follow`, only `EndpointRecord.launch` shows it. Without this
            # check, the endpoints of the old host counted as dead.
            is_replaced = launches.get(gone.record.host, gone.record.launch) != gone.record.launch
            # Whether the endpoint died is decided now and not when a batch asks, because the host may be back by then.
            gone.retire(has_died=gone.record.host in hosts and not is_replaced)
            self._last_messages[gone.record.endpoint_id] = f"left ({gone.last_message})"
            self._retired.append(gone)
        self.count_slots()

    def count_slots(self) -> None:
        """Update ``num_slots``. It is not computed on demand, because readers need it several times per batch."""
        self.num_slots = sum(
            connection.record.num_slots for connection in self if connection.state is not ConnectionState.FOREIGN
        )

    def pop_ended(self) -> list[EndpointConnection]:
        """Remove and return the retired connections without calls in progress. The caller closes them."""
        ended = [connection for connection in self._retired if not connection.num_outstanding]
        self._retired = [connection for connection in self._retired if connection.num_outstanding]
        return ended

    def all(self) -> list[EndpointConnection]:
        """Return all connections, including retired ones that have calls in progress."""
        return [*self._connections.values(), *self._retired]

    def clear(self) -> None:
        """Forget all connections."""
        self._connections, self._retired = {}, []

    def describe(self) -> str:
        """Return one line that names all endpoints and the last message about each."""
        texts = [f"{connection.name}: {connection.last_message}" for connection in self]
        texts += [f"{name}: {text}" for name, text in self._last_messages.items() if name not in self._connections]
        return "; ".join(texts) if texts else "no endpoint has appeared in the directory"


class Router:
    """Chooses endpoints for requests, and knows how busy they are.

    Args:
        table: All endpoints.
        rank: Rank of this process, in ``[0, world_size)``.
        world_size: Processes that read.
        clock: Returns monotonic seconds.
        on_free: Called when an endpoint that requests wait for is free, or when a retired one has finished its calls.
    """

    def __init__(
        self,
        table: ConnectionTable,
        *,
        rank: int,
        world_size: int,
        clock: Callable[[], float],
        on_free: Callable[[], None],
    ) -> None:
        self.endpoints: list[EndpointConnection] = []
        """This rank's endpoints, in order of preference."""
        self._of_lanes: dict[str, EndpointConnection] = {}
        """The endpoints of lanes by their ids, in an order that other ranks have too: without those that the job added
        on trainer hosts while it ran, because they may go at any time. They serve lanes if there are no others."""
        self._planned_ids: list[str] = []  # the same ids; lane l begins at number l modulo their number
        self._id_of_lane: dict[int, str] = {}
        """Endpoint of each lane that came."""
        self._hosts_of_lanes: set[str] = set()
        """Hosts that have served some of these since the last `update`."""
        self._moving: dict[int, str] = {}
        """Endpoints that have come, or could not be reached when the lane began. It moves there once they are ready."""
        self._table = table
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._on_free = on_free
        """Called when requests that wait for an endpoint may choose again, or when a retired endpoint can be closed."""
        self._num_choices = 0
        """Number of choices so far. The ``last_choice`` of a connection is the number of its own last choice."""

    def update(self) -> None:
        """Select this rank's endpoints anew, because endpoints came, left, or are down."""
        self.endpoints = subset(self._table, self._rank, self._world_size)
        before = self._of_lanes
        planned = [connection for connection in self.endpoints if not connection.record.is_optional]
        # Lanes that follow each other are on different hosts, and few lanes are divided by the hosts' endpoints.
        by_host: dict[str, list[EndpointConnection]] = {}
        for connection in sorted(planned or self.endpoints, key=lambda connection: connection.record.endpoint_id):
            by_host.setdefault(connection.record.host, []).append(connection)
        places = [((number + 0.5) / len(own), each) for own in by_host.values() for number, each in enumerate(own)]
        ordered = [each for _, each in sorted(places, key=operator.itemgetter(0))]
        self._of_lanes = {connection.record.endpoint_id: connection for connection in ordered}
        self._planned_ids = list(self._of_lanes)
        for lane, own in self._id_of_lane.items() if ordered else ():
            planned_id = self._planned_ids[lane % len(ordered)]
            # The lanes of an endpoint that left move now.
            if own not in self._of_lanes:
                self._id_of_lane[lane] = planned_id
            elif planned_id not in before:
                self._moving[lane] = planned_id
        ids = self._id_of_lane.values()
        self._hosts_of_lanes = {self._of_lanes[each].record.host for each in ids if each in self._of_lanes}

    def planned_batches(self, prefetch_factor: float) -> int:
        """Return how many batches this rank should have in flight: its share of all slots, times a factor."""
        return max(2, math.ceil(prefetch_factor * self._table.num_slots / self._world_size))

    def choose(
        self,
        spec: DatasetSpec,
        *,
        lane: int | None = None,
        may_leave_lane: bool = True,
        alone_for: object | None = None,
        is_optional_allowed: bool = True,
    ) -> EndpointConnection | None:
        """Return the endpoint for the next request, None if no endpoint can compute it now. `release` gives it back.

        The endpoint with the fewest outstanding requests of this process per slot is chosen. On a tie the lowest
        reported load decides, then the longest time since the last choice. Between endpoints that were never chosen,
        the order of `endpoints` decides, which differs between ranks. A straggler is chosen only if all others are
        unsuitable.

        The batches of a lane go to one endpoint, which has read their files already (tests/reader/test_routing.py).
        Ranks that use the same endpoints choose the same one. If it is `PREFETCH_FACTOR` requests behind another one,
        that one gets the batch, unless a second endpoint would have to begin the lane anew. It must be on the same host
        or on one without lanes. Otherwise four hosts read each file 2.9 times (tests/shards/test_served.py).

        Args:
            spec: The request's data set.
            lane: See `BatchRequest.lane`. None if each endpoint serves the request equally well.
            may_leave_lane: Whether another endpoint may get the batch if the lane's endpoint is behind.
            alone_for: The request, if it must be the only one of this process on its endpoint. The chosen endpoint is
                then reserved and gets no other new requests. While the reserved endpoint has outstanding requests, this
                method returns None, and the caller asks again.
            is_optional_allowed: Whether endpoints may be chosen that the job added while it ran.
        """
        now_s = self._clock()
        ready = [
            connection
            for connection in (self.endpoints if may_leave_lane else self._of_lanes.values())
            if connection.serves(spec)
            and (is_optional_allowed or not connection.record.is_optional)
            and connection.busy_until_s <= now_s
            and connection.reserved_by in (None, alone_for)
        ]
        own = self._endpoint_of_lane(lane, ready)
        if own is not None and not may_leave_lane and own not in ready and own.may_serve(spec):
            return None  # it is busy, or builds the data set
        if own is not None and may_leave_lane and alone_for is None:
            if any(each.record.host == own.record.host and not each.is_avoided(now_s) for each in ready):
                others = self._hosts_of_lanes - {own.record.host}
                ready = [connection for connection in ready if connection.record.host not in others]
            least = min((connection.num_outstanding for connection in ready), default=0)
            own = own if own.num_outstanding < least + PREFETCH_FACTOR else None
        # False comes before True. So the endpoint that is reserved for the request comes first. Stragglers come last.
        chosen = min(
            ready,
            key=lambda connection: (
                connection.reserved_by is not alone_for,
                # A straggler keeps its lanes, if others would have to begin them anew.
                connection.is_avoided(now_s) and (may_leave_lane or connection is not own),
                connection is not own,
                *_burden(connection, now_s),
            ),
            default=None,
        )
        if chosen is not None and alone_for is not None:
            if any(other.reserved_by is alone_for for other in self._table if other is not chosen):
                # Free the endpoint that was reserved for the request before. It may have left `endpoints` since.
                self.unreserve((alone_for,))
            chosen.reserved_by = alone_for
            # Earlier requests are still on the endpoint. The caller asks again when the endpoint is free.
            if chosen.num_outstanding:
                return None
        if chosen is not None and lane is not None and not may_leave_lane:
            self._give(lane, chosen.record.endpoint_id)
        return self._occupy(chosen)

    def _endpoint_of_lane(self, lane: int | None, ready: Sequence[EndpointConnection]) -> EndpointConnection | None:
        """Return the endpoint that serves a lane. It may not be ready."""
        if lane is None or not self._of_lanes:
            return None
        if lane not in self._id_of_lane:
            # If it cannot be reached yet, the lane begins elsewhere, and returns later (tests/reader/test_routing.py).
            self._give(lane, self._moving.setdefault(lane, self._planned_ids[lane % len(self._planned_ids)]))
        elif self._of_lanes.get(self._moving.get(lane, "")) in ready:
            self._give(lane, self._moving.pop(lane))
        return self._of_lanes.get(self._id_of_lane[lane])

    def _give(self, lane: int, endpoint_id: str) -> None:
        """Record which endpoint serves a lane from now on."""
        self._id_of_lane[lane] = endpoint_id
        self._hosts_of_lanes.add(self._of_lanes[endpoint_id].record.host)

    def choose_owners(
        self, request: BatchRequest, lead: EndpointConnection
    ) -> tuple[tuple[EndpointConnection, ...], npt.NDArray[np.uint8] | None]:
        """Return one endpoint of each host that keeps samples of a batch, and the number of each sample's endpoint.

        The numbers are those of `BatchRequest.owners`. If a host has no endpoint that can take its samples now,
        ``lead`` computes these samples. No endpoints are returned if the data set has no cache, or if only one host has
        endpoints. Endpoints that the job added while it ran own no samples for others, because the number of such
        endpoints changes. They keep the samples that they compute themselves.

        Ranks of a large job use only some of the hosts. Then a sample has one owner among the hosts of each rank. For
        most ranks this is the same host.

        To keep connections few, an endpoint always asks the same endpoint of another host, if both hosts have equally
        many endpoints.

        Args:
            request: The request.
            lead: The endpoint that `choose` returned for it.
        """
        spec, work = request.spec, request.work
        description = lead.descriptions.get(spec)
        # Without a cache there are no owners. A lead that the job added while it ran keeps all samples of its batch.
        if description is None or not description.keeps_samples or lead.record.is_optional:
            return (), None
        # Only samples of a map-style data set with integer indices are kept in the cache.
        if not isinstance(work, IndexedWork) or not isinstance(work.indices, np.ndarray):
            return (), None
        # All ranks count all endpoints of a host, and therefore find the same owners.
        hosts = {connection.record.host for connection in self.endpoints}
        num_endpoints = Counter(
            connection.record.host
            for connection in self._table
            if connection.record.host in hosts
            and connection.state is not ConnectionState.FOREIGN
            and not connection.record.is_optional
        )
        num_hosts = len(num_endpoints)
        # A request can name at most `MAX_HELPERS` helpers, one of each other host. With fewer samples than hosts, each
        # helper would compute about one sample, which is not worth a request.
        if not 1 < num_hosts <= MAX_HELPERS + 1 or work.num_samples < num_hosts:
            return (), None
        available: dict[str, list[EndpointConnection]] = {}
        for connection in self._available(spec, self._clock(), besides=lead):
            found = connection.descriptions[spec]
            # The helper's samples go into the same batch, and their bytes may depend on the versions of libraries.
            if found.keeps_samples and found.environment == description.environment:
                available.setdefault(connection.record.host, []).append(connection)
        # In step s, endpoint i of a host with n endpoints asks endpoint i + s n of the other host, modulo the number of
        # available endpoints there. If this number is n too, that is always endpoint i.
        turn = _index_on_host(lead) + request.step * num_endpoints[lead.record.host]
        host_of_sample = owners_of(work.indices, num_endpoints)
        helpers: list[EndpointConnection] = []
        helper_of_host = np.zeros(len(num_endpoints), np.uint8)  # 0: ``lead`` computes the host's samples
        for host_index, host in enumerate(num_endpoints):
            candidates = sorted(available.get(host, ()), key=_index_on_host)
            if host != lead.record.host and candidates and (host_of_sample == host_index).any():
                helpers.append(candidates[turn % len(candidates)])
                helper_of_host[host_index] = len(helpers)
        return (tuple(helpers), helper_of_host[host_of_sample]) if helpers else ((), None)

    def choose_other(self, spec: DatasetSpec, overdue_on: EndpointConnection) -> EndpointConnection | None:
        """Return the endpoint for a second attempt, None if none would help now. `release` gives it back.

        The endpoint is ready, not reserved, and no straggler. It has fewer of this process's requests per slot than the
        first attempt's endpoint. Another host is preferred, because the cause of the delay may affect the whole host.

        Args:
            spec: The request's data set.
            overdue_on: The endpoint of the first attempt.
        """
        now_s = self._clock()
        load = overdue_on.num_outstanding / overdue_on.record.num_slots
        ready = [
            connection
            for connection in self._available(spec, now_s, besides=overdue_on)
            if connection.num_outstanding / connection.record.num_slots < load
        ]
        chosen = min(
            ready,
            key=lambda connection: (connection.record.host == overdue_on.record.host, *_burden(connection, now_s)),
            default=None,
        )
        return self._occupy(chosen)

    def _available(
        self, spec: DatasetSpec, now_s: float, *, besides: EndpointConnection
    ) -> Iterator[EndpointConnection]:
        """Yield the endpoints except ``besides`` that may help with its request: ready, not reserved, no stragglers."""
        for connection in self.endpoints:
            if (
                connection is not besides
                and not connection.is_avoided(now_s)
                and connection.serves(spec)
                and connection.busy_until_s <= now_s
                and connection.reserved_by is None
            ):
                yield connection

    def release(self, connection: EndpointConnection, *, alone_for: object | None = None) -> None:
        """Give back an endpoint that `choose` or `choose_other` returned. End its reservation for ``alone_for``."""
        connection.num_outstanding -= 1
        is_idle, is_awaited = not connection.num_outstanding, connection.reserved_by is not None
        if alone_for is not None and connection.reserved_by is alone_for:
            connection.reserved_by = None
        # Call `_on_free` only if a request waits for this endpoint, or if the endpoint has left the job and the watcher
        # can close its connection now. With a call for each idle endpoint and each batch, the trainer took a tenth more
        # CPU time for batches of 10 KB.
        if alone_for is not None or (is_idle and (is_awaited or connection.is_retired)):
            self._on_free()

    def unreserve(self, owners: Container[object]) -> None:
        """Release the endpoints that are reserved for these requests."""
        for connection in self._table:
            if connection.reserved_by is not None and connection.reserved_by in owners:
                connection.reserved_by = None
        self._on_free()

    def next_free_s(self) -> float:
        """Return the seconds until the first busy endpoint may be asked again, infinite if none are busy."""
        now_s = self._clock()
        busy_until_s = [each.busy_until_s for each in self.endpoints if each.busy_until_s > now_s]
        return min(busy_until_s, default=math.inf) - now_s

    def _occupy(self, chosen: EndpointConnection | None) -> EndpointConnection | None:
        """Count a request on the chosen endpoint, if there is one, and return the endpoint."""
        if chosen is not None:
            self._num_choices += 1
            chosen.last_choice = self._num_choices
            chosen.num_outstanding += 1
        return chosen


def subset(connections: Iterable[EndpointConnection], rank: int, world_size: int) -> list[EndpointConnection]:
    """Return the endpoints that a rank uses: all endpoints of a small job, some of a large job.

    Without a limit, 144 endpoints and 8 ranks would make 1,152 connections. A rank uses twice its share of the
    endpoints, and at least 8. So it has a choice even after a host is lost. The endpoints are successive in a list
    whose neighbours are on different hosts. Each rank starts at another index of the list. Endpoints that are down do
    not count, so others replace them.

    Args:
        connections: All endpoints, in natural order.
        rank: In ``[0, world_size)``.
        world_size: Processes that read.

    Returns:
        The endpoints in order of preference.
    """
    # First the endpoint 0 of each host, then the endpoint 1 of each host, and so on.
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
    """Return the data sets to prepare now, each with its endpoint, and when to look again.

    Args:
        connections: The endpoints in use.
        specs: The data sets that are wanted.
        first: The first endpoint of the job in natural order. It is prepared even if this rank does not use it, because
            all ranks compare with its description.
        now_s: Monotonic seconds.

    Returns:
        Pairs of endpoint and data set, and the monotonic time when the first back-off ends. The time is infinite if no
        endpoint is in back-off.
    """
    due = []
    next_due_s = math.inf
    # If this rank does not use the first endpoint of the job, add it.
    for connection in connections if first is None or first in connections else [first, *connections]:
        # An endpoint that has described a data set needs no preparation. `ServedDataset` compares the description.
        known = connection.prepared | connection.preparing | connection.unusable | connection.descriptions.keys()
        missing = [spec for spec in specs if spec not in known]
        # A foreign endpoint is never used, because another process has its address.
        if not missing or connection.state is ConnectionState.FOREIGN:
            continue
        if connection.retry_at_s > now_s:
            next_due_s = min(next_due_s, connection.retry_at_s)
        else:
            due += [(connection, spec) for spec in missing]
    return due, next_due_s


def _burden(connection: EndpointConnection, now_s: float) -> tuple[float, float, int]:
    """Return the sort key by which the least busy endpoint comes first: see `Router.choose`."""
    num_slots = connection.record.num_slots
    # Ignore an old load, which would keep an endpoint idle for ever.
    load = connection.load if connection.delivered_at_s > now_s - _LOAD_AGE_S else 0
    return connection.num_outstanding / num_slots, load / num_slots, connection.last_choice


def _index_on_host(connection: EndpointConnection) -> int:
    """Return the index in an endpoint's id, such as 3 for ``algo-1/3``."""
    index = connection.record.endpoint_id.rpartition("/")[2]
    return int(index) if index.isdigit() else 0


def owners_of(indices: npt.NDArray[np.int64], hosts: Mapping[str, int]) -> npt.NDArray[np.intp]:
    """Return for each sample the index of its host in ``hosts``.

    This is weighted rendezvous hashing: each host has a pseudo-random score for each sample, and the largest score
    wins. If a host comes or leaves, only its own samples move.

    Args:
        indices: Positions in the data set.
        hosts: At least one host, with how many endpoints it has. A host's share of the samples is its share of the
            endpoints.
    """
    keys = np.ascontiguousarray(indices).view(np.uint64)
    # Minus a score is an exponential random variable with rate n, for a host with n endpoints. The least of n such
    # variables with rate 1 has the same distribution. So this is as if each endpoint took part with its own score.
    # 0.5 is added because a hash may be 0, which has no logarithm.
    scores = [np.log((mixed(keys ^ _key(host)) + 0.5) * 2.0**-64) / count for host, count in hosts.items()]
    host_indices: npt.NDArray[np.intp] = np.argmax(scores, axis=0)
    return host_indices


def _key(host: str) -> np.uint64:
    """Return a hash of a host's name."""
    # blake2b and not `hash`, because `hash` differs between processes, and all ranks must find the same owners.
    return np.uint64(int.from_bytes(blake2b(host.encode(), digest_size=8).digest(), "little"))

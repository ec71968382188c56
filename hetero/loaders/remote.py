"""Fetching from endpoints, with one fleet per process and one reader per pass."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hetero.batches.failures import raising_user_types
from hetero.batches.fetch import Description
from hetero.batches.lanes.source import iterable_problem
from hetero.batches.request import BatchRequest
from hetero.batches.skips import Skips
from hetero.control.rank import session as control
from hetero.control.rank.session import RankSession
from hetero.errors import ConfigError
from hetero.loaders.crosscheck import CheckedReader
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader
from hetero.spec import DatasetSpec
from hetero.wire.limits import Limits

__all__ = ["check_has_index", "describe", "expect", "fleet_for", "num_samples", "open_reader"]


class _OwnedFleet(NamedTuple):
    """A fleet, and the process and session that it belongs to."""

    pid: int
    session: RankSession
    fleet: Fleet


_lock = threading.Lock()
_fleet: _OwnedFleet | None = None
_expected: dict[DatasetSpec, None] = {}
"""Data sets that will perhaps be wanted, in order. They are for the fleet that is made later."""


def fleet_for(session: RankSession) -> Fleet:
    """Return this process's fleet of endpoints, which is made on first use."""
    global _fleet
    with _lock:
        # A forked process must not use the connections of its parent. Another session has other endpoints.
        if _fleet is None or (_fleet.pid, _fleet.session) != (os.getpid(), session):
            fleet = Fleet(
                session.directory,
                session.token,
                job_id=session.job_id,
                rank=session.rank,
                world_size=session.world_size,
                prepare_timeout_s=session.options.prepare_timeout_s,
                data_timeout_s=session.options.data_timeout_s,
                limits=Limits(max_batch_bytes=session.options.max_batch_bytes),
                tls=session.tls,
            )
            for spec in _expected:
                fleet.expect(spec)
            _fleet = _OwnedFleet(os.getpid(), session, fleet)
            session.set_counters(lambda: dataclasses.asdict(fleet.stats))
        return _fleet.fleet


def expect(spec: DatasetSpec) -> None:
    """Record that a data set will perhaps be wanted. Nothing is connected or sent. See `Fleet.expect`."""
    with _lock:
        if _fleet is not None and _fleet.pid == os.getpid():
            _fleet.fleet.expect(spec)
        # This process has no fleet yet. `fleet_for` tells the fleet when it makes one.
        else:
            _expected[spec] = None


def num_samples(spec: DatasetSpec) -> int:
    """Return the length of a data set as its endpoints describe it. Blocks. The answer is cached.

    Raises:
        TypeError: If the data set does not have a length.
        ConfigError: If the data set is iterable.
        DatasetError: If the factory raises.
        DataPlaneError: If no endpoint answers.
    """
    with raising_user_types():
        found = describe(spec)
    check_has_index(spec, found)
    count = found.num_samples
    if count is None:
        raise TypeError(f"data set {spec.name!r} has no len()")
    return count


def check_has_index(spec: DatasetSpec, found: Description) -> None:
    """Reject an iterable.

    Raises:
        ConfigError: If the endpoints say that the data set is iterable.
    """
    if found.is_iterable:
        raise ConfigError(iterable_problem(f"data set {spec.name!r}"))


def describe(spec: DatasetSpec) -> Description:
    """Return what the endpoints say of a data set. Blocks. The answer is cached.

    Raises:
        DatasetError: If the factory raises.
        DataPlaneError: If no endpoint answers.
    """
    session = control.current()
    assert session is not None
    return fleet_for(session).describe(spec)


def open_reader(
    fleet: Fleet,
    requests: Iterator[BatchRequest],
    *,
    prefetch_factor: int | None,
    compares_batches: bool,
    on_wait: Callable[[bool], None],
    on_received: Callable[[int, int], object],
    on_skips: Callable[[Skips], object] | None,
    allocate: Callable[[int], memoryview] | None = None,
) -> CheckedReader:
    """Return an iterator over the batches of ``requests``, in order. It has a ``close`` method.

    Args:
        fleet: The endpoints.
        requests: The batches to fetch. The iterator is consumed in the calling thread.
        prefetch_factor: Batches in flight per active endpoint. None for the reader's default.
        compares_batches: Whether this process may compute batches too, to compare them. This uses the process's global
            generators, so it is unsafe while other threads draw from these generators.
        on_wait: See `Reader`.
        on_received: Called when a batch is delivered, with its number of bytes before compression, and with the number
            that compression saved.
        on_skips: Called at the same time with the skipped samples of the batch.
        allocate: Function that returns memory for a size in bytes, for example pinned memory. None for ordinary memory.
    """
    session = control.current()
    # ``--purity-checks 0`` switches all comparisons off. A process outside of a job always compares.
    has_comparisons = session is None or session.options.purity_checks > 0
    reader = Reader(
        fleet,
        requests,
        prefetch_factor=prefetch_factor,
        allocate=allocate,
        on_skips=on_skips,
        on_received=on_received,
        on_wait=on_wait,
    )
    return CheckedReader(
        fleet,
        reader,
        compares_globals=has_comparisons,
        compares_batches=has_comparisons and compares_batches,
        # Later batches are compared from time to time, because files may change while the job runs. One rank is enough,
        # because all ranks get their batches from the same data hosts.
        compares_later=session is not None and session.rank == 0,
    )

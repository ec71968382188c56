"""Endpoints that a test controls, with a simulated clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hetero.batches.fetch import Description
from hetero.batches.request import BatchRequest
from hetero.batches.skips import Skips
from hetero.control.members.directory import Directory, EndpointRecord
from hetero.reader.connection import EndpointConnection, Fetched
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader
from hetero.wire.faults import CallFailedError, Fault

NBYTES = 1000


class Call:
    """A fetch that the test answers."""

    def __init__(self, connection: EndpointConnection, request: BatchRequest, nbytes: int) -> None:
        self._nbytes = nbytes
        self.connection = connection
        self.request = request
        self.is_cancelled = False
        self._ended = threading.Event()
        self._outcome: Fetched | Exception | None = None

    def end(self, outcome: Fetched | Exception) -> None:
        self._outcome = outcome
        self._ended.set()

    def answer(self, skips: Skips | None = None) -> None:
        batch = {"index": self.request.work.indices, "from": self.connection.record.endpoint_id}
        self.end(Fetched(batch=batch, nbytes=self._nbytes, num_queued=0, skips=skips))

    def cancel(self) -> None:
        self.is_cancelled = True
        self.end(CallFailedError(Fault.CANCELLED, "by the reader"))

    def result(self) -> Fetched:
        assert self._ended.wait(100)
        assert self._outcome is not None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Stage:
    """Endpoints that the test controls, with a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tools: Any) -> None:
        self.now_s = 1000.0
        self.nbytes = NBYTES
        self.calls: list[Call] = []
        self.fleets: list[Fleet] = []
        self.tools = tools
        stage = self

        class Connection(EndpointConnection):
            def prepare(self, *_: Any, **__: Any) -> Description:
                return Description(num_samples=100, fingerprint="f", environment={})

            def fetch(self, request: BatchRequest, *, on_call: Callable[[Any], None], **_: Any) -> Fetched:
                call = Call(self, request, stage.nbytes)
                stage.calls.append(call)
                on_call(call)
                return call.result()

        monkeypatch.setattr("hetero.reader.fleet.EndpointConnection", Connection)

    def read(
        self, requests: list[BatchRequest], *, num_endpoints: int = 2, num_observed: int = 128, **options: Any
    ) -> Reader:
        records = [
            EndpointRecord(endpoint_id=f"algo-{n}/0", host=f"algo-{n}", address="127.0.0.1:9", incarnation="a")
            for n in range(1, num_endpoints + 1)
        ]
        fleet = Fleet(Directory(records), None, job_id="x", clock=lambda: self.now_s)
        self.fleets.append(fleet)
        fleet.describe(requests[0].spec)
        self.tools.wait_for(
            lambda: all(c.serves(requests[0].spec) for c in fleet.router.endpoints) and fleet.router.endpoints
        )
        for _ in range(num_observed):
            fleet.hedging.observe(replace(requests[0], verify=False), 0.1)
        return Reader(fleet, iter(requests), **options)

    def pending(self, position: int, num: int = 1) -> list[Call]:
        """Return the calls for a batch that are in progress, once there are so many."""

        def found() -> list[Call]:
            return [call for call in list(self.calls) if call.request.position == position and not call._ended.is_set()]

        self.tools.wait_for(lambda: len(found()) == num)
        return found()

    def hedge(self, reader: Reader, after_s: float = 0.6) -> float:
        """Do what a consumer that waits would do, some time later."""
        self.now_s += after_s
        with reader._fleet.lock:
            return reader._fetchers.hedge_if_overdue()

    def settled(self, reader: Reader) -> None:
        """Wait until nothing is in progress, and check that nothing was forgotten."""
        window = reader._window
        self.tools.wait_for(lambda: not window.attempts)
        assert [connection.num_outstanding for connection in reader._fleet._table.all()] == [0] * len(
            reader._fleet.router.endpoints
        )
        assert window._held_bytes == sum(outcome.nbytes for outcome in window.outcomes.values())  # type: ignore[union-attr]

"""Connections to endpoints that are processes of their own, and that are killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from hetero.control.security import call_metadata
from hetero.endpoint.link import EndpointLink
from hetero.reader.connection import EndpointConnection
from hetero.wire.faults import Fault
from hetero.wire.limits import Limits
from tests.support.batch_path.calls import LARGE, fault_of, in_thread


def connected(job: Any, tools: Any, **arguments: Any) -> tuple[EndpointConnection, Any, int]:
    """Connect to a real endpoint that serves. Return its process id too."""
    pool = job.pool()
    connection = EndpointConnection(pool.records[0], job.token, job_id="test-job", limits=Limits())
    wanted = tools.spec(**arguments)
    connection.prepare(wanted, timeout_s=60.0)
    return connection, tools.requests(wanted), pool.pids[0]


def fetch_one(connection: EndpointConnection, request: Any, allocate: Any = None) -> Any:
    return connection.fetch(request, timeout_s=60.0, allocate=allocate, on_call=lambda call: None).batch


@pytest.mark.integration
def test_endpoint_killed_while_idle_ends_the_link(job: Any, tools: Any) -> None:
    connection, wanted, pid = connected(job, tools)
    fetch_one(connection, wanted[0])
    link = connection._open_link()
    os.kill(pid, signal.SIGKILL)
    tools.wait_for(lambda: link.why_ended)
    assert not link._idle
    assert not link._connections
    assert fault_of(lambda: fetch_one(connection, wanted[1]))[0] is Fault.UNSENT
    connection.disconnect()


@pytest.mark.integration
def test_endpoint_killed_while_it_computes_fails_the_fetch(job: Any, tools: Any) -> None:
    connection, wanted, pid = connected(job, tools, sample_s=30.0)
    calls: list[Any] = []
    join = in_thread(lambda: connection.fetch(wanted[0], timeout_s=60.0, allocate=None, on_call=calls.append))
    tools.wait_for(lambda: not connection._open_link()._idle)
    tools.wait_for(lambda: calls[0].is_sent)
    os.kill(pid, signal.SIGKILL)
    assert fault_of(join)[0] is Fault.UNREACHABLE
    connection.disconnect()


@pytest.mark.integration
def test_endpoint_killed_in_the_middle_of_an_answer_fails_the_fetch(
    job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, wanted, pid = connected(job, tools, width=LARGE // 32)

    def allocate(nbytes: int) -> memoryview:
        if nbytes > 1000:
            os.kill(pid, signal.SIGKILL)
        return memoryview(bytearray(nbytes))

    monkeypatch.setattr("hetero.wire.framing._allocate", allocate)
    assert fault_of(lambda: fetch_one(connection, wanted[0]))[0] is Fault.CUT_OFF
    connection.disconnect()


@pytest.mark.integration
def test_endpoint_killed_while_a_reader_begins_to_attend_fails_the_call(job: Any, tools: Any) -> None:
    pool = job.pool()
    os.kill(pool.pids[0], signal.SIGSTOP)
    pid = pool.pids[0]
    record = pool.records[0]
    link = EndpointLink(record, call_metadata(job.token, "test-job", incarnation=record.incarnation), Limits())
    join = in_thread(link.attend)
    os.kill(pid, signal.SIGKILL)
    assert fault_of(join)[0] is Fault.UNREACHABLE
    link.close()


@pytest.mark.integration
def test_readers_beyond_the_bound_of_requests_are_all_served(job: Any, tools: Any) -> None:
    record = job.pool().records[0]
    wanted = tools.spec()
    connections = [EndpointConnection(record, job.token, job_id="test-job", limits=Limits()) for _ in range(80)]
    for connection in connections:
        connection.prepare(wanted, timeout_s=60.0)
    expected = tools.digest(tools.local(job.script, tools.requests(wanted)[:2]))
    for request, bytes_ in zip(tools.requests(wanted), expected, strict=False):
        batches = [fetch_one(connection, request) for connection in connections]  # each keeps its connection
        assert set(tools.digest(batches)) == {bytes_}
    for connection in connections:
        connection.disconnect()

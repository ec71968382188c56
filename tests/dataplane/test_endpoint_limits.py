"""What an endpoint's process may open, and what it counts of strangers."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from hetero.control.security import call_metadata
from hetero.dataplane.endpoint.transport import GREETING, TICKET_BYTES
from hetero.dataplane.reader.transport import Link
from hetero.wire.limits import Limits

pytestmark = pytest.mark.integration


@pytest.mark.fault("F29")
def test_endpoint_may_open_more_descriptors_than_a_shell_allows(job: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        pid = job.pool().pids[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (line,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "open files" in line]
    assert int(line.split()[3]) == min(hard, 2**16)


@pytest.mark.attack("A1")
def test_strangers_at_both_ports_count_as_authentication_failures(job: Any, tools: Any) -> None:
    pool = job.pool()
    record = pool.records[0]
    link = Link(record, call_metadata(job.token, "test-job", incarnation=record.incarnation), Limits())
    with contextlib.closing(link):
        link.attend()
        for hello in (b"GET / HTTP/1.1", GREETING + bytes(TICKET_BYTES), GREETING):  # the last one just leaves again
            with socket.create_connection(("127.0.0.1", link._port), 10.0) as stranger:
                stranger.sendall(hello)
        # Before the link ends: with it ends its ticket, and a connection of its own that was not heard out would count.
        tools.wait_for(lambda: pool.statistics().get("auth_failures") == 2)
    assert any("without a ticket of this job (1 so far)" in line for line in job.lines)

"""What an endpoint's process may open, and what it counts of unauthenticated peers."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from hetero.control.security import call_metadata
from hetero.endpoint.link import EndpointLink
from hetero.wire.limits import GREETING, SESSION_TOKEN_BYTES, Limits

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
def test_unauthenticated_peers_at_both_ports_count_as_authentication_failures(job: Any, tools: Any) -> None:
    pool = job.pool()
    record = pool.records[0]
    link = EndpointLink(record, call_metadata(job.token, "test-job", incarnation=record.incarnation), Limits())
    with contextlib.closing(link):
        link.attend()
        for hello in (
            b"GET / HTTP/1.1",
            GREETING + bytes(SESSION_TOKEN_BYTES),
            GREETING,
        ):  # the last one leaves
            with socket.create_connection(("127.0.0.1", link._port), 10.0) as peer:
                peer.sendall(hello)
        # Before the link and its token end, because a connection of the link with an unread greeting would count.
        tools.wait_for(lambda: pool.statistics().get("auth_failures") == 2)
    assert any("without a session token of this job (1 so far)" in line for line in job.lines)

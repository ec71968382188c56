"""Hubs of two hosts, a trainer's and a data host's, over real gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control import security
from hetero.control.hub import Hub
from hetero.control.members.membership import Member, Membership
from hetero.control.status import HostStatus, SessionOptions
from hetero.errors import ClusterError
from hetero.wire.tls import Tls

TOKEN = security.Token.generate()
MEMBERS = (Member(host="trainer", role=Role.TRAINER), Member(host="data", role=Role.DATA))
SESSION_OPTIONS = SessionOptions(
    data_timeout_s=1,
    prepare_timeout_s=2,
    emulate_step_s=None,
    purity_checks=0,
    warmup_steps=1,
    max_batch_bytes=12_345,
    data_service="tf",
    wants_step_times=True,
)


class Names:
    """A name service: knows the hosts in ``ports``, and can be made to fail or to block."""

    def __init__(self, ports: dict[str, int]) -> None:
        self.ports = ports
        self.is_down = False
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()

    def __call__(self, name: str) -> str:
        self.asked.set()
        self.answers.wait(100.0)
        if self.is_down or name not in self.ports:
            raise ClusterError(f"name resolution (DNS) of host {name!r} failed")
        return f"127.0.0.1:{self.ports[name]}"


def make_hub(
    host: str,
    ports: dict[str, int],
    *,
    token: security.Token | None = TOKEN,
    port: int = 0,
    job_id: str = "job-a",
    life: int = 1,
    names: Names | None = None,
    num_ranks: int = 1,
    tls: Tls | None = None,
) -> Hub:
    """Return the hub of one of two hosts. ``ports`` collects where they listen."""
    own = HostStatus(host=host, incarnation=f"{host}-{life}", version="1", script_digest="d")
    hub = Hub(
        Membership(MEMBERS, own, timings=Timings(), clock=time.monotonic),
        address="127.0.0.1",
        port=port,
        resolve=names or Names(ports),
        peers=tuple(member.host for member in MEMBERS if member.host != host),
        token=token,
        job_id=job_id,
        remote=True,
        session_options=SESSION_OPTIONS,
        heartbeat_s=0.3,
        num_ranks=num_ranks,
        tls=tls,
    )
    ports[host] = hub.port
    return hub


def wait_for(hub: Hub, predicate: Callable[[Membership], bool], timeout_s: float = 300.0) -> None:
    """Wait until the membership fulfils ``predicate``."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with hub.membership() as membership:
            if predicate(membership):
                return
        hub.wait(0.1)
    pytest.fail("the awaited state did not come")

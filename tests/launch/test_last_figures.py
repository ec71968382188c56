"""How long the first trainer host waits for the last figures of data hosts, before it writes the report."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.control.status import HostState
from hetero.launch import roles


@pytest.mark.parametrize(
    ("states", "waits_s"),
    [
        ([HostState.DONE], 0.0),
        ([HostState.SERVING, HostState.DRAINING, HostState.DRAINING, HostState.DONE], 3.0),
        ([HostState.DRAINING], 12.0),  # it does not end
    ],
)
def test_trainer_host_waits_for_data_hosts_at_work_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, states: list[HostState], waits_s: float
) -> None:
    now_s = [0.0]

    def state() -> HostState:
        return states[min(int(now_s[0]), len(states) - 1)]

    def wait() -> None:
        now_s[0] += 1.0

    membership: Any = SimpleNamespace(at_work=lambda _role: ["algo-1"] if state() is not HostState.DONE else [])
    hub = SimpleNamespace(membership=lambda: contextlib.nullcontext(membership))
    host: Any = SimpleNamespace(hub=hub)
    monkeypatch.setattr(roles, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    roles._await_data_hosts(host, 12.0, wait)
    assert now_s[0] == waits_s

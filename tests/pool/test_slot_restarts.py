"""How soon and how often a host restarts what crashed: the rules, and pools that follow them."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hetero.endpoint.options import EndpointOptions
from hetero.errors import AuthenticationError, ConfigError
from hetero.pool.pool import PoolOptions
from hetero.pool.slot import RestartBudget
from hetero.system.waits import backoff_s

HOUR_S = 3600.0
OFTEN = 1e-6
"""Of `PoolOptions.stable_s`: every process is stable when it is first looked at."""


@pytest.mark.parametrize(
    ("limit", "crashes_h", "expected"),
    [
        (2, [0.0, 0.0, 0.0], [True, True, False]),
        (0, [0.0, 100.0], [False, False]),
        (2, [24.0 * day for day in range(40)], [True] * 40),  # one a day, for longer than the budget
        (2, [0.0, 0.5, 1.4], [True, True, False]),  # no hour without a crash
        (2, [0.0, 0.0, 1.0, 1.0], [True, True, True, False]),  # an hour gives one back, not all
        (2, [0.0, 0.0, 9.0, 9.0, 9.0], [True, True, True, True, False]),  # nor more than there were
        (1, [0.0, 0.5, 1.0, 1.5], [True, False, True, False]),  # a crash without a restart does not count
    ],
)
def test_budget_gives_back_a_restart_for_every_stable_hour(
    limit: int, crashes_h: list[float], expected: list[bool]
) -> None:
    budget = RestartBudget(limit, HOUR_S)
    assert [budget.take(1e6 + HOUR_S * crash_h) for crash_h in crashes_h] == expected


def test_budget_says_when_a_restart_comes_back() -> None:
    budget = RestartBudget(2, HOUR_S)
    assert [budget.take(now_s) for now_s in (1000.0, 1600.0, 1700.0)] == [True, True, False]
    assert budget.next_s == 1600.0 + HOUR_S
    assert not budget.take(budget.next_s - 1.0)
    assert budget.take(budget.next_s)
    assert RestartBudget(0, HOUR_S).next_s == math.inf


def test_backoff_begins_nearly_at_once_and_is_bounded() -> None:
    waits_s = [backoff_s(num_crashes) for num_crashes in range(1, 2000)]
    assert waits_s[:3] == [0.2, 0.4, 0.8]
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] == 10.0


def crash(pool: Any, tools: Any) -> None:
    """Kill the only endpoint and wait for the next one."""
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    tools.wait_for(lambda: pool.failure or (pool.pids and pid not in pool.pids))


def fork_server_of(pid: int) -> int:
    """Return the process that started an endpoint."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("stable_s", "expected"), [(OFTEN, ["0.2 s"] * 3), (60.0, ["0.2 s", "0.4 s", "0.8 s"])])
def test_endpoint_that_was_stable_is_restarted_at_once(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture, stable_s: float, expected: list[str]
) -> None:
    pool = job.pool(stable_s=stable_s)
    for _ in expected:
        crash(pool, tools)
    assert [message[-5:] for message in caplog.messages if "starting it again in" in message] == expected


@pytest.mark.parametrize(("stable_s", "expected"), [(OFTEN, ["0.2 s"] * 2), (60.0, ["0.2 s", "0.4 s"])])
def test_fork_server_that_was_stable_is_restarted_at_once(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture, stable_s: float, expected: list[str]
) -> None:
    pool = job.pool(stable_s=stable_s)
    for _ in expected:
        (pid,) = pool.pids
        os.kill(fork_server_of(pid), signal.SIGKILL)
        tools.wait_for(lambda pid=pid: pool.pids and pid not in pool.pids)
    assert [message[-5:] for message in caplog.messages if "starting it again in" in message] == expected


def test_pool_that_is_stable_between_crashes_never_gives_up(job: Any, tools: Any) -> None:
    pool = job.pool(endpoint_restarts=1, stable_s=OFTEN)
    for _ in range(3):
        crash(pool, tools)
    assert pool.failure is None
    assert pool.num_restarts == 3


def test_endpoint_that_no_restart_was_left_for_gets_the_next_one(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = job.pool(num_endpoints=2, endpoint_restarts=1, stable_s=0.03)  # given back after 1.8 s
    before = pool.pids
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    tools.wait_for(lambda: "no restarts are left, the next one in" in caplog.text)
    tools.wait_for(lambda: len(pool.records) == 2)
    assert not set(pool.pids) & set(before)
    assert pool.num_restarts == 2
    assert pool.failure is None


class Refilled(RestartBudget):
    """A budget that is empty until the test puts something in."""

    num_left = 0

    @property
    def next_s(self) -> float:
        """When there will be one: not in this test's time."""
        return 1e12

    def take(self, _now_s: float) -> bool:
        """Use one restart if any is left."""
        if not self.num_left:
            return False
        self.num_left -= 1
        return True


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Refilled:
    """What pools of this test have."""
    refilled = Refilled(1, 1.0)
    monkeypatch.setattr("hetero.pool.pool.RestartBudget", lambda *_: refilled)
    return refilled


@pytest.mark.parametrize("victim", ["endpoint", "fork_server"])
def test_host_without_any_endpoint_or_restart_serves_again_with_the_next_one(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture, budget: Refilled, victim: str
) -> None:
    pool = job.pool(gives_up=False)
    (before,) = pool.pids
    os.kill(before if victim == "endpoint" else fork_server_of(before), signal.SIGKILL)
    tools.wait_for(lambda: "no restarts are left, the next one in" in caplog.text)
    assert pool.records == ()
    budget.num_left = 1
    tools.wait_for(lambda: len(pool.records) == 1)
    assert before not in pool.pids
    assert pool.failure is None
    assert pool.num_restarts == 1


def test_host_that_has_never_served_does_not_wait_for_restarts(job: Any, tools: Any, budget: Refilled) -> None:
    ends = "import os\nos.register_at_fork(after_in_child=lambda: os._exit(3))\n"
    job.script.write_text(ends + job.script.read_text())
    pool = job.pool(ready=False, gives_up=False)
    tools.wait_for(lambda: pool.failure is not None)
    assert "algo-1/0 exited with 3" in str(pool.failure)


def test_pool_that_has_given_up_starts_nothing_again(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2)
    first, second = pool.pids
    job.token_path.unlink()
    os.kill(first, signal.SIGKILL)
    tools.wait_for(lambda: pool.failure is not None)  # the next one finds no token
    assert isinstance(pool.failure, AuthenticationError)
    os.kill(second, signal.SIGKILL)
    tools.wait_for(lambda: not pool.pids)
    pool.stop()
    assert pool.num_restarts == 1


def test_stable_time_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="stable_s is 0; expected more than 0"):
        PoolOptions(
            endpoint=EndpointOptions(script="s.py", host="h", address="127.0.0.1", num_endpoints=1, job_id="x"),
            stable_s=0,
        )

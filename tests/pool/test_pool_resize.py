"""A pool that grows and shrinks while a rank reads."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.pool.pool import EndpointPool
from hetero.pool.slot import LEAVE_S, MAX_LEAVE_S, Liveness, Slot
from hetero.reader.reader import Reader


def children() -> set[int]:
    """Return the processes that this one has started."""
    return {process.pid for process in psutil.Process().children()}


def test_pool_that_begins_without_endpoints_is_ready_and_starts_them_later(
    job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, turns = EndpointPool._handle_events, []
    monkeypatch.setattr(EndpointPool, "_handle_events", lambda pool, wait_s: (turns.append(1), handle(pool, wait_s)))
    before = children()
    pool = job.pool(num_endpoints=2, num_at_start=0)
    assert (pool.records, pool.num_running, pool.num_used) == ((), 0, 0)
    tools.wait_for(lambda: len(turns) > 2)
    assert children() == before, "the script is not imported until an endpoint is wanted"
    pool.resize(1)
    tools.wait_for(lambda: [record.endpoint_id for record in pool.records] == ["algo-1/0"])
    pool.resize(2)
    tools.wait_for(lambda: len(job.directory.records()) == 2)
    assert pool.num_restarts == 0


def test_pool_without_a_wanted_endpoint_ends_its_fork_server_and_starts_it_again(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    before = children()
    pool = job.pool(num_endpoints=1, num_at_start=1)
    assert children() > before
    pool.resize(0)
    tools.wait_for(lambda: children() == before)
    pool.resize(1)
    tools.wait_for(lambda: len(pool.records) == 1)
    assert (pool.num_restarts, pool.failure, caplog.messages) == (0, None, [])


def test_pool_that_stops_during_the_import_of_the_script_does_not_wait_for_it(
    job: Any, tools: Any, tmp_path: Path
) -> None:
    reached = tmp_path / "importing"
    slow = tmp_path / "slow.py"
    slow.write_text(f"import time\nopen({str(reached)!r}, 'w').close()\ntime.sleep(600)\n")
    pool = job.pool(script=str(slow), ready=False)
    tools.wait_for(reached.exists)
    before_s = time.monotonic()
    pool.stop(30.0)
    assert time.monotonic() - before_s < 15.0


def test_endpoint_that_is_removed_finishes_its_batches_and_ends_without_a_failure(
    job: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pool = job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(sample_s=0.05), num_batches=24)
    fleet = job.fleet()
    with Reader(fleet, iter(wanted), prefetch_factor=4) as reader:
        found = [next(reader) for _ in range(8)]
        tools.wait_for(lambda: pool.num_used == 2)
        pool.resize(1)
        tools.wait_for(lambda: len(job.directory.records()) == 1)
        assert pool.num_running == 2, "it has requests to answer"
        found += list(reader)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    tools.wait_for(lambda: len(pool.pids) == 1)
    assert (fleet.stats.endpoint_losses, fleet.stats.failovers, fleet.stats.retries) == (0, 0, 0)
    assert (pool.num_restarts, pool.failure, caplog.messages) == (0, None, [])


def test_endpoint_that_was_removed_comes_back_as_a_new_process(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=1)
    before = pool.records
    pool.resize(0)
    tools.wait_for(lambda: pool.pids == ())
    pool.resize(1)
    tools.wait_for(lambda: len(pool.records) == 1)
    assert pool.records[0].incarnation != before[0].incarnation
    assert pool.records[0].launch == before[0].launch
    assert pool.num_restarts == 0


def leaving_slot() -> Slot:
    slot = Slot(0, "algo-1/0", lambda: Liveness(bound_s=15.0, build_bound_s=15.0))
    slot.begin("1-1")
    slot.report({"num_batches": 3, "num_requests": 2}, 9.0)
    slot.leave(10.0)
    return slot


def test_slot_ends_when_it_has_answered_everything_since_readers_left_it() -> None:
    slot = leaving_slot()
    assert slot.is_used
    assert not slot.may_end(10.0 + LEAVE_S)
    assert not slot.is_idle_after_leaving
    slot.report({"num_batches": 5, "num_requests": 0}, 10.1)  # a request of a rank of another host may still come
    assert slot.is_idle_after_leaving
    assert not slot.may_end(10.0 + LEAVE_S)
    slot.report({"num_batches": 6, "num_requests": 0}, 10.0 + LEAVE_S)
    assert slot.may_end(10.0 + LEAVE_S)
    slot.was_asked_to_end = True
    assert not slot.may_end(10.0 + LEAVE_S)


def test_slot_that_never_becomes_idle_ends_at_last() -> None:
    slot = leaving_slot()
    slot.report({"num_requests": 1}, 10.0 + LEAVE_S)
    assert not slot.may_end(9.9 + MAX_LEAVE_S)
    assert slot.may_end(10.0 + MAX_LEAVE_S)


def test_slot_begins_anew_after_it_left() -> None:
    slot = leaving_slot()
    slot.retire()
    assert (slot.leaving_s, slot.is_used, slot.past_statistics) == (None, False, {"num_batches": 3})

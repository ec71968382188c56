"""What HETERO_FAULTS does to real endpoints, and that the reader delivers the same nevertheless."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.reader.reader import Reader


def read(job: Any, tools: Any, rules: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Read from two endpoints. One does wrong. Return the fleet."""
    wanted = tools.requests(tools.spec(width=500, sample_s=0.005), 50)
    job.pool("algo-1")
    with monkeypatch.context() as patch:
        patch.setenv("HETERO_FAULTS", rules)
        job.pool("algo-2")
    fleet = job.fleet(**options)
    assert tools.digest(list(Reader(fleet, iter(wanted)))) == tools.digest(tools.local(job.script, wanted))
    return fleet


@pytest.mark.fault("F22")
def test_damaged_batches_are_asked_for_again(job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = read(job, tools, "send:corrupt:p=0.3:seed=1:times=2", monkeypatch)
    assert fleet.stats.checksum_errors >= 1
    assert "fault on purpose: send corrupt" in "\n".join(job.lines)


@pytest.mark.fault("F21")
def test_truncated_batches_are_asked_for_again(job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read(job, tools, "send:truncate:p=0.3:seed=1:times=3", monkeypatch)
    assert "fault on purpose: send truncate" in "\n".join(job.lines)


@pytest.mark.fault("F23")
@pytest.mark.parametrize("action", ["unavailable", "busy"])
def test_requests_turned_away_are_asked_again(
    job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    read(job, tools, f"Fetch:{action}:p=0.3:seed=1", monkeypatch)
    assert f"fault on purpose: Fetch {action}" in "\n".join(job.lines)


@pytest.mark.fault("F1")
def test_endpoint_that_dies_at_work_is_started_again(job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read(job, tools, "compute:kill:at=5", monkeypatch)
    tools.wait_for(lambda: job.pools[1].num_restarts >= 1)


def test_endpoint_that_hangs_at_work_holds_up_nothing(job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the user's code hangs, which has no time limit. The endpoint is not stuck, but overtaken.
    fleet = read(job, tools, "compute:hang:at=10", monkeypatch, data_timeout_s=20.0)
    assert fleet.stats.hedges_won >= 1
    assert fleet.stats.endpoint_losses == 0
    assert job.pools[1].num_stuck == 0
    assert "fault on purpose: compute hang" in "\n".join(job.lines)


@pytest.mark.parametrize("site", ["Prepare", "Attend"])
def test_calls_that_fail_at_first_are_made_again(
    job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    monkeypatch.setenv("HETERO_FAULTS", f"{site}:unavailable:times=2")
    job.pool("algo-1")
    wanted = tools.requests(tools.spec(), 5)
    assert len(list(Reader(job.fleet(), iter(wanted)))) == 5
    assert "\n".join(job.lines).count(f"fault on purpose: {site} unavailable") == 2


def test_malformed_faults_are_the_endpoints_error(job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero.errors import ConfigError

    monkeypatch.setenv("HETERO_FAULTS", "compute:explode")
    pool = job.pool("algo-1", ready=False)
    with pytest.raises(ConfigError, match="no action 'explode'"):
        pool.wait_ready(300.0)

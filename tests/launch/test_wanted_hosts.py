"""The number of data hosts that a job could use, from totals of its ranks and endpoints."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hetero.control.members.directory import EndpointRecord
from hetero.control.status import HostStatus, RankReport
from hetero.documents.records import decode
from hetero.launch.wanted_hosts import BATCHES_COUNTER, BUSY_COUNTER, Totals, WantedHosts, totals_of
from hetero.metrics.steps import StepSummary


def totals(
    at_s: float, *, compute_s: float = 0.1, batch_s: float = 1.0, num_ranks: int = 2, slots: float = 4, trainer: int = 0
) -> Totals:
    """Return the totals of a job whose ranks never wait."""
    steps = int(at_s / compute_s)
    batches = steps * num_ranks
    return Totals(
        steps=dict.fromkeys(range(num_ranks), (steps, steps * compute_s)),
        num_batches=batches,
        busy_s=batches * batch_s,
        slots_per_data_host=slots,
        trainer_slots=trainer,
    )


def estimate(windows: list[Totals]) -> Any:
    wanted = WantedHosts()
    return [wanted.observe(window) for window in windows][-1]


def test_number_follows_from_demand_and_cost_of_a_batch() -> None:
    # 2 ranks take 10 batches/s each, a batch takes 1 s: 20 slots at 90 % are 22.2, and a host has 4.
    found = estimate([totals(at_s) for at_s in (0, 10, 20, 30, 40)])
    assert (found.hosts, found.low, found.high) == (6, 6, 6)


def test_ranks_that_wait_do_not_ask_for_less() -> None:
    def starved(at_s: float) -> Totals:  # a tenth of the steps, with the same compute in each
        steps = int(at_s)
        return Totals(
            steps={0: (steps, 0.1 * steps)},
            num_batches=steps,
            busy_s=1.0 * steps,
            slots_per_data_host=1,
            trainer_slots=0,
        )

    assert estimate([starved(at_s) for at_s in (0, 10, 20, 30)]).hosts == 12


def test_endpoints_of_trainer_hosts_count() -> None:
    assert estimate([totals(at_s, trainer=20) for at_s in (0, 10, 20, 30)]).hosts == 1
    assert estimate([totals(at_s, trainer=30) for at_s in (0, 10, 20, 30)]).hosts == 0


def test_interval_covers_what_varies() -> None:
    windows, at_s = [totals(0)], 0
    for batch_s in (0.8, 1.2, 0.9, 1.1, 1.0):
        before = windows[-1]
        at_s += 10
        after = totals(at_s)
        busy_s = before.busy_s + (after.num_batches - before.num_batches) * batch_s
        windows.append(
            Totals(
                steps=after.steps,
                num_batches=after.num_batches,
                busy_s=busy_s,
                slots_per_data_host=1,
                trainer_slots=0,
            )
        )
    found = estimate(windows)
    assert found.hosts == 23
    assert (found.low, found.high) == (19, 26)


@pytest.mark.parametrize(
    "windows",
    [
        [totals(0)],
        [totals(0), totals(10), totals(20)],  # two differences
        [totals(10)] * 6,  # nothing happens
        [totals(at_s, slots=0) for at_s in (0, 10, 20, 30, 40)],  # no data host serves
        [totals(at_s, num_ranks=0) for at_s in (0, 10, 20, 30, 40)],
    ],
)
def test_too_little_is_no_estimate(windows: list[Totals]) -> None:
    assert estimate(windows) is None


def test_reports_that_come_at_different_times_make_one_window() -> None:
    windows = []
    for at_s in range(0, 50, 10):
        after = totals(at_s)
        before = windows[-1] if windows else after
        windows.append(dataclasses.replace(after, num_batches=before.num_batches, busy_s=before.busy_s))
        windows.append(after)
    assert estimate(windows).hosts == 6


def test_number_that_cannot_be_measured_any_more_is_forgotten() -> None:
    now_s = [0.0]
    wanted = WantedHosts(lambda: now_s[0])
    for at_s in (0, 10, 20, 30):
        found = wanted.observe(totals(at_s))
    assert found is not None
    now_s[0] = 100.0
    assert wanted.observe(totals(30)) == found
    now_s[0] = 130.0
    assert wanted.observe(totals(30)) is None


def test_estimate_follows_the_latest_two_minutes_and_slow_steps_have_one_too() -> None:
    now_s = [0.0]
    wanted = WantedHosts(lambda: now_s[0])
    at_s, busy_s, batches = 0, 0.0, 0
    found = []
    for batch_s in (1.0,) * 6 + (2.0,) * 3:  # a window lasts longer than two minutes
        now_s[0] += 200.0
        at_s += 10
        after = totals(at_s)
        busy_s += (after.num_batches - batches) * batch_s
        batches = after.num_batches
        found.append(wanted.observe(dataclasses.replace(after, busy_s=busy_s)))
    assert [each and each.hosts for each in found[2:6]] == [None, 6, 6, 6]
    assert (found[-1].hosts, found[-1].low) == (12, 12)  # only the last three windows count


def test_totals_are_those_of_the_last_statuses() -> None:
    loader: dict[str, Any] = {
        "name": "train",
        "num_steps": 12,
        "num_samples": 120,
        "batch_samples": 10,
        "warmup_steps": 2,
        "num_steps_measured": 10,
        "num_samples_measured": 100,
        "compute_total_s": 3.0,
        "data_wait_total_s": 1.0,
        "step_time_mean_s": 0.4,
        "step_time_p50_s": 0.4,
        "step_time_p95_s": 0.4,
        "data_wait_mean_s": 0.1,
        "data_wait_p50_s": 0.1,
        "data_wait_p95_s": 0.1,
        "utilisation": 0.75,
        "samples_per_s": 25.0,
    }
    decode(StepSummary, loader)
    report = RankReport(rank=1, summaries_json=(json.dumps(loader).encode(),))

    def host(name: str, batches: int, busy_ms: int, **more: Any) -> HostStatus:
        counters = {BATCHES_COUNTER: batches, BUSY_COUNTER: busy_ms}
        return HostStatus(host=name, incarnation="i", version="1", script_digest="d", counters=counters, **more)

    def endpoint(name: str, number: int) -> EndpointRecord:
        return EndpointRecord(endpoint_id=f"{name}/{number}", host=name, address="127.0.0.1:1", incarnation="i")

    found = totals_of(
        [host("dnn", 1, 500, ranks=(report,))],
        [host("data-1", 10, 4000), host("data-2", 5, 2000)],
        [endpoint("dnn", 0), endpoint("data-1", 0), endpoint("data-1", 1), endpoint("data-2", 0)],
    )
    assert found == Totals(steps={1: (10, 3.0)}, num_batches=16, busy_s=6.5, slots_per_data_host=1.5, trainer_slots=1)

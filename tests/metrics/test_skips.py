"""What a loader skipped: counted, listed, logged, and too much at some point."""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any

import pytest

from hetero.batches.skips import Skip, Skips
from hetero.errors import DatasetError, ExitCode, first_line
from hetero.metrics import SkippedSample, StepSummary, StepTimer
from hetero.metrics import skips as skips_module
from hetero.metrics.skips import Listing, SkipLog


@pytest.fixture(autouse=True)
def _fresh_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skips_module, "_listing", Listing())


def some(*indices: object, epoch: int = 2, more: int = 0, exception: str = "ValueError: bad") -> Skips:
    listed = tuple(Skip(index=str(index), exception=exception) for index in indices)
    return Skips(num_skipped=len(listed) + more, listed=listed, epoch=epoch, host="algo-1/0")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_skips_are_counted_listed_and_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    log = SkipLog("train", "photos", max_skips=5)
    with caplog.at_level(logging.WARNING, "hetero"):
        log.note(some(17, 3))
    count, listed = log.summary()
    assert count == 2
    assert listed[0] == SkippedSample(index="17", epoch=2, host="algo-1/0", exception="ValueError: bad")
    assert messages(caplog) == [
        "loader train skipped sample 17 in epoch 2 on algo-1/0: ValueError: bad (1 of at most 5)",
        "loader train skipped sample 3 in epoch 2 on algo-1/0: ValueError: bad (2 of at most 5)",
    ]


def test_skips_beyond_the_bound_are_an_error_that_names_them() -> None:
    log = SkipLog("train", "photos", max_skips=2)
    log.note(some(17, 3))
    with pytest.raises(DatasetError) as caught:
        log.note(some(40))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.exit_code is ExitCode.DATASET_FAILED
    assert first_line(error) == (
        "data set 'photos' failed on algo-1/0 at sample 40: ValueError: bad; "
        "loader train skipped 3 samples, max_skips=2 allows no more: 17, 3, 40"
    )
    assert str(error).splitlines()[1:] == [
        f"    sample {index} in epoch 2 on algo-1/0: ValueError: bad" for index in (17, 3, 40)
    ]
    with pytest.raises(DatasetError, match="skipped 4 samples"):
        log.note(some(41))
    with pytest.raises(DatasetError, match="max_skips=0 allows no more: 1"):
        SkipLog("train", "photos", max_skips=0).note(some(1))


def test_skips_error_of_thousands_stays_bounded() -> None:
    log = SkipLog("train", "photos", max_skips=5000)
    with pytest.raises(DatasetError) as caught:
        log.note(some(*range(100), more=5000))
    assert len(first_line(caught.value)) < 600
    assert first_line(caught.value).endswith(", ...")
    assert str(caught.value).endswith("    and 5000 more")
    with pytest.raises(DatasetError, match=r"x, \.\.\."):
        SkipLog("train", "photos", max_skips=0).note(some("x" * 400))


def test_skips_log_at_most_ten_lines_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = SkipLog("train", "photos", max_skips=10_000, clock=lambda: now_s)
    with caplog.at_level(logging.WARNING, "hetero"):
        for index in range(200):
            log.note(some(index, more=1))
            now_s += 0.01
        assert len(caplog.records) == 10
        now_s = 11.0
        log.note(some(999))
    assert messages(caplog)[10:] == [
        "loader train skipped 390 more samples",
        "loader train skipped sample 999 in epoch 2 on algo-1/0: ValueError: bad (401 of at most 10000)",
    ]


def test_skips_of_all_loaders_of_a_process_are_reported_within_one_bound() -> None:
    logs = [SkipLog(f"loader-{n}", "photos", max_skips=10_000) for n in range(3)]
    for index in range(60):
        for log in logs:
            log.note(some(index))
    assert [log.summary()[0] for log in logs] == [60] * 3
    assert sum(len(log.summary()[1]) for log in logs) == 100


def test_skips_with_long_texts_are_reported_within_the_bytes_of_a_heartbeat() -> None:
    log = SkipLog("train", "photos", max_skips=10_000)
    snow = "\N{SNOWMAN}"  # six bytes each in JSON
    for _ in range(100):
        log.note(some(snow * 64, exception=snow * 160))
    log.note(some(1))  # would have room, but a list with holes would look complete
    count, listed = log.summary()
    assert count == 101
    assert 5 < len(listed) < 20
    assert "1" not in {sample.index for sample in listed}
    assert len(json.dumps([sample.exception for sample in listed])) < 16 * 1024


def test_skip_log_travels_to_workers() -> None:
    log = SkipLog("train", "photos", max_skips=5)
    log.note(some(1))
    assert pickle.loads(pickle.dumps(log)).summary() == log.summary()


def test_step_summary_holds_what_was_skipped_and_survives_json() -> None:
    timer = StepTimer("train")
    assert (timer.summary().num_skips, timer.summary().skips) == (0, ())
    timer.skips = SkipLog("train", "photos", max_skips=5)
    timer.skips.note(some(17))
    summary = timer.summary()
    assert (summary.num_skips, summary.skips[0].index) == (1, "17")
    value: Any = json.loads(json.dumps(summary.to_json()))
    assert StepSummary.from_json(value) == summary
    del value["skips"], value["num_skips"]  # as an older version wrote it
    assert StepSummary.from_json(value).num_skips == 0

"""What a loader skipped: counted, listed, logged, and too much at some point."""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any

import pytest

from hetero.batches.skips import MAX_LISTED, Skip, Skips
from hetero.documents.records import decode
from hetero.errors import DatasetError, ExitCode, first_line
from hetero.metrics.skips import SkipLog, SkippedSample
from hetero.metrics.steps import StepSummary, StepTimer


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
        log.note(some(*range(1000, 1100), more=5000))
    assert len(first_line(caught.value)) < 400
    assert first_line(caught.value).endswith("...")
    assert str(caught.value).endswith(f"    and {5100 - MAX_LISTED} more")


def test_skips_in_a_report_and_in_the_log_stay_few(caplog: pytest.LogCaptureFixture) -> None:
    log = SkipLog("train", "photos", max_skips=10_000)
    with caplog.at_level(logging.WARNING, "hetero"):
        for begin in range(0, 200, 20):
            log.note(some(*range(begin, begin + 20), more=1))
    count, listed = log.summary()
    assert (count, [sample.index for sample in listed]) == (210, [str(index) for index in range(MAX_LISTED)])
    assert len(caplog.records) == MAX_LISTED
    assert messages(caplog)[-1].endswith(
        "skipped sample 31 in epoch 2 on algo-1/0: ValueError: bad (33 of at most 10000)"
    )


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
    value: Any = json.loads(summary.to_json())
    assert decode(StepSummary, value) == summary
    del value["skips"], value["num_skips"]  # as an older version wrote it
    assert decode(StepSummary, value).num_skips == 0

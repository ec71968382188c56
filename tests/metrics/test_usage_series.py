"""A host's history and percentiles: bounded, and true to the readings."""

from __future__ import annotations

import json
import random

import pytest

from hetero.documents.records import decode, encode
from hetero.errors import ConfigError
from hetero.metrics.usage_series import MAX_POINTS, Percentiles, SeriesLog, UsagePoint, UsageSeries


def filled(number: int) -> SeriesLog:
    log = SeriesLog()
    for index in range(number):
        log.add(
            UsagePoint(
                begin_s=float(index),
                end_s=float(index + 1),
                cpu_percent=float(index),
                memory_mean_bytes=float(index),
                memory_peak_bytes=index,
            )
        )
    return log


@pytest.mark.parametrize("number", [0, 1, 119, 120, 121, 1000, 100_003])
def test_history_of_any_length_is_bounded_and_complete(number: int) -> None:
    series = filled(number).series()
    assert len(series.begin_s) <= MAX_POINTS
    assert list(series.begin_s[1:]) == list(series.end_s[:-1])
    if number:
        assert (series.begin_s[0], series.end_s[-1]) == (0.0, float(number))
        assert max(series.memory_peak_bytes) == number - 1
        durations = [end - begin for begin, end in zip(series.begin_s, series.end_s, strict=True)]
        mean = sum(value * length for value, length in zip(series.cpu_percent, durations, strict=True)) / number
        assert mean == pytest.approx((number - 1) / 2, abs=0.1)
    assert decode(UsageSeries, json.loads(json.dumps(encode(series)))) == series


def test_history_of_a_heartbeat_is_small() -> None:
    assert len(json.dumps(encode(filled(99_999).series()))) < 8192


def test_gpu_columns_are_empty_if_a_reading_has_no_gpu() -> None:
    log = SeriesLog()
    for gpu in (50.0, None):
        log.add(
            UsagePoint(
                begin_s=0,
                end_s=1,
                cpu_percent=1,
                memory_mean_bytes=1,
                memory_peak_bytes=1,
                gpu_percent=gpu,
                gpu_memory_bytes=7,
            )
        )
    series = log.series()
    assert (series.gpu_percent, series.gpu_memory_bytes) == ((), (7, 7))


def test_columns_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ConfigError, match="expected 1 in each"):
        UsageSeries(
            begin_s=(0.0,), end_s=(1.0,), cpu_percent=(1.0, 2.0), memory_mean_bytes=(1,), memory_peak_bytes=(1,)
        )


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
def test_percentile_is_that_of_all_values_within_one_percent(share: float) -> None:
    draw = random.Random(1)
    values = [draw.lognormvariate(10, 2) for _ in range(5000)]
    log = Percentiles()
    for value in values:
        log.add(value)
    expected = sorted(values)[min(4999, int(share * 5000))]
    assert log.get(share) == pytest.approx(expected, rel=0.02)


def test_percentile_of_zeros_and_of_nothing() -> None:
    log = Percentiles()
    assert log.get(0.99) is None
    for value in (0.0, 0.0, 0.0, 5.0):
        log.add(value)
    assert log.get(0.5) == 0.0
    assert log.get(0.99) == pytest.approx(5.0, rel=0.01)

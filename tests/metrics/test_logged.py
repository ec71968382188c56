"""What scripts log: arguments are checked, values are kept in bounds, and lines can be read again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.documents.records import decode, encode
from hetero.errors import ConfigError
from hetero.metrics import logged
from hetero.metrics.logged import (
    LoggedMetric,
    MetricLog,
    MetricPattern,
    check_value,
    last_values,
    metric_line,
    read_metric_line,
    thinned,
)

names = st.from_regex(r"[!-<>-~]{1,100}", fullmatch=True)
numbers = st.floats(allow_nan=False, allow_infinity=False)


def value(name: str, at_s: float, number: float = 0.5, *, rank: int = 0) -> LoggedMetric:
    return LoggedMetric(name=name, value=number, at_s=at_s, rank=rank)


@given(name=names, number=numbers, step=st.none() | st.integers(0, 2**53))
def test_logged_line_is_read_again_exactly(name: str, number: float, step: int | None) -> None:
    line = "[trainer algo-1 trainer] rank 0: " + metric_line(name, number, step)
    assert read_metric_line(line) == (name, number, step)


@pytest.mark.parametrize(
    "line", ["f1=0.5", "hetero.log_metric f1", "hetero.log_metric f1=nan", "hetero.log_metric f1=0.5 step=x", ""]
)
def test_other_line_is_not_read(line: str) -> None:
    assert read_metric_line(line) is None


@pytest.mark.parametrize("number", [1, 0.25, np.float32(0.25), np.array([3.0]).reshape(())])
def test_number_of_any_library_is_a_value(number: Any) -> None:
    assert check_value("f1", number, np.int64(3)) == ("f1", float(number), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("f1", math.nan, None), "the value of 'f1' is nan; expected one finite number"),
        (("f1", math.inf, None), "the value of 'f1' is inf"),
        (("f1", "0.5", None), "the value of 'f1' is '0.5'"),
        (("f1", np.zeros(2), None), "expected one finite number"),
        (("f 1", 0.5, None), "name is 'f 1'; expected 1 to 200 printable characters without spaces and ="),
        (("f=1", 0.5, None), "name is 'f=1'"),
        (("", 0.5, None), "name is ''"),
        ((7, 0.5, None), "name is 7"),
        (("f" * 201, 0.5, None), "expected 1 to 200"),
        (("f1", 0.5, -1), "the step of 'f1' is -1; expected a whole number from 0"),
        (("f1", 0.5, 1.5), "the step of 'f1' is 1.5"),
    ],
)
def test_argument_that_cannot_be_kept_is_rejected(arguments: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_value(*arguments)
    assert message in str(caught.value)


def test_log_states_seconds_since_the_start_of_the_run() -> None:
    now = [100.0]
    log = MetricLog(rank=3, elapsed_s=7.0, clock=lambda: now[0], wall_clock=lambda: 1.7e9)
    now[0] += 5.0
    log.add("f1", 0.5, 10)
    version, values = log.since(0)
    assert values == (LoggedMetric(name="f1", value=0.5, step=10, at_s=12.0, unix_s=1.7e9, rank=3),)
    assert log.since(version) == (version, None)


def test_log_with_too_many_values_keeps_half_of_the_longest_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged, "MAX_VALUES", 10)
    log = MetricLog()
    log.add("f1", 0.9)
    for number in range(25):
        log.add("loss", number)
    _, values = log.since(0)
    assert values is not None
    assert len(values) <= 10
    assert [each.value for each in values if each.name == "f1"] == [0.9]
    losses = [each.value for each in values if each.name == "loss"]
    assert (losses[0], losses[-1]) == (0, 24)
    assert losses == sorted(losses)


def test_log_keeps_no_values_of_too_many_names() -> None:
    log = MetricLog()
    assert all(log.add(f"m{number}", 1.0) for number in range(100))
    assert not log.add("m100", 1.0)
    assert log.add("m3", 2.0)


@given(series=st.lists(st.sampled_from("abcd"), max_size=60), limit=st.integers(1, 60))
def test_thinned_values_fit_and_end_with_the_last_ones(series: list[str], limit: int) -> None:
    values = [value(name, at_s) for at_s, name in enumerate(series)]
    kept = thinned(values, limit)
    assert len(kept) <= limit
    assert list(kept) == sorted(kept, key=lambda each: each.at_s)
    if len(set(series)) <= limit:
        lasts = {each.name: each for each in values}
        assert {each.name: each for each in kept} == lasts


def test_last_value_is_of_the_lowest_rank() -> None:
    values = [value("f1", 1, 0.1), value("f1", 2, 0.2), value("f1", 3, 0.9, rank=1), value("loss", 1, 5.0, rank=1)]
    assert last_values(values) == {"f1": 0.2, "loss": 5.0}


def test_pattern_reads_a_number_anywhere_in_a_line() -> None:
    pattern = MetricPattern(name="f1", regex=r"f1=([0-9.eE+-]+)")
    assert pattern.read("[x] INFO eval f1=9.1e-1, loss 3") == 0.91
    assert pattern.read("nothing") is None
    assert pattern.read("f1=.") is None


@pytest.mark.parametrize(
    ("regex", "message"), [("f1=(", "cannot be used"), ("f1=.*", "0 groups"), ("(a)(b)", "2 groups")]
)
def test_pattern_that_reads_no_number_is_rejected(regex: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MetricPattern(name="f1", regex=regex)


def test_value_survives_json() -> None:
    before = LoggedMetric(name="loss", value=-1e300, step=None, at_s=0.5, unix_s=1.7e9, rank=2)
    assert decode(LoggedMetric, encode(before)) == before
    with pytest.raises(ConfigError, match="finite"):
        decode(LoggedMetric, {**encode(before), "value": math.inf})

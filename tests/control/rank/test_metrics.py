"""`hetero.log_metric` outside of a job, where a value is only a line."""

from __future__ import annotations

import math

import pytest

import hetero
from hetero.errors import ConfigError


def test_value_outside_of_a_job_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    hetero.log_metric("f1", 0.5, 300)
    hetero.log_metric("loss", 2)
    assert capfd.readouterr().err == "hetero.log_metric f1=0.5 step=300\nhetero.log_metric loss=2.0\n"


def test_value_that_is_not_finite_is_rejected(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="the value of 'loss' is nan"):
        hetero.log_metric("loss", math.nan)
    assert capfd.readouterr().err == ""

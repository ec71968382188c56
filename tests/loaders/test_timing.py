"""The timer of a loader."""

from __future__ import annotations

import pytest

from hetero.config import LaunchOptions
from hetero.control.rank import session as control
from hetero.loaders.timing import LoaderTiming


def test_loader_without_launcher_leaves_out_as_many_steps_as_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_session", None)
    assert LoaderTiming("train").timer.warmup_steps == LaunchOptions(script="train.py").warmup_steps == 10

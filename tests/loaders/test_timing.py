"""The timer of a loader."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetero.config import LaunchOptions
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders.measuring.timing import LoaderTiming


def test_loader_without_launcher_leaves_out_as_many_steps_as_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_session", None)
    assert LoaderTiming("train").timer.warmup_steps == LaunchOptions(script="train.py").warmup_steps == 10


def test_loader_that_cannot_be_profiled_says_so_in_a_profile_run(monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(options=SimpleNamespace(profile=True))
    monkeypatch.setattr(control, "_session", session)
    with pytest.raises(
        ConfigError, match=r"loader train is one of hetero\.tf\.distribute, which hetero profile cannot measure"
    ):
        _ = LoaderTiming("train").timer

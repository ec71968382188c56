"""A world and a job around a loader."""

from __future__ import annotations

from typing import Any

import pytest

import hetero
from hetero.control.rank import session as control
from hetero.loaders import pipeline
from tests.support.torch.loaders import FakeSession, be_rank


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(rank: int, world_size: int) -> None:
        be_rank(monkeypatch, rank, world_size)

    return choose


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(session: FakeSession) -> FakeSession:
        monkeypatch.setattr(control, "_session", session)
        monkeypatch.setattr(pipeline, "_num_verified", {})
        return session

    yield choose
    hetero.spec.set_describer(None)

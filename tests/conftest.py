"""What every test gets: an environment without the machine's own job."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("hetero", deadline=None)  # a loaded machine is no failure
settings.load_profile("hetero")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables that would make a test read the job or the configuration of its surroundings."""
    for name in list(os.environ):
        if name.startswith(("SM_", "SAGEMAKER_", "HETERO_")) and name not in {
            "HETERO_TIME_SCALE",
            "HETERO_TEST_PROTOBUF_MATRIX",
        }:
            monkeypatch.delenv(name)

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero.control.hub import Hub
from tests.support.control.clocks import Clock
from tests.support.control.hubs import make_hub


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hubs() -> Iterator[tuple[Hub, Hub]]:
    """A trainer host and a data host that have found each other."""
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer, make_hub("data", ports) as data:
        yield trainer, data

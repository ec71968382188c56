from __future__ import annotations

from collections.abc import Iterator

import pytest
from clocks import Clock
from hubs import make_hub

from hetero.control.hub import Hub


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hubs() -> Iterator[tuple[Hub, Hub]]:
    """A trainer host and a data host that have found each other."""
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer, make_hub("data", ports) as data:
        yield trainer, data

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetero import datasets
from hetero.batches.seeds import preserved_generators

torch = pytest.importorskip("torch")
data = torch.utils.data


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets, "_factories", {})
    with preserved_generators():
        yield

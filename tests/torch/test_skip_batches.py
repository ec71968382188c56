"""`DataLoader.skip`: the next pass begins some batches later, and log and ledger name them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hetero import Mixture, Sources  # noqa: E402
from hetero.audit.ledger import close_current  # noqa: E402
from hetero.audit.reading import read_ledger  # noqa: E402
from hetero.errors import ConfigError  # noqa: E402
from hetero.torch import DataLoader  # noqa: E402
from tests.support.streams import StatefulNumbers  # noqa: E402


def batches(loader: Any) -> list[Any]:
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in loader]


def numbers(**options: Any) -> Any:
    return DataLoader(list(range(100)), batch_size=10, shuffle=True, **options)  # type: ignore[arg-type]


def stream(**options: Any) -> Any:
    return DataLoader(StatefulNumbers(100), batch_size=10, guarantee="exactly-once", lanes=2, **options)


@pytest.mark.parametrize("make", [numbers, stream])
def test_skip_passes_over_batches_after_a_state(make: Any) -> None:
    expected = batches(make())
    loader = make()
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    resumed.skip(3)
    assert batches(resumed) == expected[5:]
    # The epoch after it is whole.
    assert len(batches(resumed)) == len(expected)


def test_skip_at_the_beginning() -> None:
    loader = numbers()
    loader.skip(4)
    assert batches(loader) == batches(numbers())[4:]


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_skip_of_no_number_of_batches_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match="expected an integer of at least 1"):
        numbers().skip(number)


def test_skip_within_a_pass_is_refused() -> None:
    loader = numbers()
    next(iter(loader))
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ConfigError, match="before the loop"):
        loader.skip(1)


def test_skip_past_the_end_is_refused() -> None:
    loader = numbers()
    loader.skip(11)
    with pytest.raises(ConfigError, match="after batch 11 of epoch 0, an epoch has 10"):
        next(iter(loader))


def test_skip_and_sources_are_in_log_and_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HETERO_AUDIT_DIR", str(tmp_path))
    sources = Sources(a=list(range(60)), b=list(range(100, 120)))
    loader: Any = DataLoader(sources, batch_size=8, shuffle=Mixture({"a": 0.75, "b": 0.25}))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        loader.skip(2)
        found = [number for batch in loader for number in batch.tolist()]
    close_current()
    assert "the next pass begins 2 batches later, at batch 2" in caplog.text
    lines = (tmp_path / "ledger-rank-0.jsonl").read_text()
    assert lines.count('"sources":{"a":6,"b":2}') == 8
    record = read_ledger(tmp_path / "ledger-rank-0.jsonl")
    assert record.notes == ["the script skipped 2 batches of loader Sources before position 2 of epoch 0"]
    counts = {source.name: source.num_samples for source in loader.step_timer.summary().by_source}
    assert counts == {"a": sum(number < 100 for number in found), "b": sum(number >= 100 for number in found)}


def test_sources_of_batches_that_a_tools_loader_delivers_are_counted() -> None:
    sources = Sources(a=list(range(60)), b=list(range(100, 120)))
    loader: Any = DataLoader(sources, batch_size=8, shuffle=Mixture({"a": 0.75, "b": 0.25}))  # type: ignore[arg-type]
    seen = vars(loader)
    rebuilt: Any = torch.utils.data.DataLoader(
        seen["dataset"], batch_sampler=seen["batch_sampler"], collate_fn=seen["collate_fn"]
    )
    assert len(list(rebuilt)) == 10
    counts = {source.name: source.num_samples for source in loader.step_timer.summary().by_source}
    assert counts == {"a": 60, "b": 20}

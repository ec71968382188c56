"""Loaders of a canary run: a part of the samples, and counted passes."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.utils.data

import hetero
from hetero.errors import ConfigError
from hetero.loaders.parts import FRACTION_VARIABLE, PART_SEED_VARIABLE
from hetero.torch import DataLoader
from tests.support.torch.loaders import indices, loader_test_noisy


@pytest.fixture
def _fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FRACTION_VARIABLE, "0.2")
    monkeypatch.setenv(PART_SEED_VARIABLE, "4")


@pytest.mark.usefixtures("_fifth")
def test_every_pass_has_the_same_part_in_another_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loader = DataLoader(loader_test_noisy(100), batch_size=6, shuffle=True, seed=1)
    assert len(loader) == 4
    first, second = ([index for batch in indices(loader) for index in batch] for _ in range(2))
    assert len(set(first)) == 20
    assert sorted(first) == sorted(second)
    assert first != second
    lines = [record.message for record in caplog.records if "this canary run uses" in record.message]
    assert lines == ["loader loader_test_noisy: this canary run uses 20 of 100 samples"]


@pytest.mark.usefixtures("_fifth")
def test_summary_counts_passes_and_samples() -> None:
    loader = DataLoader(loader_test_noisy(100), batch_size=6)
    list(loader)
    next(iter(loader))
    summary = loader.step_timer.summary()
    assert (summary.dataset_samples, summary.pass_samples) == (100, 20)
    assert (summary.num_passes, summary.num_complete_passes) == (2, 1)


@pytest.mark.parametrize(("num_workers", "max_in_flight"), [(0, 1), (1, 3), (2, 5)])
def test_summary_counts_batches_in_flight(num_workers: int, max_in_flight: int) -> None:
    loader = DataLoader(loader_test_noisy(20), batch_size=5, num_workers=num_workers)
    next(iter(loader))  # the pass is left, so its other batches are never delivered
    list(loader)
    assert loader.step_timer.summary().max_in_flight == max_in_flight


def test_whole_data_set_is_used_outside_of_a_canary_run() -> None:
    loader = DataLoader(loader_test_noisy(10), batch_size=5)
    assert len(indices(loader)) == 2
    summary = loader.step_timer.summary()
    assert (summary.dataset_samples, summary.pass_samples) == (10, 10)


@pytest.mark.usefixtures("_fifth")
def test_state_continues_within_the_part() -> None:
    loader = DataLoader(loader_test_noisy(100), batch_size=6, shuffle=True, seed=1)
    whole = indices(loader)
    batches = iter(other := DataLoader(loader_test_noisy(100), batch_size=6, shuffle=True, seed=1))
    next(batches)
    resumed = DataLoader(loader_test_noisy(100), batch_size=6, shuffle=True, seed=1)
    resumed.load_state_dict(other.state_dict())
    assert indices(resumed) == whole[1:]


@pytest.mark.usefixtures("_fifth")
def test_sampler_of_the_script_is_rejected_with_other_ways() -> None:
    sampler = torch.utils.data.SequentialSampler(range(100))
    with pytest.raises(ConfigError, match="has a sampler of its own, which a canary run with --samples cannot shorten"):
        DataLoader(loader_test_noisy(100), sampler=sampler)


@hetero.dataset
def canary_test_sources() -> hetero.Sources:
    return hetero.Sources(a=[1, 2, 3, 4], b=[5, 6, 7, 8])


def test_mixture_of_fewer_samples_is_not_called_a_canary_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mixture = hetero.Mixture({"a": 0.5, "b": 0.5}, samples=4)
    assert len(DataLoader(canary_test_sources(), batch_size=2, shuffle=mixture)) == 2
    assert "canary" not in caplog.text

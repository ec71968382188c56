"""The steps of a pass that a loader reports, for the progress of the job."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.utils.data

from hetero.torch import DataLoader
from tests.support.torch.loaders import be_rank, loader_test_noisy, rebuilt_by_tool


def steps(loader: DataLoader[Any]) -> tuple[int | None, int]:
    """Return the steps of the loader's latest pass, and how many of them are left."""
    summary = loader.step_timer.summary()
    return summary.pass_steps, summary.pass_steps_left


def take(batches: Any, count: int) -> None:
    for _ in itertools.islice(batches, count):
        pass


def test_pass_steps_are_unknown_before_the_first_pass() -> None:
    assert steps(DataLoader(loader_test_noisy(23), batch_size=4)) == (None, 0)


@pytest.mark.parametrize(
    ("options", "rank", "expected"),
    [
        ({}, 0, 3),
        ({"drop_last": True}, 0, 2),
        ({"padding": False}, 0, 3),
        ({"padding": False}, 1, 2),  # the last global batch has one sample
    ],
)
def test_pass_steps_count_down_from_the_batches_of_the_rank(
    options: dict[str, Any], rank: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_rank(monkeypatch, rank, 2)
    loader = DataLoader(loader_test_noisy(17), batch_size=4, **options)
    found = [steps(loader) for _ in range(2) for _ in loader]
    assert found == 2 * [(expected, expected - 1 - step) for step in range(expected)]


def test_pass_steps_after_a_pass_that_was_left_begin_anew() -> None:
    loader = DataLoader(loader_test_noisy(23), batch_size=4)
    take(loader, 2)
    assert steps(loader) == (6, 4)
    take(loader, 1)
    assert steps(loader) == (6, 5)


def test_pass_steps_of_a_resumed_pass_include_those_before_it() -> None:
    first, second = (DataLoader(loader_test_noisy(23), batch_size=4) for _ in range(2))
    take(first, 4)
    second.load_state_dict(first.state_dict())
    take(second, 1)
    assert steps(second) == (6, 1)
    take(second, 1)
    assert steps(second) == (6, 5), "it is not in the next pass"


def test_pass_steps_with_the_sampler_of_the_script_are_unknown() -> None:
    sampler = torch.utils.data.RandomSampler(range(23))
    loader = DataLoader(loader_test_noisy(23), batch_size=4, sampler=sampler)
    take(loader, 2)
    assert steps(loader) == (None, 0)


def test_pass_steps_of_a_loader_that_a_tool_has_rebuilt_count_down() -> None:
    loader = DataLoader(loader_test_noisy(23), batch_size=4)
    found = [steps(loader) for _ in rebuilt_by_tool(loader)]
    assert found == [(6, 5 - step) for step in range(6)]

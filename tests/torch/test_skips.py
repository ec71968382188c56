"""``DataLoader(on_sample_error="skip")`` in this process and in torch's workers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

import hetero
from hetero.errors import ConfigError, DatasetError
from hetero.torch import DataLoader
from tests.support.torch.loaders import plain, rebuilt_by_tool

SIZE = 23
POISON = [0, 5, 6, 22]


class Poisoned(torch.utils.data.Dataset[Any]):
    """Draws from every global generator. Some samples raise then."""

    def __init__(self, poison: list[int]) -> None:
        self.poison = frozenset(poison)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        sample = index, torch.rand(2), random.random() + float(np.random.rand())
        if index in self.poison:
            raise ValueError(f"sample {index} is broken")
        return sample


@hetero.dataset
def skips_test_poisoned(poison: list[int]) -> Poisoned:
    return Poisoned(poison)


def skipping(poison: Any = POISON, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 4, "shuffle": True, "seed": 5, "max_skips": 10_000, **options}
    return DataLoader(skips_test_poisoned(poison=sorted(poison)), on_sample_error="skip", **options)


def modelled(batches: list[Any], poison: Any) -> list[Any]:
    """Return the batches of a clean pass with the next sample that works in the place of each poisoned one."""
    found = []
    for batch in batches:
        rows = list(zip(*batch, strict=True))
        taken = []
        for position in range(len(rows)):
            at = position
            while rows[at][0] in poison:
                at = (at + 1) % len(rows)
            taken.append(rows[at])
        found.append([list(part) for part in zip(*taken, strict=True)])
    return found


def counted(loader: DataLoader[Any]) -> list[tuple[str, int]]:
    summary = loader.step_timer.summary()
    assert summary.num_skips == len(summary.skips)
    return sorted((skip.index, skip.epoch) for skip in summary.skips)


@pytest.mark.fault("F2")
@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}],
    ids=["here", "workers", "persistent"],
)
def test_skip_gives_the_models_batches_wherever_they_are_computed(options: Any) -> None:
    clean = DataLoader(skips_test_poisoned(poison=[]), batch_size=4, shuffle=True, seed=5)
    expected = modelled(plain(clean), POISON) + modelled(plain(clean), POISON)
    loader = skipping(**options)
    assert plain(loader) + plain(loader) == expected
    assert len(loader) == 6
    assert counted(loader) == sorted((str(index), epoch) for index in POISON for epoch in (0, 1))
    assert {skip.host for skip in loader.step_timer.summary().skips} == {"local"}
    assert {skip.exception for skip in loader.step_timer.summary().skips} >= {"ValueError: sample 5 is broken"}


@settings(max_examples=settings.default.max_examples // 2)
@given(poison=st.sets(st.integers(0, SIZE - 1), max_size=8), batch_size=st.integers(1, 6))
def test_skip_any_poison_gives_the_models_batches_or_names_a_hopeless_one(poison: set[int], batch_size: int) -> None:
    clean = plain(DataLoader(skips_test_poisoned(poison=[]), batch_size=batch_size, shuffle=True, seed=5))
    hopeless = next((k for k, batch in enumerate(clean) if set(batch[0]) <= poison), None)
    found: list[Any] = []
    loader = skipping(poison, batch_size=batch_size)
    if hopeless is None:
        found = plain(loader)
    else:
        with pytest.raises(DatasetError, match=f"sample {clean[hopeless][0][0]} is broken.*there is no substitute"):
            found.extend([part.tolist() for part in batch] for batch in loader)
    assert found == modelled(clean[:hopeless], poison)


@pytest.mark.fault("F2")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_skips_beyond_the_bound_are_raised_over_all_epochs_with_their_names(num_workers: int) -> None:
    loader = skipping(max_skips=6, num_workers=num_workers)
    list(loader)
    with pytest.raises(DatasetError, match="loader skips_test_poisoned skipped 7 samples, max_skips=6") as caught:
        list(loader)
    record: Any = caught.value.record
    assert (record.dataset, record.stage) == ("skips_test_poisoned", "sample")
    for index in POISON:
        assert f"sample {index} in epoch 0 on local: ValueError: sample {index} is broken" in str(caught.value)


def test_skip_resumes_with_the_next_batch_and_counts_from_0() -> None:
    expected = plain(skipping())
    loader = skipping()
    iterator = iter(loader)
    first = plain([next(iterator), next(iterator)])
    resumed = skipping()
    resumed.load_state_dict(loader.state_dict())
    assert first + plain(resumed) == expected
    assert sorted(counted(loader) + counted(resumed)) == sorted((str(index), 0) for index in POISON)


def test_skip_counts_what_was_delivered_only() -> None:
    loader = skipping(POISON, shuffle=False, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert counted(loader) == [("0", 0)]


def test_skip_through_a_loader_that_a_tool_rebuilt_is_the_same_and_counted() -> None:
    loader = skipping()
    rebuilt: Any = rebuilt_by_tool(loader)
    assert plain(rebuilt) == plain(skipping())
    assert counted(loader) == sorted((str(index), 0) for index in POISON)


def test_skip_in_a_tools_own_workers_is_bounded_in_each() -> None:
    def rebuilt(max_skips: int) -> Any:
        loader = skipping(max_skips=max_skips)
        return rebuilt_by_tool(loader, num_workers=1)

    assert plain(rebuilt(4)) == plain(skipping())
    with pytest.raises(Exception, match="skipped 4 samples, max_skips=3"):
        plain(rebuilt(3))


def test_raise_stays_the_default() -> None:
    loader = DataLoader(skips_test_poisoned(poison=[6]), batch_size=4)
    assert (loader.on_sample_error, loader.max_skips) == ("raise", 100)
    with pytest.raises(DatasetError, match="at sample 6: ValueError: sample 6 is broken"):
        list(loader)
    assert loader.step_timer.summary().num_skips == 0


def test_skip_survives_being_rebuilt_from_attributes() -> None:
    loader = skipping(max_skips=7)
    again = type(loader)(
        vars(loader)["dataset"],
        batch_sampler=vars(loader)["batch_sampler"],
        seed=loader.seed,
        on_sample_error=loader.on_sample_error,
        max_skips=loader.max_skips,
    )
    assert plain(again) == plain(skipping())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_sample_error": "ignore"}, "on_sample_error is 'ignore', expected 'raise' or 'skip'"),
        ({"max_skips": -1}, "max_skips is -1, expected an integer of at least 0"),
        ({"max_skips": True}, "max_skips is True"),
        ({"max_skips": 1.5}, "max_skips is 1.5"),
        ({"on_sample_error": "skip", "batch_size": None}, "batch_size=None: no other sample"),
    ],
)
def test_policy_that_cannot_be_is_refused(options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DataLoader(skips_test_poisoned(poison=[]), **options)


def test_skip_with_a_batch_sampler_has_batches() -> None:
    batches: Any = [[5, 1], [2, 6, 3]]
    loader = DataLoader(skips_test_poisoned(poison=POISON), batch_sampler=batches, on_sample_error="skip")
    assert [batch[0].tolist() for batch in loader] == [[1, 1], [2, 3, 3]]

"""What scripts do with epochs and states, and how it once went wrong in silence: each is right here, or is logged."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

import hetero
from hetero.errors import ConfigError
from hetero.torch import DataLoader
from tests.support.torch.loaders import Noisy, indices, loader_test_noisy, plain
from tests.support.torch.samplers import Endless


@hetero.dataset
def epochs_of_a_file(path: str) -> torch.utils.data.Dataset[Any]:
    return OfFile(path)


class OfFile(torch.utils.data.Dataset[Any]):
    """Every sample is the number in a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return int(Path(self.path).read_text())


class Wrapped(Sampler[int]):
    """Leaves out an index of another sampler."""

    def __init__(self, *kept: Any) -> None:
        self.kept = kept

    def __iter__(self) -> Iterator[int]:
        return (index for index in self.kept[0] if index != 3)

    def __len__(self) -> int:
        return len(self.kept[0])


class Deaf(Sampler[int]):
    """Shuffles in the same way in every epoch."""

    shuffle = True

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(7).permutation(12).tolist()

    def __len__(self) -> int:
        return 12


def test_passes_of_one_epoch_have_orders_and_draws_of_their_own_and_change_no_other_epoch() -> None:
    loader = DataLoader(Noisy(8), batch_size=4, shuffle=True, seed=1)
    found = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        found.append([plain(loader) for _ in range(2)])
    passes = [each for epoch in found for each in epoch]
    assert all(one != other for one, other in itertools.combinations(passes, 2))
    draws = [number for each in passes for batch in each for number in batch[2]]
    assert len(set(draws)) == 6 * 8  # no sample was augmented twice in the same way
    counted = DataLoader(Noisy(8), batch_size=4, shuffle=True, seed=1)
    assert [plain(counted) for _ in range(3)] == [epoch[0] for epoch in found]


def test_state_within_the_second_pass_of_an_epoch_resumes_that_pass() -> None:
    whole = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=1)
    whole.set_epoch(4)
    expected = [plain(whole) for _ in range(3)]
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=1)
    loader.set_epoch(4)
    list(loader)
    second = iter(loader)
    next(second), next(second)
    state = json.loads(json.dumps(loader.state_dict()))
    for is_set in (True, False):
        resumed = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=1)
        resumed.load_state_dict(state)
        if is_set:
            resumed.set_epoch(4)
        assert plain(resumed) == expected[1][2:]
        assert plain(resumed) == expected[2]


def test_state_of_a_version_that_did_not_count_passes_continues() -> None:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=1)
    whole = plain(loader)
    state = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=1).state_dict() | {"batches": 2, "completed": False}
    for name in ("again", "sampler_length", "world_size", "sampler_class", "dataset", "arguments"):
        del state[name]
    resumed = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=1)
    resumed.load_state_dict(state)
    assert plain(resumed) == whole[2:]


def test_loader_made_anew_of_one_object_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    data = Noisy(9)
    for _ in range(3):
        list(DataLoader(data, batch_size=3, shuffle=True, seed=714))
    (record,) = caplog.records
    assert "loader Noisy: another loader of the same data set and seed" in record.getMessage()


def test_loader_made_anew_with_a_sampler_that_shuffles_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    data = Noisy(9)
    for _ in range(3):
        list(DataLoader(data, batch_size=3, sampler=RandomSampler(data), seed=719))
    (record,) = caplog.records
    assert "loader Noisy: another loader of the same data set and seed" in record.getMessage()


def test_loader_made_anew_in_each_epoch_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def made(**options: Any) -> DataLoader[Any]:
        return DataLoader(loader_test_noisy(9), **{"batch_size": 3, "seed": 712, **options})

    for _ in range(3):
        list(made())  # an evaluation in order
        list(made(sampler=SequentialSampler(range(9))))
        loader = made(shuffle=True, name="set in each epoch")
        loader.set_epoch(0)
        list(loader)
    train, twin = made(shuffle=True, seed=713), made(shuffle=True, seed=713)
    list(train), list(twin)
    for _ in range(3):  # folds of a cross-validation: other data of one class
        list(DataLoader(Noisy(9), batch_size=3, shuffle=True, seed=712))
    assert caplog.records == []
    for _ in range(3):
        list(made(shuffle=True))
    (record,) = caplog.records
    assert "this one begins at epoch 0 too: the same order and the same random draws" in record.getMessage()
    assert "call set_epoch(epoch) of each one" in record.getMessage()


@pytest.mark.parametrize(
    "wrap",
    [Wrapped, lambda inner: Wrapped(Wrapped(inner)), lambda inner: BatchSampler(Wrapped(inner), 4, drop_last=False)],
    ids=["in a tuple", "twice", "in a batch sampler"],
)
def test_set_epoch_reaches_samplers_that_others_wrap(
    wrap: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    sampler = wrap(DistributedSampler(range(12), 1, 0))
    ours = {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"sampler": sampler, "batch_size": 4}
    loader = DataLoader(Noisy(12), **ours)
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append([index for batch in indices(loader) for index in batch])
    assert orders[0] == [index for index in DistributedSampler(range(12), 1, 0) if index != 3]
    assert len({tuple(order) for order in orders}) == 3
    assert caplog.records == []


def test_set_epoch_of_the_loaders_own_sampler_is_that_of_the_loader() -> None:
    one, other = (DataLoader(Noisy(12), batch_size=4, shuffle=True, seed=5) for _ in range(2))
    for epoch in (0, 3, 1):
        one.set_epoch(epoch)
        other.sampler.set_epoch(epoch)
        assert plain(one) == plain(other)


class MadeInSetEpoch(Sampler[int]):
    """Makes its order in set_epoch, and keeps the epoch under some name."""

    samples_per_epoch = 12

    def __init__(self, name: str) -> None:
        self.name = name
        self.chosen: list[int] = []
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.chosen.append(epoch)
        setattr(self, self.name, epoch)
        self.order = np.random.default_rng(epoch).permutation(12).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("name", ["epoch", "_epoch", "current_epoch", "epoch_of_training"])
def test_sampler_has_the_epoch_that_the_script_set_on_it_under_any_name(name: str) -> None:
    sampler = MadeInSetEpoch(name)
    loader = DataLoader(Noisy(12), batch_size=12, sampler=sampler)
    for epoch in (3, 4, 7):  # the first as after a restart without a state of the loader
        sampler.set_epoch(epoch)
        expected = list(sampler.order)
        assert indices(loader) == [expected]
        assert loader.state_dict()["sampler_epoch"] == (None if name == "epoch_of_training" else epoch)
    assert set(sampler.chosen) == {0, 3, 4, 7}


class ByLength(Sampler[int]):
    """A fixed order, longest samples first."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(12), key=lambda index: index * 7 % 5))


class Reseeding(Sampler[int]):
    """Sets the seed of a global generator before it shuffles."""

    def __init__(self, generator: str) -> None:
        self.of_python = generator == "python"

    def __iter__(self) -> Iterator[int]:
        if self.of_python:
            random.seed(1)
            return iter(random.sample(range(12), 12))
        np.random.seed(1)
        return iter(np.random.permutation(12).tolist())


@pytest.mark.parametrize("generator", ["python", "numpy"])
def test_sampler_that_sets_a_seed_in_every_epoch_is_said(generator: str, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Noisy(12), batch_size=4, sampler=Reseeding(generator))
    for epoch in range(2):
        loader.set_epoch(epoch)
        list(loader)
    (record,) = caplog.records
    assert "sampler Reseeding gives the same order in epochs 0 and 1" in record.getMessage()


def test_sampler_with_the_same_order_in_two_epochs_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    in_order: Any = [SequentialSampler(range(12)), [7, 3, 5], DistributedSampler(range(12), 1, 0, shuffle=False)]
    in_order += [DistributedSampler(range(11), 4, 3, shuffle=False), ByLength()]  # the ranks' padding repeats index 0
    for sampler in (*in_order, RandomSampler(range(12)), Deaf()):
        loader = DataLoader(Noisy(12), batch_size=4, sampler=sampler, name=type(sampler).__name__)
        for epoch in range(3):
            assert caplog.records == []
            if not isinstance(sampler, Deaf):
                loader.set_epoch(epoch)
            list(loader)
    for epoch in range(3):
        loader.set_epoch(epoch)
        list(loader)
    (record,) = caplog.records
    assert "sampler Deaf gives the same order in epochs 2 and 0, although set_epoch was called" in record.getMessage()


def state_after(steps: int, dataset: Any, **options: Any) -> dict[str, object]:
    loader = DataLoader(dataset, **{"batch_size": 4, **options})
    list(itertools.islice(loader, steps))
    state: dict[str, object] = json.loads(json.dumps(loader.state_dict()))
    return state


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"sampler": range(40)}, {"sampler": range(20)}, "a sampler of length 40, the sampler has 20 now"),
        (
            {"batch_sampler": BatchSampler(range(40), 4, drop_last=False), "batch_size": 1},
            {"batch_sampler": BatchSampler(range(40), 8, drop_last=False), "batch_size": 1},
            "a sampler of length 10, the sampler has 5 now",
        ),
        ({"sampler": range(40)}, {"sampler": range(4)}, "after batch 2 of epoch 0, an epoch has 1"),
    ],
)
def test_state_of_a_sampler_of_another_length_is_refused(
    before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    loader = DataLoader(Noisy(40), **{"batch_size": 4, **after})
    loader.load_state_dict(state_after(2, Noisy(40), **before))
    with pytest.raises(ConfigError, match=message):
        next(iter(loader))


@pytest.mark.parametrize("length", [20, 40, 80], ids=["shorter", "equal", "longer"])
@pytest.mark.parametrize("is_batch_sampler", [False, True])
def test_state_at_the_end_of_an_epoch_goes_on_with_the_next_one_at_any_length_of_the_sampler(
    is_batch_sampler: bool, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    def made(length: int) -> DataLoader[Any]:
        sampler: Any = DistributedSampler(range(length), 1, 0)
        if is_batch_sampler:
            return DataLoader(Noisy(80), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
        return DataLoader(Noisy(80), batch_size=4, sampler=sampler)

    loader = made(40)
    list(loader)
    state = loader.state_dict()
    counted, named, again = made(length), made(length), made(length)
    for resumed in (counted, named, again):
        resumed.load_state_dict(state)
    named.set_epoch(1)
    again.set_epoch(0)
    assert len(list(counted)) == len(list(named)) == length // 4
    assert counted.state_dict()["epoch"] == 1
    assert list(again) == []
    assert caplog.records == []


def test_state_behind_the_end_of_an_epoch_is_refused() -> None:
    loader = DataLoader(Noisy(40), batch_size=4)
    loader.load_state_dict({**state_after(2, Noisy(40)), "batches": 10**15})
    with pytest.raises(ConfigError, match=r"after batch 1000000000000000 of epoch 0, an epoch has 10"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("dataset", "options", "warning"),
    [
        (loader_test_noisy(40), {}, ""),
        (Noisy(40), {}, "the loaded state is of data set loader_test_noisy, and this loader has Noisy"),
        (
            loader_test_noisy(40),
            {"sampler": SequentialSampler(range(40))},
            "is of sampler RandomSampler, and this loader has SequentialSampler",
        ),
    ],
)
def test_state_of_other_data_is_said(
    dataset: Any, options: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = {"sampler": RandomSampler(range(40))} if options else {"shuffle": True}
    loader = DataLoader(dataset, **{"batch_size": 4, **(options or before)})
    state = state_after(2, loader_test_noisy(40), **before)
    caplog.clear()
    loader.load_state_dict(state)
    assert len(list(loader)) == 8
    assert [warning in record.getMessage() for record in caplog.records] == [True] * bool(warning)


def test_state_of_other_arguments_is_said_without_showing_them(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text("1")
    state = state_after(1, epochs_of_a_file(str(tmp_path / "one")))
    loader = DataLoader(epochs_of_a_file(str(tmp_path / "other")), batch_size=4)
    loader.load_state_dict(state)
    (record,) = caplog.records
    assert "is of data set epochs_of_a_file with other arguments than this loader's" in record.getMessage()
    assert "one" not in json.dumps(state)


def test_file_that_the_script_writes_between_epochs_is_read_in_time_if_the_loader_asks_for_one_epoch_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    loader = DataLoader(epochs_of_a_file(str(path)), batch_size=4, num_workers=1, requests_next_epoch=False)
    assert [batch.tolist() for batch in loader] == [[1] * 4] * 3
    path.write_text("2")
    assert [batch.tolist() for batch in loader] == [[2] * 4] * 3


def prefetcher(module: str) -> Callable[[Any], Iterator[Any]]:
    """Return a function that takes one batch ahead of the loop, as Ray's and timm's do, in a module of that name."""
    code = """
def ahead(loader):
    iterator = iter(loader)
    following = next(iterator, None)
    while following is not None:
        batch = following
        following = next(iterator, None)
        yield batch
"""
    names: dict[str, Any] = {"__name__": module}
    exec(code, names)
    ahead: Callable[[Any], Iterator[Any]] = names["ahead"]
    return ahead


@pytest.mark.parametrize("steps", [1, 4, 6])
@pytest.mark.parametrize("module", ["ray.train.torch.train_loop_utils", "timm.data.loader", "script"])
def test_batch_that_a_prefetcher_has_and_the_loop_has_not_is_trained_after_a_restart(module: str, steps: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 1}
    whole = plain(DataLoader(Noisy(), **options))
    loader = DataLoader(Noisy(), **options)
    taken = itertools.islice(prefetcher(module)(loader), steps)
    trained = plain(taken)
    state = loader.state_dict(num_batches_trained=steps) if module == "script" else loader.state_dict()
    resumed = DataLoader(Noisy(), **options)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    first = plain(resumed)
    assert trained + (first if steps < 6 else []) == whole
    assert (state["epoch"], state["batches"]) == (0, steps)


def test_number_of_trained_batches_counts_from_the_beginning_of_a_resumed_pass() -> None:
    loader = DataLoader(Noisy(), batch_size=4)
    loader.load_state_dict(state_after(2, Noisy()))
    batches = iter(loader)
    with pytest.raises(ConfigError, match="no pass has begun"):
        loader.state_dict(num_batches_trained=1)
    for _ in range(3):
        next(batches)
    assert loader.state_dict(num_batches_trained=1)["batches"] == 3
    assert loader.state_dict(num_batches_trained=3) == loader.state_dict()
    of_numpy: Any = np.int64(1)
    assert type(loader.state_dict(num_batches_trained=of_numpy)["batches"]) is int
    for wrong in (4, -1, 1.0, True):
        with pytest.raises(ConfigError, match=f"num_batches_trained is {wrong}, expected 0 to 3"):
            loader.state_dict(num_batches_trained=wrong)  # type: ignore[arg-type]
    assert loader.state_dict(num_batches_trained=0)["batches"] == 2


def test_sampler_with_a_state_takes_no_other_number_of_trained_batches() -> None:
    loader = DataLoader(Noisy(37), batch_size=4, sampler=Endless())
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.state_dict(num_batches_trained=2) == loader.state_dict()
    with pytest.raises(ConfigError, match="known after the last of them only"):
        loader.state_dict(num_batches_trained=1)


@pytest.mark.parametrize(
    ("options", "others", "has_warning"),
    [
        ({}, {}, True),
        ({"seed": 0}, {"seed": 0}, False),  # as for images and masks in two data sets
        ({}, {"seed": 1}, False),
        ({"shuffle": False}, {"shuffle": False}, False),
    ],
)
def test_loaders_side_by_side_with_the_same_order_are_said_unless_the_script_chose_it(
    options: dict[str, Any],
    others: dict[str, Any],
    has_warning: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetero.torch.order.made_anew._warned", set())
    one, other = (
        DataLoader(list(range(12)), batch_size=4, name=name, **{"shuffle": True, **more})
        for name, more in (("one", options), ("other", others))
    )
    for _ in range(2):
        list(zip(one, other, strict=True))
    said = [record.getMessage() for record in caplog.records if "with the same seed" in record.getMessage()]
    assert [text.partition(" shuffle")[0] for text in said] == ["loaders one and other"] * has_warning


def test_loader_after_another_one_was_looked_into_is_not_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    next(iter(DataLoader(list(range(20)), batch_size=4, shuffle=True)))
    list(DataLoader(list(range(20)), batch_size=4, shuffle=True))
    assert "with the same seed, 0" not in caplog.text

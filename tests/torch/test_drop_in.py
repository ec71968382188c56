"""What a script that used torch's loader finds in this one: attributes, draws, shards, messages."""

from __future__ import annotations

import itertools
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import hetero
from hetero.errors import ConfigError
from hetero.torch import DataLoader

TorchLoader = torch.utils.data.DataLoader


class Photos(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int = 12) -> None:
        self.size = size
        self.transform: Any = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index if self.transform is None else self.transform(index)


@hetero.dataset
def drop_in_photos(size: int = 12) -> Photos:
    return Photos(size)


def negative(index: int) -> int:
    return -index


# The data set of a loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_attribute_set_on_the_loaders_data_set_has_effect(num_workers: int) -> None:
    loader = DataLoader(Photos(), batch_size=4, num_workers=num_workers)
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    loader.dataset.transform = negative
    assert loader.dataset.transform is negative
    assert next(iter(loader)).tolist() == [0, -1, -2, -3]


def test_attribute_set_on_the_view_that_tools_see_has_effect() -> None:
    photos = Photos()
    loader = DataLoader(photos, batch_size=4)
    vars(loader)["dataset"].transform = negative
    assert photos.transform is negative
    assert next(iter(loader)).tolist() == [0, -1, -2, -3]


def test_attribute_set_on_a_registered_data_set_is_an_error_that_says_how() -> None:
    loader = DataLoader(drop_in_photos(), batch_size=4)
    for dataset in (loader.dataset, vars(loader)["dataset"]):
        with pytest.raises(ConfigError, match=r"transform cannot be set(.|\n)*def drop_in_photos\(\.\.\., transform\)"):
            dataset.transform = negative


def test_registered_data_set_has_no_samples_and_attributes_here_and_says_so() -> None:
    spec = drop_in_photos()
    with pytest.raises(ConfigError, match="only names a data set"):
        spec[0]
    with pytest.raises(ConfigError, match="only names a data set"):
        list(spec)
    with pytest.raises(AttributeError, match=r"\(\.\.\.\) only names a data set.*no attribute 'classes'"):
        _ = spec.classes
    assert not hasattr(spec, "classes")


@pytest.mark.parametrize(
    "made",
    [
        lambda spec: torch.utils.data.Subset(spec, [0, 1]),
        lambda spec: torch.utils.data.random_split(spec, [8, 4])[0],
        lambda spec: torch.utils.data.ConcatDataset([Photos(), torch.utils.data.Subset(spec, [1])]),
        lambda spec: torch.utils.data.StackDataset(spec, Photos()),
    ],
    ids=["Subset", "random_split", "ConcatDataset", "StackDataset"],
)
def test_wrapper_around_a_registered_data_set_is_refused_with_what_to_do(made: Any) -> None:
    with pytest.raises(ConfigError, match=r"of drop_in_photos\((.|\n)*inside of it"):
        DataLoader(made(drop_in_photos()))


def test_factory_that_was_not_called_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'drop_in_photos' itself.*DataLoader\(drop_in_photos\(...\)\)"):
        DataLoader(drop_in_photos)


# Attributes


def test_attributes_are_what_was_passed() -> None:
    photos, spec = Photos(), drop_in_photos()
    sampler = torch.utils.data.SubsetRandomSampler([1, 2, 3])
    batch_sampler = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
    assert DataLoader(photos).dataset is photos
    assert DataLoader(spec).dataset is spec
    loader = DataLoader(photos, sampler=sampler, batch_size=2, collate_fn=list)
    assert (loader.sampler, loader.collate_fn) == (sampler, list)
    assert type(loader.batch_sampler) is torch.utils.data.BatchSampler
    assert loader.batch_sampler.sampler is sampler
    assert DataLoader(photos, batch_sampler=batch_sampler).batch_sampler is batch_sampler
    assert DataLoader(photos).collate_fn is torch.utils.data.default_collate
    assert DataLoader(photos, batch_size=None).collate_fn is torch.utils.data.default_convert
    assert DataLoader(photos, batch_size=None).batch_sampler is None


def test_samplers_of_the_own_order_yield_what_the_loader_does() -> None:
    loader = DataLoader(Photos(), batch_size=5, shuffle=True, seed=3)
    expected = [list(map(int, batch)) for batch in loader]
    loader.set_epoch(0)
    assert list(loader.batch_sampler) == expected
    assert list(loader.sampler) == list(itertools.chain(*expected))
    assert [list(map(int, batch)) for batch in loader] == expected  # looking did not begin the epoch


@pytest.mark.parametrize(
    ("name", "value"), [("collate_fn", list), ("num_workers", 2), ("batch_size", 3), ("sampler", [1]), ("seed", 4)]
)
def test_argument_that_is_set_later_is_refused(name: str, value: Any) -> None:
    loader = DataLoader(Photos())
    with pytest.raises(ValueError, match=f"{name} of a hetero DataLoader cannot be changed"):
        setattr(loader, name, value)


def test_length_of_an_iterator_is_the_loaders() -> None:
    loader = DataLoader(Photos(), batch_size=5)
    iterator = iter(loader)
    next(iterator)
    assert len(iterator) == len(loader) == 3


def test_argument_of_torchdatas_loader_is_taken() -> None:
    loader = DataLoader(Photos(), batch_size=5, snapshot_every_n_steps=3)
    next(iter(loader))
    assert loader.state_dict()["batches"] == 1


# Draws of the trainer's own generator


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"batch_size": None},
        {"sampler": range(5)},
        {"generator": True},
    ],
    ids=str,
)
def test_generator_after_two_passes_is_where_torchs_loader_leaves_it(options: Any) -> None:
    numbers = []
    for kind in (TorchLoader, DataLoader):
        torch.manual_seed(7)
        given = dict(options)
        if options.get("generator"):
            given["generator"] = torch.Generator().manual_seed(3)
        loader: Any = kind(Photos(), **given)
        for _ in range(2):
            list(loader)
        own = given["generator"].get_state().tolist() if "generator" in given else []
        numbers.append([torch.rand(1).item(), own])
    assert numbers[0] == numbers[1]


def test_initial_seed_in_a_sample_fits_into_64_bits_with_sign() -> None:
    class Seeds(Photos):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(torch.initial_seed()), random.random(), float(np.random.rand()), torch.rand(1)

    seeds = torch.cat([batch[0] for batch in DataLoader(Seeds(64), batch_size=8)])
    assert seeds.dtype == torch.int64
    assert int(seeds.min()) >= 0
    assert len(set(seeds.tolist())) == 64


# Ranks


def test_ranks_without_a_process_group_get_all_samples_and_are_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(Photos(), batch_size=6, name="mine")
    with caplog.at_level(logging.WARNING):
        assert [batch.tolist() for batch in loader] == [list(range(6)), list(range(6, 12))]
        list(loader)
    assert (
        caplog.text.count("loader mine: this job has 2 ranks but no process group, so every rank gets all samples") == 1
    )
    assert "shard=(rank, world_size)" in caplog.text


def test_ranks_with_a_shard_get_their_part(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [batch.tolist() for batch in DataLoader(Photos(), batch_size=6, shard=(1, 2))] == [[1, 3, 5, 7, 9, 11]]
    assert [batch.tolist() for batch in DataLoader(Photos(), batch_size=12, shard=(0, 1))] == [list(range(12))]
    assert caplog.text == ""


def test_shard_beats_the_process_group(world: Any) -> None:
    world(1, 2)
    assert [batch.tolist() for batch in DataLoader(Photos(), batch_size=6)] == [[1, 3, 5, 7, 9, 11]]
    assert [batch.tolist() for batch in DataLoader(Photos(), batch_size=4, shard=(2, 3))] == [[2, 5, 8, 11]]


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0), (1,), "ab", 3, (0.5, 2)])
def test_shard_that_is_none_is_refused(shard: Any) -> None:
    with pytest.raises(ConfigError):
        DataLoader(Photos(), shard=shard)


# Order


@pytest.mark.parametrize("num_samples", [11, 12])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torchs_order_is_that_of_its_distributed_sampler(num_samples: int, world_size: int) -> None:
    photos = Photos(num_samples)
    for rank in range(world_size):
        sampler = torch.utils.data.DistributedSampler(photos, world_size, rank, seed=5)
        torchs = TorchLoader(photos, batch_size=2, sampler=sampler)
        loader = DataLoader(photos, batch_size=2, shuffle=True, order="torch", seed=5, shard=(rank, world_size))
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in torchs]
    state = loader.state_dict()
    assert state["order"] == "torch"
    with pytest.raises(ConfigError, match="order torch, this loader has shuffled"):
        DataLoader(photos, batch_size=2, shuffle=True, seed=5, shard=(0, world_size)).load_state_dict(state)


def test_torchs_order_of_epoch_0_is_that_of_a_random_sampler() -> None:
    sampler = torch.utils.data.RandomSampler(Photos(), generator=torch.Generator().manual_seed(5))
    assert [int(index) for index in DataLoader(Photos(), shuffle=True, order="torch", seed=5)] == list(sampler)


def look_then_set(loader: Any, sampler: Any, epoch: int) -> None:
    """What a published script does before every epoch."""
    next(iter(loader))
    sampler.set_epoch(epoch)


EPOCH_HABITS: dict[str, Any] = {
    "never": lambda loader, sampler, epoch: None,
    "set": lambda loader, sampler, epoch: sampler.set_epoch(epoch),
    "same": lambda loader, sampler, epoch: sampler.set_epoch(5),
    "once": lambda loader, sampler, epoch: sampler.set_epoch(3) if epoch == 0 else None,
    "late": lambda loader, sampler, epoch: sampler.set_epoch(epoch - 1) if epoch else None,
    "looks": look_then_set,
}


@pytest.mark.parametrize("is_batch_sampler", [False, True])
@pytest.mark.parametrize("habit", EPOCH_HABITS)
def test_scripts_own_distributed_sampler_has_the_epochs_that_the_script_sets(
    habit: str, is_batch_sampler: bool
) -> None:
    def passes_of(kind: Any) -> list[Any]:
        sampler = torch.utils.data.DistributedSampler(Photos(), 2, 1)
        order = {"sampler": sampler, "batch_size": 2}
        if is_batch_sampler:
            order = {"batch_sampler": torch.utils.data.BatchSampler(sampler, 2, drop_last=False)}
        loader, found = kind(Photos(), **order), []
        for epoch in range(4):
            EPOCH_HABITS[habit](loader, sampler, epoch)
            found.append([batch.tolist() for batch in loader])
        return found

    assert passes_of(DataLoader) == passes_of(TorchLoader)


# "looks" would use up the state.
@pytest.mark.parametrize(
    ("habit", "epoch", "num_taken"),
    [
        *((habit, *place) for habit in ("never", "set", "same", "once", "late") for place in ((0, 1), (2, 2), (2, 3))),
        *((habit, epoch, 0) for habit in ("never", "set", "same", "once", "late") for epoch in (1, 3)),
    ],
)
def test_scripts_own_distributed_sampler_resumes_with_the_epoch_that_it_had(
    habit: str, epoch: int, num_taken: int
) -> None:
    def loop(loader: Any, sampler: Any, first: int, stop: tuple[int, int] | None) -> tuple[list[Any], Any]:
        found: list[Any] = []
        for number in range(first, 5):
            EPOCH_HABITS[habit](loader, sampler, number)
            for place, batch in enumerate(loader):
                found.append(batch.tolist())
                if (number, place + 1) == stop:
                    return found, loader.state_dict()
            if (number + 1, 0) == stop:
                return found, loader.state_dict()
        return found, None

    def make() -> tuple[Any, Any]:
        sampler = torch.utils.data.DistributedSampler(Photos(), 2, 1)
        return DataLoader(Photos(), sampler=sampler, batch_size=2), sampler

    whole, _ = loop(*make(), 0, None)
    before, state = loop(*make(), 0, (epoch, num_taken))
    loader, sampler = make()
    if habit == "once":  # before the loop, so in the resumed script too
        sampler.set_epoch(3)
    loader.load_state_dict(state)
    after, _ = loop(loader, sampler, epoch, None)
    assert before + after == whole


class Counted(torch.utils.data.Sampler[int]):
    """Has its epoch in its state."""

    def __init__(self) -> None:
        self.place = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < 8:
            self.place += 1
            yield order[self.place - 1]
        self.place = 0

    def state_dict(self) -> Any:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: Any) -> None:
        self.place, self.epoch = state["place"], state["epoch"]


def test_sampler_with_its_epoch_in_its_state_has_the_new_one_after_a_pass_that_was_left() -> None:
    found = []
    for kind in (DataLoader, TorchLoader):
        sampler = Counted()
        loader: Any = kind(Photos(), sampler=sampler)
        next(iter(loader))
        sampler.set_epoch(1)
        found.append(([int(index) for index in loader], sampler.epoch))
    assert found[0] == found[1]


def test_epoch_that_was_set_since_the_last_pass_is_in_the_state() -> None:
    def make() -> tuple[Any, Any]:
        sampler = torch.utils.data.DistributedSampler(Photos(), 2, 1)
        return DataLoader(Photos(), sampler=sampler), sampler

    for num_passes in (0, 1):
        loader, sampler = make()
        for _ in range(num_passes):
            list(loader)
        sampler.set_epoch(4)
        resumed, _ = make()
        resumed.load_state_dict(loader.state_dict())
        assert [int(index) for index in resumed] == [int(index) for index in loader]


def test_two_loaders_of_one_sampler_resume_with_its_epoch() -> None:
    sampler = torch.utils.data.DistributedSampler(Photos(), 2, 1)
    loaders = [DataLoader(Photos(), sampler=sampler) for _ in range(2)]
    sampler.set_epoch(3)
    list(loaders[0])
    next(iter(loaders[1]))
    assert loaders[1].state_dict()["sampler_epoch"] == 3


def test_sampler_that_draws_in_set_epoch_is_the_same_whatever_the_script_has_drawn() -> None:
    class Shuffled(torch.utils.data.Sampler[int]):
        def set_epoch(self, epoch: int) -> None:
            self.order = torch.randperm(12).tolist()

        def __iter__(self) -> Any:
            return iter(self.order)

    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        sampler = Shuffled()
        sampler.set_epoch(0)
        found.append([int(index) for index in DataLoader(Photos(), sampler=sampler)])
    assert found[0] == found[1]


def test_rest_of_an_epoch_draws_nothing_without_padding_either() -> None:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "padding": False, "shard": (0, 2)}
    loader = DataLoader(Photos(), **options)
    next(iter(loader))
    resumed = DataLoader(Photos(), **options)
    resumed.load_state_dict(loader.state_dict())
    before = torch.get_rng_state()
    iter(resumed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_rest_of_an_epoch_draws_what_the_whole_epoch_would_have_drawn(workers: dict[str, Any]) -> None:
    loader, noise = DataLoader(Photos(), batch_size=2, shuffle=True, **workers), []
    torch.manual_seed(3)
    for number, _ in enumerate(itertools.chain(loader, loader)):
        noise.append(torch.rand(()).item())
        if number == 1:
            state, generator = loader.state_dict(), torch.get_rng_state()
    resumed = DataLoader(Photos(), batch_size=2, shuffle=True, **workers)
    resumed.load_state_dict(state)
    torch.set_rng_state(generator)
    assert [torch.rand(()).item() for _ in itertools.chain(resumed, resumed)] == noise[2:]


def test_torchs_order_draws_from_the_scripts_generator_what_its_distributed_sampler_draws() -> None:
    after = []
    sampler = torch.utils.data.DistributedSampler(Photos(), 1, 0, seed=5)
    for loader in (
        TorchLoader(Photos(), sampler=sampler),
        DataLoader(Photos(), shuffle=True, order="torch", seed=5, shard=(0, 1)),
    ):
        torch.manual_seed(1)
        list(loader)
        after.append(torch.rand(()).item())
    assert after[0] == after[1]


def test_loaded_state_that_a_look_at_the_first_batch_used_up_is_said(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Photos(), batch_size=2)
    next(iter(loader))
    resumed = DataLoader(Photos(), batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert not caplog.text
    resumed.set_epoch(0)
    list(resumed)
    assert "the pass that resumed at epoch 0, batch 1 was left after its first batch, and the next" in caplog.text


def test_order_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="order is 'random', expected 'hetero' or 'torch'"):
        DataLoader(Photos(), order="random")


@pytest.mark.parametrize(("passed", "is_said"), [(sum, True), (None, False), (torch.utils.data.default_collate, False)])
def test_function_that_data_hosts_would_not_have_is_said_locally(
    passed: Any, is_said: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.torch.checks._warned", set())
    for _ in range(2):
        loader = DataLoader(drop_in_photos(), batch_size=2, collate_fn=passed)
    assert len(list(loader)) == 6
    assert caplog.text.count("collate_fn=sum was passed to the loader of data set 'drop_in_photos'") == is_said

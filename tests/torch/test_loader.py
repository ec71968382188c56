"""The loader, local: order, placement in processes, state, errors."""

from __future__ import annotations

import gc
import logging
import pickle
import random
import weakref
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

import hetero
from hetero.control import session as control
from hetero.errors import ConfigError, DatasetError
from hetero.torch import DataLoader, pipeline


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from every global generator."""

    def __init__(self, num_samples: int = 23) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        return index, torch.rand(2), random.random() + float(np.random.rand())


@hetero.dataset
def loader_test_noisy(num_samples: int = 23) -> Noisy:
    return Noisy(num_samples)


class Keyed(torch.utils.data.Dataset[Any]):
    def __getitem__(self, key: Any) -> str:
        return f"{key}"


def plain(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


def indices(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(rank: int, world_size: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return choose


def test_loader_is_torchs_and_delivers_every_sample_once_per_epoch() -> None:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    first, second = indices(loader), indices(loader)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(23))
    assert first != second
    assert len(loader) == len(first) == 6


def test_loader_workers_yield_the_same_bytes_and_leave_the_trainers_generators() -> None:
    def run(**options: Any) -> list[Any]:
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True, seed=5, **options)
        return plain(loader) + plain(loader)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    expected = run()
    assert run(num_workers=2) == expected
    assert run(num_workers=2, persistent_workers=True, prefetch_factor=1) == expected
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tobytes())


def test_loader_spec_and_object_yield_the_same() -> None:
    spec = loader_test_noisy(num_samples=11)
    assert plain(DataLoader(spec, batch_size=4, shuffle=True)) == plain(
        DataLoader(Noisy(11), batch_size=4, shuffle=True)
    )


def test_loader_sample_is_the_same_in_any_batch_size() -> None:
    small = {b[0].item(): b[1][0].tolist() for b in DataLoader(Noisy(), batch_size=1)}
    large = next(iter(DataLoader(Noisy(), batch_size=23, shuffle=True)))
    assert {int(i): x.tolist() for i, x in zip(large[0], large[1], strict=True)} == small


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 6), (True, 5)])
def test_loader_drop_last_as_torchs(drop_last: bool, expected: int) -> None:
    loader = DataLoader(Noisy(), batch_size=4, drop_last=drop_last)
    assert len(loader) == len(list(loader)) == expected


def test_loader_without_batching_yields_converted_samples() -> None:
    loader = DataLoader(Noisy(3), batch_size=None)
    samples = list(loader)
    assert len(loader) == 3
    assert [sample[0] for sample in samples] == [0, 1, 2]
    assert samples[0][1].shape == (2,)


@given(
    num_samples=st.integers(0, 30),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    other=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epochs=st.integers(0, 2),
    split=st.integers(0, 12),
)
def test_loader_state_at_any_split_and_world_size_gives_the_same_rest(
    num_samples: int,
    batch_size: int,
    world_size: int,
    other: int,
    shuffle: bool,
    drop_last: bool,
    epochs: int,
    split: int,
) -> None:
    global_batch = batch_size * world_size * other

    def run(
        world_size: int, state: dict[str, object] | None, take: list[int | None]
    ) -> tuple[list[list[list[int]]], list[dict[str, object]]]:
        """Return the global batches of passes over all ranks, and each rank's state after them."""
        merged: list[dict[int, list[int]]] = [{} for _ in take]
        states = []
        for rank in range(world_size):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RANK", str(rank))
                patch.setenv("WORLD_SIZE", str(world_size))
                loader = DataLoader(
                    range(num_samples),
                    batch_size=global_batch // world_size,
                    shuffle=shuffle,
                    drop_last=drop_last,
                    padding=False,  # what it repeats depends on the world size
                )
                if state is not None:
                    loader.load_state_dict(state)
                for number, count in enumerate(take):
                    for position, batch in enumerate(loader):
                        merged[number].setdefault(position, []).extend(batch.tolist())
                        if position + 1 == count:
                            break
                    states.append(loader.state_dict())
        assert all(found == states[-1] for found in states[len(take) - 1 :: max(1, len(take))])
        return [[sorted(indices) for indices in batches.values()] for batches in merged], states

    whole, _ = run(world_size, None, [None] * 5)
    length = len(whole[0])
    split = min(split, length)
    _, states = run(world_size, None, [None] * epochs + ([split] if split else []))
    rest, _ = run(other, states[-1] if states else None, [None, None])
    if split in (0, length):
        epochs_done = epochs + (split > 0)
        assert rest == whole[epochs_done : epochs_done + 2]
    else:
        assert rest == [whole[epochs][split:], whole[epochs + 1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_loader_ranks_take_every_second_element(world: Any, rank: int) -> None:
    world(rank, 2)
    loader = DataLoader(Noisy(9), batch_size=2)
    assert indices(loader) == ([[0, 2], [4, 6], [8]] if rank == 0 else [[1, 3], [5, 7], [0]])
    assert len(loader) == 3
    ends = DataLoader(Noisy(9), batch_size=2, padding=False)
    assert len(ends) == len(list(ends)) == 3 - rank


def test_loader_state_inside_the_loop_after_break_and_at_the_end() -> None:
    whole = DataLoader(Noisy(10), batch_size=4, shuffle=True)
    epoch_0, epoch_1 = plain(whole), plain(whole)
    loader = DataLoader(Noisy(10), batch_size=4, shuffle=True, num_workers=2)
    states = [loader.state_dict()]
    for _batch in loader:
        states.append(loader.state_dict())  # noqa: PERF401 - inside the loop is the point
    states.append(loader.state_dict())
    for place, state in enumerate(states):
        resumed = DataLoader(Noisy(10), batch_size=4, shuffle=True)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert plain(resumed) == (epoch_0[place:] or epoch_1)
        assert plain(resumed)[0] == (epoch_1 if place < 3 else plain(_at_epoch(whole, 2)))[0]


def _at_epoch(loader: Any, epoch: int) -> Any:
    loader.set_epoch(epoch)
    return loader


def test_loader_state_with_finished_epoch_named_again_is_an_empty_pass() -> None:
    loader = DataLoader(Noisy(10), batch_size=4)
    list(loader)
    resumed = DataLoader(Noisy(10), batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)  # for epoch in range(saved_epoch, ...), saved inside the last step of it
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert len(list(resumed)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed 0, this loader has 1"),
        ({"batch_size": 5}, "global_batch 4, this loader has 5"),
        ({"shuffle": True}, "order sequential, this loader has shuffled"),
        ({"dataset": range(9)}, "num_samples 10, this loader has 9"),
        ({"sampler": [1, 2]}, "order sequential, this loader has sampler"),
    ],
)
def test_loader_state_of_another_loader_raises(options: dict[str, Any], message: str) -> None:
    state = DataLoader(range(10), batch_size=4).state_dict()
    with pytest.raises(ConfigError, match=message):
        DataLoader(**{"dataset": range(10), "batch_size": 4, **options}).load_state_dict(state)


def test_loader_break_then_iter_is_the_next_epoch() -> None:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    for _ in loader:
        break
    second = indices(loader)
    loader.set_epoch(1)
    assert indices(loader) == second
    assert loader.state_dict()["epoch"] == 1


def test_loader_iterator_never_asked_is_no_epoch() -> None:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    iter(loader)
    unused = iter(loader)
    assert loader.state_dict()["epoch"] == 0
    first = indices(loader)
    loader.set_epoch(0)
    assert indices(loader) == first
    assert indices(unused) != first


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_loader_two_living_iterators_are_independent(options: dict[str, Any]) -> None:
    reference = DataLoader(range(12), batch_size=4, shuffle=True)
    epochs = [[b.tolist() for b in reference] for _ in range(2)]
    loader = DataLoader(range(12), batch_size=4, shuffle=True, **options)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert [a for a, _ in pairs] == epochs[0]
    assert [b for _, b in pairs] == epochs[1]


def test_loader_dropped_iterator_ends_at_once() -> None:
    loader = DataLoader(range(12), batch_size=4)
    gc.disable()
    try:
        iterator = iter(loader)
        next(iterator)
        batches = weakref.ref(iterator._batches)
        del iterator
        assert batches() is None
    finally:
        gc.enable()


def test_loader_can_be_pickled_and_continues() -> None:
    loader = DataLoader(loader_test_noisy(10), batch_size=4, shuffle=True, num_workers=1)
    expected = plain(loader)
    loader.set_epoch(0)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))
    copy.set_epoch(0)
    assert plain(copy) == expected


def test_loader_sampler_with_replacement_draws_repeats_differently() -> None:
    loader = DataLoader(Noisy(2), batch_size=8, sampler=WeightedRandomSampler([1.0, 1.0], 16))
    draws = {tuple(row.tolist()) for batch in loader for row in batch[1]}
    assert len(draws) == 16


def test_loader_sampler_state_replays_by_index_alone() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Noisy(5), batch_size=2, sampler=RandomSampler(range(5), replacement=True, num_samples=9))

    whole = make()
    epochs = [plain(whole), plain(whole)]
    loader = make()
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert plain(resumed) == epochs[0][2:]
    assert plain(resumed) == epochs[1]


class Stateful(Sampler[int]):
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 10:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_loader_sampler_with_a_state_is_resumed_at_what_was_delivered() -> None:
    loader = DataLoader(Noisy(10), batch_size=3, sampler=Stateful(), num_workers=2)
    iterator = iter(loader)
    first = plain([next(iterator)])
    state = loader.state_dict()
    rest = plain(iterator)
    assert state["sampler"] == {"place": 3}
    resumed = DataLoader(Noisy(10), batch_size=3, sampler=Stateful())
    resumed.load_state_dict(state)
    assert plain(resumed) == rest
    assert first[0][0] == [0, 1, 2]


def test_loader_sampler_that_ignores_ranks_warns_once(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    world(1, 2)
    loader = DataLoader(range(4), sampler=RandomSampler(range(4)))
    assert len(list(loader)) == len(list(loader)) == 4
    assert caplog.text.count("every rank draws the same batches from RandomSampler") == 1


def test_loader_keys_reach_the_data_set() -> None:
    loader = DataLoader(Keyed(), batch_sampler=[["a", (1, 2)], ["b"]], collate_fn="|".join)
    assert list(loader) == ["a|(1, 2)", "b"]
    assert len(loader) == 2


def test_loader_epoch_is_forwarded_to_the_sampler() -> None:
    sampler = torch.utils.data.distributed.DistributedSampler(range(8), num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader = DataLoader(range(8), sampler=sampler)
    loader.set_epoch(3)
    assert sampler.epoch == 3
    list(loader)
    list(loader)
    assert sampler.epoch == 4


def test_loader_failing_sample_names_index_and_traceback_from_workers_too() -> None:
    for num_workers in (0, 1):
        loader = DataLoader(Failing(), batch_size=2, num_workers=num_workers)
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(DatasetError) as caught:
            next(iterator)
        record: Any = caught.value.record
        assert (record.sample_index, record.stage) == ("3", "sample")
        assert "ZeroDivisionError" in record.exception
        assert list(iterator) == []


class Failing(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return index // (index != 3)


def test_loader_worker_init_fn_and_worker_info_as_in_torch() -> None:
    loader = DataLoader(Informed(), batch_size=2, num_workers=2, worker_init_fn=_mark)
    assert {value for batch in loader for value in batch.tolist()} == {200, 201}
    assert next(iter(DataLoader(Informed(), batch_size=2))).tolist() == [-1, -1]


class Informed(torch.utils.data.Dataset[int]):
    mark = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        return -1 if info is None else info.dataset.mark + info.id


def _mark(worker_index: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    assert info.id == worker_index
    info.dataset.mark = 100 * info.num_workers


def test_loader_prefetch_factor_without_workers_is_fine_and_torch_can_rebuild() -> None:
    loader = DataLoader(range(4), prefetch_factor=3, pin_memory=True)
    assert len(list(loader)) == 4
    assert loader.prefetch_factor is None


def test_loader_generator_gives_the_seed() -> None:
    before = (generator := torch.Generator().manual_seed(9)).get_state()
    loader = DataLoader(Noisy(), shuffle=True, generator=generator)
    assert indices(loader) == indices(DataLoader(Noisy(), shuffle=True, seed=9))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shuffle": True, "sampler": [0]}, ValueError, "mutually exclusive with shuffle"),
        ({"batch_size": 2, "batch_sampler": [[0]]}, ValueError, "mutually exclusive"),
        ({"batch_size": 0}, ValueError, "positive integer"),
        ({"batch_size": None, "drop_last": True}, ValueError, "drop_last"),
        ({"num_workers": -1}, ValueError, "non-negative"),
        ({"persistent_workers": True}, ValueError, "num_workers > 0"),
        ({"seed": 2**63}, ConfigError, "signed 64-bit"),
        ({"seed": "1"}, ConfigError, "signed 64-bit"),
        ({"seed": 1, "generator": torch.Generator()}, ConfigError, "pass one"),
    ],
)
def test_loader_contradicting_arguments_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataLoader(range(4), **options)


def test_loader_iterable_data_set_raises() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ConfigError, match="IterableDataset"):
        DataLoader(Stream())


def test_loader_data_set_stays_what_it_was() -> None:
    dataset = Noisy(5)
    loader = DataLoader(dataset)
    assert len(loader.dataset) == 5  # type: ignore[arg-type]
    assert loader.dataset.num_samples == 5  # type: ignore[attr-defined]
    assert loader.dataset[2][0] == 2
    assert DataLoader(loader_test_noisy()).dataset.name == "loader_test_noisy"  # type: ignore[attr-defined]


# With a session


class FakeSession:
    rank = 0
    world_size = 1

    def __init__(self, *, remote: bool = False, purity_checks: int = 0) -> None:
        self.remote = remote
        self.options = SimpleNamespace(purity_checks=purity_checks, warmup_steps=0, emulate_step_s=None)
        self.timers: list[Any] = []
        self.stops = 0
        self.stops_at = 0

    def register_timer(self, timer: Any) -> None:
        self.timers.append(timer)

    def check_stop(self, timer: object) -> None:
        self.stops += 1
        if self.stops_at == self.stops:
            raise SystemExit(143)


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(session: FakeSession) -> FakeSession:
        monkeypatch.setattr(control, "_session", session)
        monkeypatch.setattr(pipeline, "_num_verified", 0)
        return session

    yield choose
    hetero.datasets.set_describer(None)


def test_loader_registers_its_timer_and_stops_between_steps(join: Any) -> None:
    session = join(FakeSession())
    session.stops_at = 4
    loader = DataLoader(range(10), name="train")
    with pytest.raises(SystemExit):
        list(loader)
    assert loader.state_dict()["batches"] == 3
    assert [timer.name for timer in session.timers] == ["train"]
    assert session.timers[0].summary().num_steps == 3


def test_loader_first_batches_are_checked_for_purity(join: Any) -> None:
    class Impure(torch.utils.data.Dataset[int]):
        calls = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            self.calls += 1
            return self.calls

    join(FakeSession(purity_checks=1))
    with pytest.raises(DatasetError, match="purity"):
        list(DataLoader(Impure()))
    assert len(list(zip(range(3), DataLoader(Impure()), strict=False))) == 3


def test_loader_object_in_a_job_with_endpoints_raises(join: Any) -> None:
    join(FakeSession(remote=True))
    with pytest.raises(ConfigError, match=r"@hetero\.dataset"):
        DataLoader(range(10))


@hetero.dataset(collate_fn=sum)
def loader_test_summed() -> range:
    return range(10)


def test_loader_collate_fn_in_a_job_with_endpoints_must_be_the_decorators(join: Any) -> None:
    join(FakeSession(remote=True))
    DataLoader(loader_test_summed(), collate_fn=sum)
    with pytest.raises(ConfigError, match=r"@hetero\.dataset\(collate_fn=\.\.\.\)"):
        DataLoader(loader_test_noisy(), collate_fn=sum)
    with pytest.raises(ConfigError, match="worker_init_fn"):
        DataLoader(loader_test_noisy(), worker_init_fn=print)


def test_loader_beside_a_live_channel_does_not_fork(join: Any) -> None:
    join(FakeSession())
    with pytest.raises(ConfigError, match="fork"):
        list(DataLoader(range(10), num_workers=1, multiprocessing_context="fork"))


def test_loader_beside_a_live_channel_starts_workers_from_a_server(join: Any) -> None:
    join(FakeSession())
    assert [batch.tolist() for batch in DataLoader(range(5), batch_size=2, num_workers=1)] == [[0, 1], [2, 3], [4]]


def test_loader_set_epoch_after_load_state_warns(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(range(10))
    loader.load_state_dict({**loader.state_dict(), "epoch": 4, "batches": 2})
    with caplog.at_level(logging.WARNING):
        loader.set_epoch(0)
    assert "leaves the loaded state" in caplog.text


@pytest.mark.parametrize("name", ["__hetero_script__", "__mp_main__"])
def test_training_in_a_script_that_is_only_imported_is_refused(name: str) -> None:
    script = compile("for batch in loader:\n    pass", "train.py", "exec")
    loader = DataLoader([1, 2, 3])
    with pytest.raises(ConfigError, match=r"line 1 of train\.py trains while .*\n.*behind if __name__"):
        exec(script, {"__name__": name, "loader": loader})
    exec(script, {"__name__": "__main__", "loader": loader})


# Memory


class Stored(torch.utils.data.Dataset[Any]):
    """Hands out its own memory."""

    def __init__(self) -> None:
        self.rows = torch.arange(6.0).reshape(6, 1)
        self.array = self.rows.numpy()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.array[index]


class Reusing:
    """Collates into one buffer."""

    def __init__(self) -> None:
        self.buffer, self.array = torch.zeros(2), np.zeros(2)

    def __call__(self, samples: Any) -> Any:
        self.array[:] = self.buffer[:] = torch.cat([sample[0] for sample in samples])
        return {"tensor": self.buffer, "array": self.array}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_batches_share_no_memory_with_each_other(num_workers: int) -> None:
    batches = list(DataLoader(Stored(), batch_size=2, num_workers=num_workers, collate_fn=Reusing()))
    for name in ("tensor", "array"):
        assert [batch[name].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_size": 1, "collate_fn": list}])
def test_loader_batches_written_to_leave_the_data_set_alone(options: dict[str, Any], num_workers: int) -> None:
    loader = DataLoader(Stored(), num_workers=num_workers, persistent_workers=num_workers > 0, **options)
    for _ in range(2):
        for number, batch in enumerate(loader):
            tensor, array = batch if options["batch_size"] is None else batch[0]
            assert (tensor.item(), array.item()) == (number, number)
            tensor.zero_()
            array[:] = 0


# Collation


@pytest.mark.parametrize("function", [torch.utils.data.default_convert, torch.utils.data.default_collate, None])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_loader_with_torchs_collation_functions_does_as_torch(function: Any, batch_size: int | None) -> None:
    def collected(kind: Any) -> list[str]:
        return [repr(batch) for batch in kind([1.5, 2.5], batch_size=batch_size, collate_fn=function)]

    if batch_size is None and function is torch.utils.data.default_collate:
        for kind in (DataLoader, torch.utils.data.DataLoader):
            with pytest.raises((DatasetError, TypeError), match="not subscriptable"):
                collected(kind)
    else:
        assert collected(DataLoader) == collected(torch.utils.data.DataLoader)


def test_loader_with_the_other_default_function_in_a_job_with_endpoints_raises(join: Any) -> None:
    join(FakeSession(remote=True))
    DataLoader(loader_test_noisy(), collate_fn=torch.utils.data.default_collate)
    DataLoader(loader_test_noisy(), batch_size=None, collate_fn=torch.utils.data.default_convert)
    with pytest.raises(ConfigError, match="collate_fn"):
        DataLoader(loader_test_noisy(), collate_fn=torch.utils.data.default_convert)


# Factories

_num_built = 0


@hetero.dataset
def loader_test_random_length() -> Any:
    global _num_built
    _num_built += 1
    return range(random.randrange(10, 1000))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_length_is_that_of_the_data_set_it_fetches_from(num_workers: int) -> None:
    global _num_built
    before, _num_built = random.getstate(), 0
    loader = DataLoader(loader_test_random_length(), batch_size=None, num_workers=num_workers)
    assert len(loader) == len(loader.dataset) == len(list(loader))  # type: ignore[arg-type]
    assert _num_built == 1
    assert random.getstate() == before
    assert len(loader_test_random_length()) == len(loader)  # built again, the same
    assert random.getstate() == before


def test_loader_data_set_that_fails_in_a_spawned_worker_is_reported_whole() -> None:
    loader = DataLoader(
        loader_test_noisy(4), num_workers=1, multiprocessing_context="spawn", worker_init_fn=_fail_to_start
    )
    with pytest.raises(DatasetError) as caught:
        list(loader)
    record: Any = caught.value.record
    assert (record.dataset, record.stage) == ("loader_test_noisy", "build")
    assert record.exception == "ZeroDivisionError: division by zero (in worker_init_fn)"


def _fail_to_start(worker_index: int) -> None:
    raise ZeroDivisionError("division by zero")


# Samplers


class Keeping(Stateful):
    """Goes on for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place += 1
            yield (self.place - 1) % 10


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "prefetch_factor": 3}])
@pytest.mark.parametrize("rebuild", [False, True])
def test_loader_left_early_goes_on_from_what_was_delivered(options: dict[str, Any], rebuild: bool) -> None:
    loader: Any = DataLoader(Noisy(10), batch_size=2, sampler=Keeping(), **options)
    if rebuild:  # as a tool does
        loader = torch.utils.data.DataLoader(
            loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
        )
    found = [indices(batch for _, batch in zip(range(3), loader, strict=False)) for _ in range(2)]
    assert found == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [0, 1]]]


def test_loader_with_a_generator_that_its_sampler_has_too_can_be_resumed_and_rebuilt() -> None:
    generator = torch.Generator().manual_seed(9)

    def make() -> DataLoader[Any]:
        return DataLoader(
            Noisy(8), batch_size=2, sampler=RandomSampler(range(8), generator=generator), generator=generator
        )

    first = make()
    epochs = [plain(first), plain(first)]
    again = make()
    assert [plain(again), plain(again)] == epochs
    first.set_epoch(1)
    iterator = iter(first)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(first.state_dict())
    assert plain(resumed) == epochs[1][1:]

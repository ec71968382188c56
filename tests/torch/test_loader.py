"""The loader, local: samples, placement in processes, memory, errors."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import hetero
from hetero.errors import ConfigError, DatasetError
from hetero.torch import DataLoader
from tests.support.torch.loaders import Noisy, fail_to_start, indices, loader_test_noisy, plain, rebuilt_by_tool


class Keyed(torch.utils.data.Dataset[Any]):
    def __getitem__(self, key: Any) -> str:
        return f"{key}"


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
    after = torch.get_rng_state()
    torch.set_rng_state(before[0])
    for _ in range(4 + 4 + 3):  # what torch's loader draws: a seed of its workers, and one of its sampler
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tobytes())


def test_loader_of_no_samples_has_nothing_to_shuffle_and_says_so_where_it_goes_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match=r"data set loader_test_noisy\(.*\) has no samples\n  Check that"):
        list(DataLoader(loader_test_noisy(num_samples=0), batch_size=2, shuffle=True))
    loader = DataLoader(loader_test_noisy(num_samples=0), batch_size=2, name="validation")
    for _ in range(2):
        assert list(loader) == []
    (warning,) = caplog.messages
    assert warning.endswith("has no samples, so loader validation has no batches")


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


@pytest.mark.parametrize("rank", [0, 1])
def test_loader_ranks_take_every_second_element(world: Any, rank: int) -> None:
    world(rank, 2)
    loader = DataLoader(Noisy(9), batch_size=2)
    assert indices(loader) == ([[0, 2], [4, 6], [8]] if rank == 0 else [[1, 3], [5, 7], [0]])
    assert len(loader) == 3
    ends = DataLoader(Noisy(9), batch_size=2, padding=False)
    assert len(ends) == len(list(ends)) == 3 - rank


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_loader_two_living_iterators_are_independent(options: dict[str, Any]) -> None:
    reference = DataLoader(range(12), batch_size=4, shuffle=True)
    epochs = [[b.tolist() for b in reference] for _ in range(2)]
    loader = DataLoader(range(12), batch_size=4, shuffle=True, **options)
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert [a for a, _ in pairs] == epochs[0]
    assert [b for _, b in pairs] == epochs[1]


class Processes(torch.utils.data.Dataset[int]):
    """Each sample is the process that made it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class FailsOnce:
    """A sampler that raises in its first pass."""

    def __init__(self) -> None:
        self.has_failed = False

    def __iter__(self) -> Iterator[int]:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("no order yet")
        return iter(range(4))

    def __len__(self) -> int:
        return 4


def test_loader_persistent_workers_serve_the_passes_after_one_whose_sampler_raised() -> None:
    loader = DataLoader(Processes(), batch_size=None, sampler=FailsOnce(), num_workers=1, persistent_workers=True)
    with pytest.raises(RuntimeError, match="no order yet"):
        list(loader)
    iter(loader)  # not begun: takes nothing
    workers = set(loader)
    assert len(workers) == 1
    assert set(loader) == workers


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


def test_loader_keys_reach_the_data_set() -> None:
    loader = DataLoader(Keyed(), batch_sampler=[["a", (1, 2)], ["b"]], collate_fn="|".join)
    assert list(loader) == ["a|(1, 2)", "b"]
    assert len(loader) == 2


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
        assert [batch.tolist() for batch in iterator] == [[4]]


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


class Growing(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.items = [0, 1, 2]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_data_set_that_grows_between_epochs_is_read_whole(num_workers: int) -> None:
    growing = Growing()
    loader = DataLoader(growing, batch_size=2, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]
    growing.items += [3, 4]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert len(loader) == 3
    growing.items.clear()
    assert list(loader) == []


@pytest.mark.parametrize("is_over", [False, True])
def test_loader_state_of_an_epoch_that_ended_before_the_data_set_grew_goes_on_with_the_next(is_over: bool) -> None:
    growing = Growing()
    loader = DataLoader(growing, batch_size=2)
    passed = iter(loader)
    assert [next(passed).tolist() for _ in range(2)] == [[0, 1], [2]]
    if is_over:
        assert next(passed, None) is None
    growing.items += [3, 4]
    state = loader.state_dict()
    again = DataLoader(growing, batch_size=2)
    again.load_state_dict(state)
    assert again.state_dict() == state
    if not is_over:  # taken in the loop's last step
        assert list(again) == []
    assert [batch.tolist() for batch in again] == [[0, 1], [2, 3], [4]]
    assert again.state_dict()["epoch"] == 1
    again.load_state_dict(state)
    again.set_epoch(0)
    assert list(again) == []


def test_loader_state_of_an_epoch_in_which_the_data_set_grew_is_refused() -> None:
    growing = Growing()
    loader = DataLoader(growing, batch_size=2, shuffle=True)
    next(iter(loader))
    growing.items += [3, 4]
    state = loader.state_dict()
    assert state["num_samples"] == 3
    with pytest.raises(ConfigError, match="num_samples 3, this loader has 5"):
        DataLoader(growing, batch_size=2, shuffle=True).load_state_dict(state)
    del growing.items[3:]
    loader.load_state_dict(state)
    growing.items += [3, 4]
    with pytest.raises(ConfigError, match="an epoch of 3 samples, the data set has 5 now"):
        next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
def test_loader_prefetch_factor_that_endpoints_would_refuse_is_refused_without_any(
    value: object, num_workers: int
) -> None:
    with pytest.raises(ConfigError, match=f"prefetch_factor is {value!r}, expected an integer of at least 1"):
        DataLoader(range(4), prefetch_factor=value, num_workers=num_workers)  # type: ignore[arg-type]


def test_loader_prefetch_factor_without_workers_is_fine_and_torch_can_rebuild() -> None:
    loader = DataLoader(range(4), prefetch_factor=3, pin_memory=True)
    assert len(list(loader)) == 4
    assert loader.prefetch_factor is None


def test_loader_generator_gives_the_seed() -> None:
    generator = torch.Generator().manual_seed(9)
    loader = DataLoader(Noisy(), shuffle=True, generator=generator)
    assert indices(loader) == indices(DataLoader(Noisy(), shuffle=True, seed=9))
    expected = torch.Generator().manual_seed(9)
    torch.empty((), dtype=torch.int64).random_(generator=expected)  # as torch's loader does at the start of a pass
    assert torch.equal(generator.get_state(), expected.get_state())


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
        ({"name": "tr\ud800in"}, ConfigError, r"name is 'tr\\ud800in', expected at most 200 printable characters\n"),
        ({"name": "two\nlines"}, ConfigError, r"name is 'two\\nlines', expected"),
        ({"name": "x" * 201}, ConfigError, r"name is 'x{20}'\.\.\. of 201 characters, expected"),
        ({"name": 5}, ConfigError, "name is 5, expected"),
    ],
)
def test_loader_contradicting_arguments_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataLoader(range(4), **options)


def test_loader_name_of_200_characters_is_taken() -> None:
    assert DataLoader(range(4), name="x" * 200).step_timer.name == "x" * 200


def test_loader_iterable_data_set_raises() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ConfigError, match="Stream is iterable, and has no index"):
        DataLoader(Stream())


def test_loader_data_set_stays_what_it_was() -> None:
    dataset = Noisy(5)
    loader = DataLoader(dataset)
    assert len(loader.dataset) == 5  # type: ignore[arg-type]
    assert loader.dataset.num_samples == 5  # type: ignore[attr-defined]
    assert loader.dataset[2][0] == 2
    assert DataLoader(loader_test_noisy()).dataset.name == "loader_test_noisy"  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("name", ["__hetero_script__", "__mp_main__"])
def test_training_in_a_script_that_is_only_imported_is_refused(name: str, is_rebuilt: bool) -> None:
    script = compile("for batch in loader:\n    pass", "train.py", "exec")
    loader: Any = DataLoader([1, 2, 3])
    if is_rebuilt:
        loader = rebuilt_by_tool(loader)
    with pytest.raises(ConfigError, match=r"line 1 of train\.py trains while .*\n.*behind if __name__"):
        exec(script, {"__name__": name, "loader": loader})
    exec(script, {"__name__": "__main__", "loader": loader})


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
        loader_test_noisy(4), num_workers=1, multiprocessing_context="spawn", worker_init_fn=fail_to_start
    )
    with pytest.raises(DatasetError) as caught:
        list(loader)
    record: Any = caught.value.record
    assert (record.dataset, record.stage) == ("loader_test_noisy", "build")
    assert record.exception == "ZeroDivisionError: division by zero (in worker_init_fn)"

"""Data sets as a process builds them: factories, workers, whose memory a batch is."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import fetch
from hetero.datasets import build, dataset, prebuild
from hetero.errors import ConfigError, DatasetError
from hetero.spec import DatasetSpec
from tests.support.batches.subjects import Augmented, Batched, Seeded, failure, request

torch = pytest.importorskip("torch")
data = torch.utils.data


def test_build_passes_arguments_and_decorations() -> None:
    @dataset(seeding="batch", collate_fn=sum)
    def numbers(values: list[int]) -> list[int]:
        return values

    built = build(numbers((5, 6, 7)))
    assert (len(built), built.name, built.seeding) == (3, "numbers", "batch")
    assert fetch(built, request((0, 2))) == 12


class Scaled(data.Dataset[int]):
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, samples: list[int]) -> list[int]:
        return [self.scale * sample for sample in samples]


@pytest.mark.parametrize(("options", "expected"), [({}, [0, 20, 30]), ({"collate_fn": sum}, 5)])
def test_collate_fn_of_the_data_set_has_the_arguments_of_the_factory(options: Any, expected: Any) -> None:
    @dataset(name=f"scaled-{len(options)}", **options)
    def scaled(scale: int) -> Scaled:
        return Scaled(scale)

    assert fetch(build(scaled(10)), request((0, 2, 3))) == expected


def test_build_with_random_factory_is_the_same_everywhere_and_leaves_generators_alone() -> None:
    @dataset
    def split() -> Any:
        return data.random_split(list(range(100)), [50, 50])[0]

    state = torch.get_rng_state()
    first = build(split()).dataset.indices
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(3)
    assert build(split()).dataset.indices == first


def test_build_with_factory_raising_names_stage_and_host() -> None:
    @dataset
    def broken(root: str) -> Any:
        raise FileNotFoundError(root)

    with pytest.raises(
        DatasetError, match="data set 'broken' failed on algo-1/0 while it was built: FileNotFoundError: /x"
    ) as raised:
        build(broken("/x"), host="algo-1/0")
    assert "in broken" in failure(raised).traceback


class Stream(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: iter([1]), "an iterator .*which can be read only once"),
        (lambda: None, "None; return the data set"),
        (lambda: DatasetSpec("other"), "a DatasetSpec; build 'other'"),
        (lambda: 3, "not a data set"),
    ],
)
def test_build_with_unfit_result_says_what_to_do(make: Callable[[], Any], expected: str) -> None:
    spec = dataset(name="unfit")(make)() if not isinstance(make, type) else dataset(name="unfit")(lambda: make())()
    with pytest.raises(DatasetError, match=f"while it was built: ConfigError: the factory returned {expected}"):
        build(spec)
    with pytest.raises(ConfigError, match=expected):
        BuiltDataset.from_object(make())


class Counted(Augmented):
    num_asked = 0

    def __len__(self) -> int:
        self.num_asked += 1
        return 20


@pytest.mark.parametrize("is_own", [False, True])
def test_build_length_is_asked_once_except_of_the_users_own_object(is_own: bool) -> None:
    counted = Counted()
    built = BuiltDataset.from_object(counted) if is_own else build(dataset(name="counted")(lambda: counted)())
    before = counted.num_asked
    assert [built.num_samples, len(built), built.num_samples] == [20] * 3
    assert counted.num_asked - before == (3 if is_own else 1)


def test_build_as_worker_calls_worker_init_fn_once_with_info() -> None:
    calls: list[Any] = []

    @dataset(worker_init_fn=lambda index: calls.append((index, data.get_worker_info())))
    def numbers() -> list[int]:
        return [1]

    build(numbers())
    assert calls == []
    built = build(numbers(), worker_index=1, num_workers=3)
    ((index, info),) = calls
    assert (index, info.id, info.num_workers, info.dataset) == (1, 1, 3, built.dataset)
    with pytest.raises(ConfigError, match="worker index 3 is out of range"):
        build(numbers(), worker_index=3, num_workers=3)


def test_build_with_worker_init_fn_raising_names_it() -> None:
    @dataset(worker_init_fn=lambda index: 1 // index)
    def numbers() -> list[int]:
        return [1]

    with pytest.raises(DatasetError, match=r"while it was built: ZeroDivisionError.* \(in worker_init_fn\)"):
        build(numbers(), num_workers=1)


def test_prebuilt_dataset_becomes_worker_later() -> None:
    informed = dataset(name="informed", worker_init_fn=lambda index: calls.append(index))(lambda: Informed())
    calls: list[int] = []
    built = prebuild(informed())
    assert calls == []
    built.become_worker(2, 5)
    assert calls == [2]
    assert fetch(built, request((0,))).tolist() == [[2, 5]]


class Informed(Augmented):
    def __getitem__(self, index: int) -> Any:
        info = data.get_worker_info()
        return torch.tensor([-1, -1] if info is None else [info.id, info.num_workers])


@pytest.mark.parametrize("num_workers", [0, 4])
def test_fetch_gives_worker_info_and_no_shared_memory(num_workers: int) -> None:
    informed = dataset(name="informed")(lambda: Informed())
    built = build(informed(), worker_index=min(2, num_workers), num_workers=num_workers)
    batch = fetch(built, request((0, 1)))
    assert batch.tolist() == [[2, 4] if num_workers else [-1, -1]] * 2
    assert not batch.is_shared()
    assert data.get_worker_info() is None


def test_fetch_inside_torchs_worker_keeps_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    informed = dataset(name="informed")(lambda: Informed())
    built = build(informed(), worker_index=2, num_workers=4)
    theirs = data._utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(data._utils.worker, "_worker_info", theirs)
    batch = fetch(built, request((0, 1)))
    assert batch.tolist() == [[2, 4]] * 2
    assert batch.is_shared()
    assert data.get_worker_info() is theirs


@pytest.mark.parametrize(
    ("options", "collate", "expected"),
    [
        ({"seeding": "sample"}, True, True),
        ({"seeding": "sample"}, False, False),
        ({"seeding": "sample", "collate_fn": list}, True, False),
        ({"seeding": "batch"}, True, False),
        ({}, True, False),  # it has __getitems__
    ],
)
def test_batches_of_torchs_collation_alone_are_new_memory(options: Any, collate: bool, expected: bool) -> None:
    assert BuiltDataset.from_object(Batched(), **options).makes_new_memory(collate=collate) == expected


def test_batches_of_a_collation_that_the_user_changed_may_be_used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(functions, set, lambda batch, **options: batch)
    assert not BuiltDataset.from_object(Augmented()).makes_new_memory(collate=True)


def test_batches_of_a_torch_that_keeps_its_collation_elsewhere_may_be_used_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(data._utils.collate, "default_collate_fn_map")
    assert not BuiltDataset.from_object(Augmented()).makes_new_memory(collate=True)


def test_built_dataset_survives_pickling() -> None:
    built = pickle.loads(pickle.dumps(BuiltDataset.from_object(Seeded())))
    fetch(built, request((3,)))
    assert len(built.dataset.keys) == 2


def test_build_a_data_set_with_an_epoch_of_its_own_warns() -> None:
    class Epochs(list[int]):
        def set_epoch(self, epoch: int) -> None:
            raise AssertionError("nobody calls it")

    (warning,) = build(dataset(name="epochs")(lambda: Epochs([1]))()).warnings
    line = Epochs.set_epoch.__code__.co_firstlineno
    assert warning.startswith(f"data set 'epochs': its set_epoch() in test_build.py:{line} is never called")

"""Keras data sets, without Keras. They are known by the class and package that they derive from."""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import hetero
from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import describe, fetch
from hetero.batches.indexed import IndexedWork
from hetero.batches.keras import EpochCopies, is_keras_dataset, num_batches, overridden_hooks, to_arrays
from hetero.batches.request import BatchRequest
from hetero.datasets import build
from hetero.errors import ConfigError, DatasetError
from hetero.spec import DatasetSpec

LARGE = 2**21  # of int64: 16 MiB


class PyDataset:
    """The parts of Keras 3's class that matter here."""

    __module__ = "keras.src.trainers.data_adapters.py_dataset_adapter"

    @property
    def num_batches(self) -> int | None:
        if hasattr(self, "__len__"):
            return len(self)
        raise NotImplementedError

    def on_epoch_begin(self) -> None:
        """Called before each epoch."""

    def on_epoch_end(self) -> None:
        """Called before each epoch too, the first included: see `test_keras_3_calls_the_methods_in_this_order`."""


class Sequence:
    """Keras 2's."""

    __module__ = "tf_keras.src.utils.data_utils"

    def on_epoch_end(self) -> None:
        pass


class Plain(PyDataset):
    def __init__(self, num_samples: int = 10, batch_size: int = 4) -> None:
        self.indexes = np.arange(num_samples)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indexes) // self.batch_size)

    def __getitem__(self, number: int) -> Any:
        chosen = self.indexes[number * self.batch_size : (number + 1) * self.batch_size]
        return chosen.astype(np.float32) + np.float32(random.random()), chosen


class Shuffled(Plain):
    """What most of those that people write do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.epoch = 0

    def on_epoch_end(self) -> None:
        self.epoch += 1
        np.random.shuffle(self.indexes)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DatasetSpec]:
    """Register a factory for the length of a test."""
    monkeypatch.setattr("hetero.datasets._factories", {})

    def register(make: Callable[[], Any], **options: Any) -> DatasetSpec:
        def keras_test() -> Any:
            return make()

        return hetero.dataset(**options)(keras_test)()

    return register


def batch(built: BuiltDataset, number: int, *, epoch: int = 0, seed: int = 5, **options: Any) -> Any:
    options = {"collate": False, "as_is": True, **options}
    indices = np.array([number], np.int64)
    spec = DatasetSpec("keras_test")
    return fetch(
        built, BatchRequest(spec=spec, work=IndexedWork(indices), seed=seed, epoch=epoch, position=number, **options)
    )


def order(built: BuiltDataset, epoch: int, seed: int = 5) -> list[int]:
    """Return the samples of an epoch."""
    return [index for number in range(len(built)) for index in batch(built, number, epoch=epoch, seed=seed)[1]]


def test_class_of_keras_is_found_by_name_in_either_package() -> None:
    class Old(Sequence):
        pass

    assert is_keras_dataset(Plain())
    assert is_keras_dataset(Old())
    assert not is_keras_dataset(type("PyDataset", (), {})())
    assert not is_keras_dataset([1])
    assert overridden_hooks(Plain()) == overridden_hooks(Old()) == overridden_hooks([]) == ()
    assert overridden_hooks(Shuffled()) == ("on_epoch_end",)


def test_length_is_that_of_num_batches_where_there_is_no_len(register: Any) -> None:
    class Numbered(PyDataset):
        num_batches = 7  # type: ignore[assignment]

        def __getitem__(self, number: int) -> int:
            return number

    assert num_batches(Numbered()) == 7
    assert len(build(register(Numbered))) == 7


def test_batch_without_hooks_is_the_item_of_the_one_object(register: Any) -> None:
    built = build(register(Plain))
    object_before = built.dataset
    values, chosen = batch(built, 2, epoch=3)
    assert (type(values), values.dtype, chosen.tolist()) == (np.ndarray, np.float32, [8, 9])
    assert built.dataset is object_before
    again, _ = batch(build(register(Plain)), 2, epoch=3)
    assert values.tobytes() == again.tobytes()


def test_epoch_is_the_same_whichever_was_asked_for_before(register: Any) -> None:
    epochs = range(4)
    in_turn = build(register(Shuffled))
    wanted = [order(in_turn, epoch) for epoch in epochs]
    assert wanted[0] != list(range(10))
    assert len({tuple(each) for each in wanted}) == 4
    assert all(sorted(each) == list(range(10)) for each in wanted)
    assert [order(build(register(Shuffled)), epoch) for epoch in epochs] == wanted
    jumping = build(register(Shuffled))
    assert [order(jumping, epoch) for epoch in (3, 0, 2, 1, 2)] == [wanted[epoch] for epoch in (3, 0, 2, 1, 2)]
    assert order(jumping, 2, seed=6) != wanted[2]
    assert jumping.dataset.epoch == 3


def test_epochs_that_overlap_are_made_once(register: Any) -> None:
    built = build(register(Shuffled))
    batch(built, 0, epoch=6)
    sixth = built.dataset
    batch(built, 0, epoch=7)
    batch(built, 0, epoch=6)
    assert built.dataset is sixth


def test_epoch_does_not_depend_on_what_batches_change(register: Any) -> None:
    class Drawing(Shuffled):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random.default_rng(1)

        def __getitem__(self, number: int) -> Any:
            self.generator.random()
            return super().__getitem__(number)

        def on_epoch_end(self) -> None:
            self.generator.shuffle(self.indexes)

    wanted = order(build(register(Drawing)), 1)
    built = build(register(Drawing))
    order(built, 0)
    assert order(built, 1) == wanted


def test_methods_are_called_before_each_epoch_the_first_included(register: Any) -> None:
    class Begun(Plain):
        calls: tuple[str, ...] = ()

        def on_epoch_begin(self) -> None:
            self.calls += ("begin",)

        def on_epoch_end(self) -> None:
            self.calls += ("end",)

    built = build(register(Begun))
    batch(built, 0)
    assert built.dataset.calls == ("end", "begin")
    batch(built, 0, epoch=2)
    assert built.dataset.calls == ("end", "begin") * 3


def test_data_set_of_keras_2_is_as_it_was_made_in_epoch_0(register: Any) -> None:
    class Old(Sequence):
        num_epochs = 0

        def __len__(self) -> int:
            return 1

        def __getitem__(self, number: int) -> int:
            return self.num_epochs

        def on_epoch_end(self) -> None:
            self.num_epochs += 1

    built = build(register(Old))
    assert [batch(built, 0, epoch=epoch) for epoch in (0, 3, 1)] == [0, 3, 1]


def test_description_is_that_of_epoch_0_whatever_was_fetched(register: Any) -> None:
    wanted = describe(build(register(Shuffled)))
    built = build(register(Shuffled))
    batch(built, 0, epoch=3)
    assert describe(built) == wanted
    assert wanted.num_samples == 3
    by_function = register(Shuffled, fingerprint=lambda dataset: str(dataset.indexes.tolist()))
    built = build(by_function)
    batch(built, 0, epoch=3)
    assert describe(built).fingerprint == describe(build(by_function)).fingerprint


def test_description_probes_two_batches_only(register: Any) -> None:
    asked: list[int] = []

    class Asked(Plain):
        def __getitem__(self, number: int) -> Any:
            asked.append(number)
            return super().__getitem__(number)

    describe(build(register(lambda: Asked(num_samples=100))))
    assert asked == [0, 0, 24, 24]


def test_large_arrays_are_shared_and_protected_while_an_epoch_begins(register: Any) -> None:
    class Holding(Shuffled):
        def __init__(self) -> None:
            super().__init__()
            self.images = {"all": np.zeros(LARGE, np.int64)}
            self.first = self.images["all"][: LARGE // 1]

    original = Holding()
    copies = EpochCopies(original)
    one, other = copies.at(0, 1), copies.at(0, 2)
    assert one is not other
    assert one.images["all"] is other.images["all"] is original.images["all"]
    assert one.indexes is not original.indexes
    assert original.images["all"].flags.writeable
    assert original.first.flags.writeable


def test_large_array_that_is_shuffled_in_place_is_copied() -> None:
    class Large(Shuffled):
        pass

    original = Large(num_samples=LARGE)
    copies = EpochCopies(original)
    first = copies.at(0, 1)
    assert original.indexes[:1000].tolist() == list(range(1000))
    assert first.epoch == 2
    assert first.indexes[:1000].tolist() != list(range(1000))
    assert np.array_equal(EpochCopies(Large(num_samples=LARGE)).at(0, 1).indexes, first.indexes)
    copies.at(0, 2)
    assert np.array_equal(copies.at(0, 1).indexes, first.indexes)


def test_data_set_that_cannot_be_copied_says_what_to_do(register: Any) -> None:
    class Locked(Shuffled):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    built = build(register(Locked))
    with pytest.raises(DatasetError, match=r"(?s)so .* cannot be copied: .*lock.*\n      Open files and"):
        batch(built, 0)


def test_error_in_a_hook_names_the_epoch_and_is_raised_again(register: Any) -> None:
    class Failing(Shuffled):
        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            if self.epoch == 3:
                raise KeyError("no such epoch")

    built = build(register(Failing))
    assert batch(built, 0, epoch=1)[1].shape == (4,)
    for _ in range(2):
        with pytest.raises(DatasetError, match=r"KeyError: 'no such epoch' \(before epoch 2\)"):
            batch(built, 0, epoch=2)
    assert order(built, 1) == order(build(register(Shuffled)), 1)


def test_length_that_changes_is_refused(register: Any) -> None:
    class Growing(Plain):
        begun = 0

        def on_epoch_begin(self) -> None:
            self.indexes = np.arange(len(self.indexes) + 4 * self.begun)
            self.begun = 1

    with pytest.raises(DatasetError, match="it has 4 batches in epoch 1 and 3 when it is made"):
        batch(build(register(Growing)), 0, epoch=1)


def test_endless_data_set_is_refused(register: Any) -> None:
    class Endless(PyDataset):
        num_batches = None  # type: ignore[assignment]

        def __getitem__(self, number: int) -> int:
            return number

    class Forgotten(PyDataset):
        def __getitem__(self, number: int) -> int:
            return number

    for kind in (Endless, Forgotten):
        with pytest.raises(DatasetError, match=r"an endless PyDataset \(.*give it __len__"):
            build(register(kind))


def test_iterator_of_an_image_generator_is_refused(register: Any) -> None:
    class Iterator(PyDataset):
        __module__ = "keras.src.legacy.preprocessing.image"

    class DirectoryIterator(Iterator):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, number: int) -> int:
            return number

    with pytest.raises(DatasetError, match=r"DirectoryIterator, which draws its order .* others would be missing"):
        build(register(DirectoryIterator))


def test_batch_size_for_what_makes_batches_is_refused(register: Any) -> None:
    with pytest.raises(DatasetError, match="batches already; pass batch_size=None"):
        batch(build(register(Plain)), 0, collate=True, as_is=False)


def test_torch_gets_tensors(register: Any) -> None:
    torch = pytest.importorskip("torch")
    built = build(register(Plain))
    values, chosen = batch(built, 1, as_is=False)
    assert isinstance(values, torch.Tensor)
    assert chosen.tolist() == [4, 5, 6, 7]


def test_collate_fn_is_given_the_batch(register: Any) -> None:
    built = build(register(Plain, collate_fn=lambda batch: {"index": batch[1]}))
    assert batch(built, 1)["index"].tolist() == [4, 5, 6, 7]


def test_object_is_taken_as_torch_takes_it_and_its_hooks_are_said_not_to_run(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Shuffled()
    built = BuiltDataset.from_object(dataset)
    assert "on_epoch_end of Shuffled will not be called" in caplog.text
    assert batch(built, 0, epoch=4)[1].tolist() == [0, 1, 2, 3]
    assert built.dataset is dataset
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        BuiltDataset.from_object(Plain())
    assert not caplog.text


class Pair(NamedTuple):
    one: Any
    other: Any


class Foreign:
    """A tensor of another framework."""

    __module__ = "tensorflow.python.framework.ops"

    def __array__(self, *_: object, **__: object) -> Any:
        return np.arange(3)


def test_tensors_of_other_frameworks_become_arrays() -> None:
    found = to_arrays({"a": [Foreign(), 1], "b": Pair(Foreign(), "text"), "c": OrderedDict(d=(Foreign(),))})
    assert type(found["b"]) is Pair
    assert type(found["c"]) is OrderedDict
    arrays = [found["a"][0], found["b"].one, found["c"]["d"][0]]
    assert all(type(array) is np.ndarray and array.tolist() == [0, 1, 2] for array in arrays)
    assert (found["a"][1], found["b"].other) == (1, "text")
    array = np.zeros(1)
    assert to_arrays(array) is array


def test_copies_raise_what_is_no_matter_of_protection() -> None:
    class Wrong(Plain):
        def on_epoch_end(self) -> None:
            raise ValueError("other")

    with pytest.raises(ValueError, match="other"):
        EpochCopies(Wrong()).at(0, 1)
    with pytest.raises(ConfigError):
        EpochCopies(threading.Lock()).at(0, 0)

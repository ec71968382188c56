"""Keras' `PyDataset` and `Sequence`: data sets whose items are batches, and that may change between epochs.

Keras calls ``on_epoch_begin`` and ``on_epoch_end`` on the one object that it trains on. Here any process computes a
batch of any epoch, in any order. What such a data set is in an epoch is therefore defined as

    a copy of what the factory returned, after on_epoch_end() and on_epoch_begin() were called, in this order, before
    this epoch and before each earlier one, with the generators seeded from (seed, epoch) every time.

That is what Keras 3 does in a run that begins at epoch 0, but for the random numbers, which come from the loader's
seed: it calls on_epoch_end before the first epoch too (`EpochIterator.reset`), so data that are sorted by class are
shuffled there. Keras 2 does not, so neither are its data sets. A data set without these methods is never copied.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.seeds import sample_key, seed_generators
from hetero.batches.structure import type_name
from hetero.errors import ConfigError

__all__ = [
    "EpochCopies",
    "is_keras_dataset",
    "keras_problem",
    "num_batches",
    "overridden_hooks",
    "seed_tensorflow",
    "to_arrays",
]

_PACKAGES = ("keras", "tf_keras")
_CLASSES = ("PyDataset", "Sequence")
_HOOKS = ("on_epoch_begin", "on_epoch_end")
_EPOCH_INDEX = "hetero: an epoch of Keras"
"""Stands for the index in the key of an epoch; indices of Keras data sets are integers."""
_SHARED_BYTES = 16 * 2**20
"""Copies of a data set share arrays from this size on. Permutations of two million samples are smaller."""
_NUM_COPIES = 2
"""Epochs that are at hand: where one ends, several ranks ask for batches of both in turn."""
_MAX_DEPTH = 3
_MAX_ITEMS = 1000


def is_keras_dataset(dataset: object) -> bool:
    """Return whether the items of a data set are batches because Keras says so; imports nothing."""
    return _keras_class(dataset) is not None


def overridden_hooks(dataset: object) -> tuple[str, ...]:
    """Return which of ``on_epoch_begin`` and ``on_epoch_end`` a Keras data set has of its own."""
    base, kind = _keras_class(dataset), type(dataset)
    if base is None:
        return ()
    return tuple(name for name in _HOOKS if getattr(kind, name, None) is not getattr(base, name, None))


def num_batches(dataset: Any) -> int | None:
    """Return the length of a Keras data set; None if it is endless, or has none."""
    if hasattr(type(dataset), "num_batches"):  # Keras 3, where __len__ is optional
        count = dataset.num_batches
        return None if count is None else int(count)
    return len(dataset) if hasattr(type(dataset), "__len__") else None


def keras_problem(dataset: object) -> str:
    """Return why a Keras data set cannot be asked for its batches by index; empty if it can, or is none of Keras'."""
    base = _keras_class(dataset)
    if base is None:
        return ""
    name = type_name(type(dataset))
    if any(each.__name__ == "Iterator" and ".preprocessing" in each.__module__ for each in type(dataset).__mro__):
        return (
            f"a {name}, which draws its order and counts its batches in the process that runs it, so batches of "
            "several processes repeat and miss samples; write a keras.utils.PyDataset that reads the files of a batch, "
            "and use ImageDataGenerator.random_transform in its __getitem__"
        )
    try:
        count = num_batches(dataset)
    except NotImplementedError:
        count = None
    if count is None:
        return f"an endless {base.__name__} ({name}): give it __len__(), the number of its batches"
    return ""


def seed_tensorflow(key: int) -> None:
    """Seed TensorFlow's global generator, if TensorFlow is imported."""
    tensorflow = imported("tensorflow")
    if tensorflow is not None:
        tensorflow.random.set_seed(key >> 1)  # signed 64-bit


def to_arrays(value: Any) -> Any:
    """Return a batch with NumPy arrays for the tensors of TensorFlow and JAX, which no wire takes."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, to_arrays(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return tuple.__new__(type(value), map(to_arrays, value))
    if type(value) in (list, tuple):
        return type(value)(map(to_arrays, value))
    is_foreign = type(value).__module__.partition(".")[0] in ("tensorflow", "jax", "jaxlib")
    return np.asarray(value) if is_foreign and hasattr(value, "__array__") else value


class EpochCopies:
    """What a Keras data set with ``on_epoch_begin`` or ``on_epoch_end`` is in each epoch; see the module's text.

    The calls are repeated from epoch 0 where an earlier epoch than the last one is asked for, or another seed.

    Copies share NumPy arrays of 16 MiB and more with the original. These are write-protected while the methods run; a
    data set that writes to one gets full copies.

    Args:
        original: What the factory returned. It is neither changed nor fetched from.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        base = _keras_class(original)
        self._is_of_keras_3 = base is not None and hasattr(base, "on_epoch_begin")
        self._shares_arrays = True
        self._latest: tuple[int, int, Any] | None = None
        """Seed, epoch and the copy from which the next epoch is made; batches may change a data set, so no batch comes
        from it."""
        self._copies: dict[tuple[int, int], Any] = {}
        """By seed and epoch, the oldest first."""

    def at(self, seed: int, epoch: int) -> Any:
        """Return the data set as it is in an epoch. May seed the global generators.

        Args:
            seed: The loader's.
            epoch: At least 0.

        Raises:
            ConfigError: If it cannot be copied, or its length changes.
            Exception: Whatever its methods raise.
        """
        found = self._copies.get((seed, epoch))
        if found is None:
            found = self._copy(self._advanced(seed, epoch))
            while len(self._copies) >= _NUM_COPIES:
                del self._copies[next(iter(self._copies))]
            self._copies[seed, epoch] = found
        return found

    def _advanced(self, seed: int, epoch: int) -> Any:
        try:
            return self._advance(seed, epoch)
        except ValueError as error:
            if not self._shares_arrays or "read-only" not in str(error):
                raise
        self._shares_arrays = False
        return self._advance(seed, epoch)

    def _advance(self, seed: int, epoch: int) -> Any:
        """Return the copy of which the others of an epoch are made."""
        latest, self._latest = self._latest, None  # half done if a method raises
        if latest is not None and latest[0] == seed and latest[1] <= epoch:
            _, done, dataset = latest
        else:
            done, dataset = -1, self._copy(self._original)
        for number in range(done + 1, epoch + 1):
            self._begin_epoch(dataset, seed, number)
        self._latest = (seed, epoch, dataset)
        return dataset

    def _begin_epoch(self, dataset: Any, seed: int, epoch: int) -> None:
        key = sample_key(seed, epoch, _EPOCH_INDEX, 0)
        seed_generators(key)
        seed_tensorflow(key)
        with _write_protected(_large_arrays(dataset) if self._shares_arrays else []):
            if epoch or self._is_of_keras_3:
                dataset.on_epoch_end()
            if self._is_of_keras_3:
                dataset.on_epoch_begin()
        before, after = num_batches(self._original), num_batches(dataset)
        if before != after:
            raise ConfigError(
                f"it has {after} batches in epoch {epoch} and {before} when it is made\n"
                "  All epochs must have as many: the order of an epoch is decided before it begins."
            )

    def _copy(self, dataset: Any) -> Any:
        shared = _large_arrays(dataset) if self._shares_arrays else []
        try:
            return copy.deepcopy(dataset, {id(array): array for array in shared})
        except Exception as error:
            hooks = " and ".join(overridden_hooks(dataset))
            raise ConfigError(
                f"it has {hooks}, so each epoch is computed on a copy of it, and it cannot be copied: {error}\n"
                "  Open files and make locks in __getitem__, not in __init__; or remove the method and pass "
                "shuffle=True to the loader, which permutes the batches."
            ) from error


def _keras_class(dataset: object) -> type | None:
    """Return the class of Keras' that a data set derives from."""
    for base in type(dataset).__mro__:
        if base.__name__ in _CLASSES and base.__module__.partition(".")[0] in _PACKAGES:
            return base
    return None


def _large_arrays(dataset: Any) -> list[np.ndarray[Any, Any]]:
    """Return the large arrays that a data set holds, also in its containers and objects, as far as they are found."""
    return list({id(array): array for array in _find_arrays(dataset, 0)}.values())


def _find_arrays(value: Any, depth: int) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        if value.nbytes >= _SHARED_BYTES and not value.dtype.hasobject:
            yield value
        return
    if depth >= _MAX_DEPTH or isinstance(value, type | ModuleType | FunctionType | MethodType):
        return
    items: Any = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif hasattr(value, "__dict__"):
        items = vars(value).values()
    if len(items) <= _MAX_ITEMS:
        for item in items:
            yield from _find_arrays(item, depth + 1)


@contextmanager
def _write_protected(arrays: list[np.ndarray[Any, Any]]) -> Iterator[None]:
    """Make writing to arrays raise a ValueError inside."""
    writeable = [array for array in arrays if array.flags.writeable]
    for array in writeable:
        array.setflags(write=False)
    try:
        yield
    finally:
        for array in sorted(writeable, key=lambda array: array.base is not None):  # a view only after its base
            array.setflags(write=True)

"""Keras' `PyDataset` and `Sequence`. The items of these data sets are batches and may change between epochs.

Keras calls ``on_epoch_begin`` and ``on_epoch_end`` on the one object that it trains on. In hetero, any process computes
a batch of any epoch, in any order. For each epoch, hetero therefore uses a copy of the data set that the factory
returned. The state of this copy is defined as follows: for every epoch from 0 up to its own, the generators were seeded
from (seed, epoch), and then ``on_epoch_end`` and ``on_epoch_begin`` were called on the copy, in this order.

In a run that begins at epoch 0, Keras 3 makes the same calls in the same order, but does not seed the generators from
the loader's seed. Keras 3 also calls ``on_epoch_end`` before the first epoch (`EpochIterator.reset`), which shuffles
data that are sorted by class. Keras 2 does not call ``on_epoch_end`` before the first epoch, so hetero omits this first
call for data sets of Keras 2. A data set without these methods is never copied.
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
from hetero.batches.structure.conversion import type_name
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
"""Index from which an epoch's random key is derived. Items have other keys, because their indices are integers."""
_SHARED_BYTES = 16 * 2**20
"""Copies of a data set share arrays of at least this size. A permutation of two million samples is just below it."""
_NUM_COPIES = 2
"""Number of epochs whose copies are kept. While an epoch ends, ranks request batches of this epoch and of the next."""


def is_keras_dataset(dataset: object) -> bool:
    """Return whether a data set derives from one of Keras' classes, whose items are batches. Imports nothing."""
    return _keras_class(dataset) is not None


def overridden_hooks(dataset: object) -> tuple[str, ...]:
    """Return which of ``on_epoch_begin`` and ``on_epoch_end`` a Keras data set overrides."""
    base, kind = _keras_class(dataset), type(dataset)
    if base is None:
        return ()
    return tuple(name for name in _HOOKS if getattr(kind, name, None) is not getattr(base, name, None))


def num_batches(dataset: Any) -> int | None:
    """Return the length of a Keras data set, or None if it is endless or has no length."""
    # Only Keras 3 has this attribute. There, ``__len__`` is optional.
    if hasattr(type(dataset), "num_batches"):
        count = dataset.num_batches
        return None if count is None else int(count)
    return len(dataset) if hasattr(type(dataset), "__len__") else None


def keras_problem(dataset: object) -> str:
    """Return why batches of a Keras data set cannot be fetched by index, or an empty string if nothing prevents it."""
    base = _keras_class(dataset)
    if base is None:
        return ""
    name = type_name(type(dataset))
    # ImageDataGenerator makes data sets that derive from the class `Iterator` of keras.preprocessing.
    if any(each.__name__ == "Iterator" and ".preprocessing" in each.__module__ for each in type(dataset).__mro__):
        return (
            f"a {name}, which draws its order in the process that runs it. In several processes, some samples would "
            "repeat and others would be missing. Write a keras.utils.PyDataset that reads the files of a batch, and "
            "use ImageDataGenerator.random_transform in its __getitem__"
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
        # TensorFlow takes a signed 64-bit seed.
        tensorflow.random.set_seed(key >> 1)


def to_arrays(value: Any) -> Any:
    """Convert the TensorFlow and JAX tensors of a batch to NumPy arrays, because they cannot be sent."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, to_arrays(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        # The class of a namedtuple takes the items as separate arguments.
        return tuple.__new__(type(value), map(to_arrays, value))
    if type(value) in (list, tuple):
        return type(value)(map(to_arrays, value))
    is_foreign = type(value).__module__.partition(".")[0] in ("tensorflow", "jax", "jaxlib")
    return np.asarray(value) if is_foreign and hasattr(value, "__array__") else value


class EpochCopies:
    """Copies of a Keras data set with ``on_epoch_begin`` or ``on_epoch_end``, one for each epoch.

    The module's docstring defines the state of a copy. If the seed changes, or if an epoch before the latest one is
    requested, a new copy is made, and the methods are called on this copy for all epochs from 0.

    Copies share NumPy arrays of 16 MiB and more with the original. These arrays are write-protected while the methods
    run. If a method writes to one of them, the data set is copied in full from then on.

    Args:
        original: Data set that the factory returned. It is never changed, and no batch is fetched from it.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        base = _keras_class(original)
        self._is_of_keras_3 = base is not None and hasattr(base, "on_epoch_begin")
        self._shares_arrays = True
        """Whether copies share the large arrays of the original. False once a method has written to one of them."""
        self._latest: tuple[int, int, Any] | None = None
        """Seed, latest epoch, and a copy whose methods were called for all epochs up to the latest.

        No batch is fetched from this copy, because fetching may change a data set. For the next epoch, the methods are
        called on this copy again.
        """
        self._copies: dict[tuple[int, int], Any] = {}
        """Copies to fetch batches from, by seed and epoch, the oldest first. Each is a copy of the one in `_latest`."""

    def at(self, seed: int, epoch: int) -> Any:
        """Return the copy of the data set for an epoch. May seed the global generators.

        Args:
            seed: The loader's seed.
            epoch: At least 0.

        Raises:
            ConfigError: If the data set cannot be copied, or its length changes.
            Exception: Any exception that a method of the data set raises.
        """
        found = self._copies.get((seed, epoch))
        if found is None:
            # Fetch from a copy, because fetching may change a data set, and the next epoch begins on `_latest`.
            found = self._copy(self._advanced(seed, epoch))
            # Drop the oldest copies, to make room for this one.
            while len(self._copies) >= _NUM_COPIES:
                del self._copies[next(iter(self._copies))]
            self._copies[seed, epoch] = found
        return found

    def _advanced(self, seed: int, epoch: int) -> Any:
        """Call `_advance`. If a method writes to a shared array, call it again with copies that share no arrays."""
        try:
            return self._advance(seed, epoch)
        except ValueError as error:
            if not self._shares_arrays or "read-only" not in str(error):
                raise
        self._shares_arrays = False
        return self._advance(seed, epoch)

    def _advance(self, seed: int, epoch: int) -> Any:
        """Return the data set after calling its methods for all epochs up to this one. Do not fetch from it."""
        # If a method raises, the copy is half changed and must not be kept.
        latest, self._latest = self._latest, None
        # Go on from the latest copy if it has not passed the epoch. Otherwise take a new copy. Its latest epoch is -1,
        # because no epoch has begun on it.
        if latest is not None and latest[0] == seed and latest[1] <= epoch:
            _, latest_epoch, dataset = latest
        else:
            latest_epoch, dataset = -1, self._copy(self._original)
        # Begin all epochs in turn, because a data set may count its epochs in these methods.
        for number in range(latest_epoch + 1, epoch + 1):
            self._begin_epoch(dataset, seed, number)
        self._latest = (seed, epoch, dataset)
        return dataset

    def _begin_epoch(self, dataset: Any, seed: int, epoch: int) -> None:
        """Seed the generators and call the methods of the data set for one epoch. Check that its length is the same.

        During the calls, large arrays that all copies share are write-protected. A method that writes to one of them
        would change the copies of other epochs too.
        """
        key = sample_key(seed, epoch, _EPOCH_INDEX, occurrence=0)
        seed_generators(key)
        seed_tensorflow(key)
        with _write_protected(_large_arrays(dataset) if self._shares_arrays else []):
            # Keras 3 calls on_epoch_end also before epoch 0. Without this call, training on digits that are sorted by
            # class gave an accuracy of 30 % after one epoch, and Keras alone gave 94 %.
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
        """Return a deep copy of a data set, which shares its large arrays unless a method has written to one."""
        shared = _large_arrays(dataset) if self._shares_arrays else []
        try:
            # deepcopy takes the objects in the memo as their own copies.
            return copy.deepcopy(dataset, memo={id(array): array for array in shared})
        except Exception as error:
            hooks = " and ".join(overridden_hooks(dataset))
            raise ConfigError(
                f"it has {hooks}, so each epoch is computed on a copy of it, and it cannot be copied: {error}\n"
                "  Open files and make locks in __getitem__, not in __init__; or remove the method and pass "
                "shuffle=True to the loader, which permutes the batches."
            ) from error


def _keras_class(dataset: object) -> type | None:
    """Return the class of Keras that a data set derives from, or None."""
    for base in type(dataset).__mro__:
        if base.__name__ in _CLASSES and base.__module__.partition(".")[0] in _PACKAGES:
            return base
    return None


def _large_arrays(dataset: Any) -> list[np.ndarray[Any, Any]]:
    """Return the large arrays that a data set holds, at any depth. The search takes less time than a copy."""
    found, seen, waiting = [], set[int](), [dataset]
    while waiting:
        value = waiting.pop()
        # Classes, modules and functions lead to the whole program, and a copy shares them anyway.
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType | MethodType | str | int | float):
            continue
        seen.add(id(value))
        if isinstance(value, np.ndarray):
            # Write protection of an array does not protect the objects in it, so arrays of objects are not shared.
            if value.nbytes >= _SHARED_BYTES and not value.dtype.hasobject:
                found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        else:
            waiting += getattr(value, "__dict__", {}).values()
    return found


@contextmanager
def _write_protected(arrays: list[np.ndarray[Any, Any]]) -> Iterator[None]:
    """Make writes to the arrays raise a ValueError inside this context."""
    writeable = [array for array in arrays if array.flags.writeable]
    for array in writeable:
        array.setflags(write=False)
    try:
        yield
    finally:
        # Make bases writeable before their views, as NumPy requires.
        for array in sorted(writeable, key=lambda array: array.base is not None):
            array.setflags(write=True)

"""Calls the ``load`` of a data set, or takes its result from the samples that this host keeps."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from hetero.batches.build import BuiltDataset
from hetero.batches.purity.comparison import Difference, compare, freeze
from hetero.batches.seeds import BUILD_KEY, generator_states, preserved_generators
from hetero.cache.entries import EncodedSample
from hetero.cache.fingerprint import Fingerprint
from hetero.cache.store import ABSENT
from hetero.cache.tiers import Tiers, open_tiers
from hetero.errors import ConfigError
from hetero.spec import Cache, DatasetFactory, DatasetSpec

__all__ = ["COUNTS", "keep_loads"]

logger = logging.getLogger(__name__)


COUNTS = Counter(num_kept=0, num_loaded=0, num_damaged=0)
"""Numbers of samples of data sets with a cache in this process.

``num_kept`` samples were taken from a cache. ``num_loaded`` samples were loaded by the user's code. ``num_damaged``
samples were damaged in a cache, and loaded again.
"""


class _Loaded(NamedTuple):
    """The result of the user's ``load``."""

    value: Any
    may_be_kept: bool
    """Whether the result is known not to depend on random numbers."""


def keep_loads(built: BuiltDataset, factory: DatasetFactory, spec: DatasetSpec) -> None:
    """Let a data set take results of its ``load`` from a cache.

    Args:
        built: The data set, with a `hetero.batches.split.SplitDataset`.
        factory: The factory of the data set, with a cache.
        spec: The spec of the data set.
    """
    assert built.split is not None
    assert factory.cache is not None
    built.split.cache = _KeptLoads(built, factory, spec, factory.cache)


class _KeptLoads:
    """The `SplitDataset.cache` of a data set.

    `begin` checks the data set and opens the files. For this it loads samples and seeds the generators. So it runs
    before the samples of a batch are seeded.
    """

    def __init__(self, built: BuiltDataset, factory: DatasetFactory, spec: DatasetSpec, settings: Cache) -> None:
        # A data set with a cache always has a `SplitDataset`.
        assert built.split is not None
        self._built = built
        self._split = built.split
        self._name = spec.name
        self._settings = settings
        self._fingerprint = Fingerprint(built, factory, spec)
        self._key = b""
        """The fingerprint, empty before the first call of `begin`."""
        self._tiers: Tiers | None = None
        """The open files, None before the first call of `begin` in this process."""
        self._is_checked = False
        """Whether `_check` has compared a sample."""
        self._problem = ""
        """Why no sample may be kept. Empty if the check has passed."""
        self._warned: set[str] = set()
        """Subjects of the warnings that were logged."""

    def begin(self, index: Any) -> None:
        """Check the data set, and open the files, unless this is done.

        Args:
            index: Index of the sample to check. If this sample raises, another sample is checked later.

        Raises:
            ConfigError: If ``load`` depends on a seed, or ``__getitem__`` gives another sample than
                ``augment(load(index))``.
        """
        if self._tiers is None:
            with preserved_generators():
                self._key = self._fingerprint.key()
                self._tiers = open_tiers(self._settings, self._name, self._key, len(self._split.inner))
        if not self._is_checked:
            with preserved_generators():
                self._check(index)
        if self._problem:
            raise ConfigError(self._problem)

    def __call__(self, index: Any) -> Any:
        """Return ``load(index)`` in new memory. The result is the same whether it was kept or not.

        Raises:
            ConfigError: If ``load`` draws random numbers.
            Exception: If the user's code raises.
        """
        tiers, position = self._tiers, _position(index)
        if tiers is None or position is None or not 0 <= position < tiers.num_samples:
            self._warn(
                "index", f"the sample of index {index!r:.60} is not kept, because that is no position in the data set"
            )
            COUNTS["num_loaded"] += 1
            return self._load(index).value
        num_damaged_before = tiers.num_damaged
        kept = tiers.get(position)
        if num_damaged := tiers.num_damaged - num_damaged_before:
            COUNTS["num_damaged"] += num_damaged
            self._warn("damage", "a kept sample was damaged, and is loaded again")
        if kept is not ABSENT:
            COUNTS["num_kept"] += 1
            return kept
        loaded = self._load(index)
        COUNTS["num_loaded"] += 1
        if not loaded.may_be_kept:
            return loaded.value
        try:
            sample = EncodedSample(loaded.value, position, self._key)
        except ConfigError as error:
            self._warn("sample", f"what load({index!r:.60}) returned cannot be kept: {error}".partition("\n")[0])
            return loaded.value
        tiers.put(position, sample)
        # Do not return `loaded.value`. A sample must have the same types and layout, whether it was kept or loaded.
        return sample.value()

    def _load(self, index: Any) -> _Loaded:
        """Call the user's ``load(index)``.

        Raises:
            ConfigError: If ``load`` draws random numbers.
            Exception: If the user's code raises.
        """
        before = generator_states()
        value = self._split.inner.load(index)
        after = generator_states()
        # The last state belongs to torch's generator, and is empty before torch is imported. If the call has imported
        # torch, it is not known whether it has drawn from torch's generator.
        if len(before[-1]) != len(after[-1]):
            return _Loaded(value, may_be_kept=False)
        if before != after:
            raise ConfigError(
                f"load({index!r:.60}) of data set {self._name!r} draws random numbers or seeds a generator, so its "
                "result must not be kept; draw in augment(sample)"
            )
        return _Loaded(value, may_be_kept=True)

    def _check(self, index: Any) -> None:
        """Load one sample twice with different seeds, and set `_problem` if the two results differ.

        Also set `_problem` if the data set has a ``__getitem__``, and its sample differs from ``augment(load(index))``.
        """
        split = self._split
        try:
            self._built.seed(BUILD_KEY)
            # Copy the first result, because the second call may reuse its memory.
            first = freeze(split.inner.load(split.inner_index(index)))
            # Load it again with another seed. If ``load`` draws random numbers, the result differs.
            self._built.seed(BUILD_KEY + 1)
            between_loads = compare(first, split.inner.load(split.inner_index(index)))
            from_whole = None if between_loads is not None else self._compare_whole(index)
        except Exception:  # noqa: BLE001 - whatever the sample raises, it raises again when it is computed
            return
        self._is_checked = True
        if between_loads is not None:
            self._problem = (
                f"load({index!r:.60}) of data set {self._name!r} returns something else when it is called again, so it "
                f"must not be kept ({between_loads.within('result')}); draw in augment(sample)"
            )
        if from_whole is not None:
            what = from_whole.within("sample")
            self._problem = (
                f"data set {self._name!r}: augment(load({index!r:.60})) is not what __getitem__ returns ({what}); "
                "write __getitem__ as: return self.augment(self.load(index)), or leave it out"
            )

    def _compare_whole(self, index: Any) -> Difference | None:
        """Return how a sample differs from the result of ``__getitem__``. None if they are equal.

        The result is also None for a data set without a ``__getitem__``.
        """
        split = self._split
        get_item: Callable[[Any, Any], Any] | None = getattr(type(split.inner), "__getitem__", None)
        # The ``__getitem__`` of torch's own Dataset only raises, so it counts as missing.
        if get_item is None or str(getattr(get_item, "__module__", "")).startswith("torch."):
            return None
        self._built.seed(BUILD_KEY)
        made = freeze(split.inner.augment(split.inner.load(split.inner_index(index))))
        self._built.seed(BUILD_KEY)
        return compare(made, get_item(split.inner, split.inner_index(index)))

    def _warn(self, subject: str, text: str) -> None:
        """Log a warning. Each subject is logged once."""
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning("data set %r: %s", self._name, text)

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens the files itself.
        return {**self.__dict__, "_tiers": None}


def _position(index: Any) -> int | None:
    """Return an integer of any type as an int. None for other indices."""
    # A bool is an int in Python, but not a position.
    if isinstance(index, bool):
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None

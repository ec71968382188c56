"""`Sources`: several data sets as one, with a name for each. `IterableSources`: the same with iterables."""

from __future__ import annotations

import bisect
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hetero.errors import ConfigError
from hetero.plans.permutations import keys_of
from hetero.plans.plan import Source
from hetero.plans.windows import LaneRows

__all__ = ["IterableSources", "Shuffled", "Sources"]

_DRAWN_ROWS = 256
"""Rows of a lane that are drawn at once. Drawing takes 0.5 us a row then, 100 us one at a time, and 0.35 us with 1,024
at once, which a lane that moves would draw in vain."""


class _Named:
    """What `Sources` and `IterableSources` have in common."""

    _names: tuple[str, ...]
    _datasets: tuple[Any, ...]

    @property
    def hetero_fingerprint(self) -> str:
        """The digests of the data sets that have one, see `hetero.shards.rows.Rows`."""
        found = [getattr(dataset, "hetero_fingerprint", "") for dataset in self._datasets]
        return " ".join(f"{name}:{text}" for name, text in zip(self._names, found, strict=True))

    def hetero_problems(self) -> list[str]:
        """Return the problems of the data sets, see `hetero.shards.rows.Rows`."""
        return [text for each in self._datasets for text in getattr(each, "hetero_problems", list)()]


class Sources(_Named):
    """A map-style data set of several data sets, one after the other. Return it from a registered function.

    A loader with a `hetero.Mixture` draws from the data sets in the shares that it states. If one of them is iterable,
    the object is iterable too: an `IterableSources`.

    Args:
        datasets: Data sets by their names.

    Raises:
        ConfigError: If there is no data set, or one can neither be indexed nor iterated.
    """

    def __new__(cls, **datasets: Any) -> Any:
        """Return the sources of iterables if there is one. A copy is made without arguments."""
        for name, dataset in datasets.items():
            # An iterator could be read only once, and not in lanes.
            is_iterable = hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__next__")
            if not (_has_index(dataset) or is_iterable or hasattr(dataset, "hetero_split")):
                raise ConfigError(
                    f"source {name} is a {type(dataset).__name__}, expected a data set with __len__ and __getitem__, "
                    "or an iterable"
                )
        return super().__new__(cls) if all(map(_has_index, datasets.values())) else IterableSources(datasets)

    def __init__(self, **datasets: Any) -> None:
        if not datasets:
            raise ConfigError("hetero.Sources has no data sets. Pass each with a name: Sources(web=..., code=...)")
        self._names = tuple(datasets)
        self._datasets = tuple(datasets.values())
        self._ends = list(itertools.accumulate(map(len, self._datasets)))

    def __len__(self) -> int:
        """Return the number of samples of all data sets."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            IndexError: If there is no such sample.
        """
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"sample {index} is out of range, the sources have {len(self)} samples")
        number = bisect.bisect_right(self._ends, place)
        return self._datasets[number][place - (self._ends[number - 1] if number else 0)]

    @property
    def sources(self) -> tuple[Source, ...]:
        """The data sets as sources of a plan. Those of `hetero.shards` say which of their rows lie together."""
        return tuple(
            Source(name=name, num_samples=len(dataset), layout=_layout_of(dataset))
            for name, dataset in zip(self._names, self._datasets, strict=True)
        )

    def hetero_read_cold(self, seconds: float) -> tuple[float, float]:
        """Return the means over the samples of all data sets, see `hetero.shards.rows.Rows`."""
        wait_s = num_bytes = 0.0
        for dataset in self._datasets:
            if read_cold := getattr(dataset, "hetero_read_cold", None):
                found = read_cold(seconds / len(self._datasets))
                wait_s += len(dataset) * found[0] / max(1, len(self))
                num_bytes += len(dataset) * found[1] / max(1, len(self))
        return wait_s, num_bytes


def _layout_of(dataset: Any) -> Any:
    """Return which samples of a data set lie together. None if it does not know."""
    sources: Any = getattr(dataset, "sources", ())
    return sources[0].layout if len(sources) == 1 and isinstance(sources[0], Source) else None


class IterableSources(_Named):
    """Several iterables. Only a loader with a `hetero.Mixture` can read them.

    Args:
        datasets: Iterables by their names. Those with an index give their samples shuffled.
    """

    def __init__(self, datasets: dict[str, Any]) -> None:
        self.datasets = tuple(
            Shuffled(name, dataset) if _has_index(dataset) else dataset for name, dataset in datasets.items()
        )
        self._names, self._datasets = tuple(datasets), tuple(datasets.values())

    @property
    def sources(self) -> tuple[Source, ...]:
        """The names of the iterables. Their numbers of samples are not known."""
        return tuple(Source(name=name, num_samples=0) for name in self._names)

    def hetero_split(self, lane: int, num_lanes: int) -> Any:
        """Raise an error, because a lane is a part of one of the sources."""
        raise ConfigError("hetero.Sources of iterables need a loader with shuffle=hetero.Mixture(...)")


class Shuffled:
    """A data set with an index as a source of lanes. Its rows are shuffled, within windows if it knows its files.

    Args:
        name: Name of the source.
        dataset: The data set.
        lane: The lane whose samples it yields.
        num_lanes: Number of lanes.
    """

    def __init__(self, name: str, dataset: Any, lane: int = 0, num_lanes: int = 1) -> None:
        self._name = name
        self._dataset = dataset
        self._lane, self._num_lanes = lane, num_lanes
        self.seed = 0
        """Seed of the loader. All lanes have the same one, because together they make one order."""
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next order be that of an epoch."""
        self._epoch = epoch

    def hetero_split(self, lane: int, num_lanes: int) -> Shuffled:
        """Return the part of a lane."""
        return Shuffled(self._name, self._dataset, lane, num_lanes)

    def hetero_iterate(self, position: int) -> Iterator[Any]:
        """Yield the samples from a position of the lane on."""
        layout, num_samples, num_lanes = _layout_of(self._dataset), len(self._dataset), self._num_lanes
        keys = keys_of(f"lanes/{self._name}", self.seed, self._epoch)
        if layout is None:
            rows, lane, places = LaneRows(num_samples, keys), 0, range(self._lane, num_samples, num_lanes)
        else:
            # The windows of all lanes together stay as large.
            window_rows = max(1, layout.window_rows * layout.num_lanes // num_lanes)
            rows, lane = LaneRows(replace(layout, num_lanes=num_lanes, window_rows=window_rows), keys), self._lane
            places = range(rows.size(lane))
        for begin in range(position, len(places), _DRAWN_ROWS):
            drawn, _ = rows.draw(lane, np.asarray(places[begin : begin + _DRAWN_ROWS], np.int64))
            for row in drawn.tolist():
                yield self._dataset[row]


def _has_index(dataset: Any) -> bool:
    kind, torch_data = type(dataset), sys.modules.get("torch.utils.data")
    # torch's IterableDataset has a ``__getitem__``, which only raises.
    if torch_data is not None and issubclass(kind, torch_data.IterableDataset):
        return False
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__")

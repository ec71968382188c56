"""`Sources`: several data sets as one, with a name for each."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

from hetero.errors import ConfigError
from hetero.plans.plan import Source

__all__ = ["Sources"]


class Sources:
    """A map-style data set of several data sets, one after the other. Return it from a registered function.

    A loader with a `hetero.Mixture` draws from the data sets in the shares that it states.

    Args:
        datasets: Map-style data sets by their names.

    Raises:
        ConfigError: If there is no data set, or one lacks a length.
    """

    def __init__(self, **datasets: Any) -> None:
        if not datasets:
            raise ConfigError("hetero.Sources has no data sets. Pass each with a name: Sources(web=..., code=...)")
        for name, dataset in datasets.items():
            if not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")):
                raise ConfigError(
                    f"source {name} is a {type(dataset).__name__}, expected a data set with __len__ and __getitem__"
                )
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

    @property
    def hetero_fingerprint(self) -> str:
        """The digests of the data sets that have one, see `hetero.shards.rows.Rows`."""
        found = [getattr(dataset, "hetero_fingerprint", "") for dataset in self._datasets]
        return " ".join(f"{name}:{text}" for name, text in zip(self._names, found, strict=True))

    def hetero_problems(self) -> list[str]:
        """Return the problems of the data sets, see `hetero.shards.rows.Rows`."""
        return [text for each in self._datasets for text in getattr(each, "hetero_problems", list)()]

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

"""What a plan of a loader offers, and what it needs to know of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hetero.errors import ConfigError
from hetero.plans.windows import WindowLayout

__all__ = ["Order", "Plan", "Source", "check_sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A part of a data set. Its samples follow each other, and come after those of the source before it."""

    name: str
    """Name in a `hetero.Mixture`. Empty for a data set that is one source."""
    num_samples: int
    layout: WindowLayout | None = None
    """Which samples lie together, from sample 0 of the source on. None if the data set does not know."""


def check_sources(sources: Sequence[Source], num_samples: int, dataset: str) -> None:
    """Check that the sources of a data set, if it has any, have as many samples as it.

    Args:
        sources: The sources.
        num_samples: Samples of the data set.
        dataset: Name of the data set.

    Raises:
        ConfigError: If they have more or fewer, because the data set passes on the sources of another one.
    """
    num_stated = sum(source.num_samples for source in sources)
    if sources and num_stated != num_samples:
        raise ConfigError(
            f"data set {dataset} has {num_samples} samples, and its sources have {num_stated}\n"
            "  Return the data set of hetero itself from the registered function, with .map() around it."
        )


class Order(Protocol):
    """The order of one pass."""

    def draw(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32] | None]:
        """Return the sample at each position of the pass, and how often the sample came before in the pass.

        None instead of the second array if no sample came before.
        """
        ...

    def lane(self, position: int, num_samples: int) -> int | None:
        """Return the lane of a batch: batches of other lanes lie in other files. None without lanes.

        Args:
            position: Position of its first sample.
            num_samples: Its size.
        """
        ...


class Plan(Protocol):
    """The order of all passes over a data set."""

    @property
    def num_samples(self) -> int:
        """Samples of a pass."""
        ...

    def digest(self) -> str:
        """Return a digest of the plan for states. Seed, epoch and global batch are not in it."""
        ...

    def order(self, *, seed: int, epoch: int, global_batch: int) -> Order:
        """Return the order of a pass.

        Args:
            seed: Signed 64-bit seed.
            epoch: Number of the pass, see `hetero.epochs`.
            global_batch: Samples of a step over all ranks.
        """
        ...

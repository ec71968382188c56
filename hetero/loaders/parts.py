"""The part of a data set that the loaders of a canary run use.

`hetero canary --samples` runs an unchanged script on a fraction of its samples. It sets two environment variables,
which every loader honours and logs. Only loaders in their own order can leave samples out, because the order of a
user's sampler is the script's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero.errors import ConfigError
from hetero.plans.windows import WindowLayout

__all__ = ["FRACTION_VARIABLE", "PART_SEED_VARIABLE", "SamplePart", "part_of"]

FRACTION_VARIABLE = "HETERO_SAMPLE_FRACTION"
"""Environment variable with the fraction of each data set's samples to use, in (0, 1]."""
PART_SEED_VARIABLE = "HETERO_SAMPLE_SEED"
"""Environment variable with the seed that chooses the samples, a whole number of at least 0."""
# Mixed into the seed, because other code that seeds from the same small number must draw different numbers.
_TAG = int.from_bytes(b"canary", "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """A fraction of the samples of every data set.

    Raises:
        ConfigError: If a value is out of its bounds.
    """

    fraction: float
    """Fraction in (0, 1]."""
    seed: int = 0
    """Seed that chooses the samples, at least 0."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"{FRACTION_VARIABLE} is {self.fraction}; expected a number above 0 and at most 1")
        if self.seed < 0:
            raise ConfigError(f"{PART_SEED_VARIABLE} is {self.seed}; expected a whole number of at least 0")

    def num_samples(self, dataset_samples: int) -> int:
        """Return how many samples of a data set are used: at least one, unless the data set is empty."""
        return min(dataset_samples, max(1, round(self.fraction * dataset_samples)))

    def layout(self, layout: WindowLayout) -> WindowLayout:
        """Return the layout of the units that are used, because a part of each file would read all files."""
        return layout.part(self.fraction, self._generator())

    def _generator(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((_TAG, self.seed))))

    def indices(self, dataset_samples: int, layout: WindowLayout | None = None) -> npt.NDArray[np.int64]:
        """Return the indices of the samples that are used, in ascending order. They depend on the seed alone.

        Args:
            dataset_samples: Samples of the data set.
            layout: Which of them are read together. None if this is not known.
        """
        if layout is not None:
            part = self.layout(layout)
            # The row of each place, if the rows of all units follow each other.
            return np.arange(part.num_rows) + np.repeat(
                part.unit_begins - np.cumsum(part.unit_rows) + part.unit_rows, part.unit_rows
            )
        # Without shuffle, because the indices are sorted anyway.
        chosen = self._generator().choice(
            dataset_samples, self.num_samples(dataset_samples), replace=False, shuffle=False
        )
        return np.sort(chosen).astype(np.int64, copy=False)


def part_of(environ: Mapping[str, str] = os.environ) -> SamplePart | None:
    """Return the part that the environment asks for, or None for whole data sets.

    Raises:
        ConfigError: If a variable is not a number or out of its bounds.
    """
    text = environ.get(FRACTION_VARIABLE, "")
    if not text:
        return None
    seed = environ.get(PART_SEED_VARIABLE, "0")
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    # Raise an error that names the malformed variable.
    if not math.isfinite(fraction) or not seed.isdecimal():
        name, found = (PART_SEED_VARIABLE, seed) if math.isfinite(fraction) else (FRACTION_VARIABLE, text)
        raise ConfigError(f"{name} is {found!r:.60}; expected a number")
    return SamplePart(fraction=fraction, seed=int(seed))

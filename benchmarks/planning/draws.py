"""The random numbers of a simulation, drawn in advance.

All clusters of one workload and seed get the same numbers. The difference of two clusters is therefore not noise of the
draw. A batch costs the same number of CPU seconds on whatever endpoint computes it.

Each block of `BLOCK` values is scaled to the expected mean. A run of some thousand batches then has the mean cost of a
long job, also if a few samples cost much more than the others.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planning.workload import Workload

__all__ = ["Draws", "draw"]

NUM_DRAWS = 8192
"""Batches with a cost of their own. Later batches repeat them."""
BLOCK = 512
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Draws:
    """Lists of `NUM_DRAWS` values."""

    batch_cpu_s: list[float]
    """CPU seconds of a batch, a sum over its samples."""
    batch_wait_s: list[float]
    """Storage wait of a batch."""
    step_s: list[float]
    """Step time of a rank with batches always ready."""


@functools.lru_cache(maxsize=8)
def draw(workload: Workload, seed: int) -> Draws:
    """Return the random numbers of a workload."""
    generator = np.random.default_rng(seed)
    size = workload.batch_samples
    cpu_s = np.empty(NUM_DRAWS)
    rows = max(1, _CHUNK // size)
    for first in range(0, NUM_DRAWS, rows):
        count = min(rows, NUM_DRAWS - first)
        samples = lognormal(generator, workload.sample_cpu_s, workload.sample_variation, count * size)
        if workload.tail_share:
            samples *= np.where(generator.random(count * size) < workload.tail_share, workload.tail_factor, 1.0)
        cpu_s[first : first + count] = samples.reshape(count, size).sum(axis=1)
    wait_s = generator.gamma(size, workload.sample_wait_s, NUM_DRAWS) if workload.sample_wait_s else np.zeros(NUM_DRAWS)
    fetch_s = workload.batch_cpu_total_s - size * workload.batch_cpu_s
    step_s = lognormal(generator, workload.step_s, workload.step_variation, NUM_DRAWS)
    return Draws(
        batch_cpu_s=(scaled(cpu_s, fetch_s) + size * workload.batch_cpu_s).tolist(),
        batch_wait_s=scaled(wait_s, workload.batch_wait_total_s).tolist(),
        step_s=scaled(step_s, workload.step_s).tolist(),
    )


def scaled(values: npt.NDArray[np.float64], mean: float) -> npt.NDArray[np.float64]:
    """Return the values with this mean in each block."""
    if not mean:
        return values
    blocks = values.reshape(-1, BLOCK)
    return (blocks * (mean / blocks.mean(axis=1, keepdims=True))).reshape(-1)


def lognormal(generator: np.random.Generator, mean: float, variation: float, count: int) -> npt.NDArray[np.float64]:
    """Return lognormal values with a mean and a coefficient of variation."""
    if not mean or not variation:
        return np.full(count, mean)
    variance = math.log1p(variation**2)
    return generator.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)

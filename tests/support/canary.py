"""Makes canary points for tests: a job with known parts and noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetero.decide.canary.points import CanaryPoint, LoaderWork, Part, Resources

FRACTIONS = (0.01, 0.02, 0.03)


def work(fraction: float, *, whole_steps: int = 3000, step_s: float = 0.03, passes: int = 1, **more: Any) -> LoaderWork:
    """Return the work of a loader with 32 samples per step and 5 steps of warm-up."""
    steps = round(fraction * whole_steps) * passes
    values = {
        "name": "train",
        "num_steps": steps,
        "num_samples": 32 * steps,
        "batch_samples": 32,
        "num_steps_measured": steps - 5,
        "num_samples_measured": 32 * (steps - 5),
        "measured_s": (steps - 5) * step_s,
        "num_passes": passes,
        "num_complete_passes": passes,
        "max_in_flight": 0,
    }
    return LoaderWork(**values | more)


def memory(base: float, growth: float, fraction: float) -> Resources:
    """Return resources of a host whose memory grows with the data, and of one and a half busy CPUs."""
    peak = base + growth * fraction
    return Resources(
        cpu_percent_mean=150.0,
        cpu_percents=(140.0, 150.0, 160.0) * 10,
        memory_base_bytes=base,
        memory_mean_bytes=(base + peak) / 2,
        memory_p99_bytes=peak,
        memory_peak_bytes=peak,
    )


def point(fraction: float, replicate: int, growing_s: float, *, fixed_s: float = 5.0, **more: Any) -> CanaryPoint:
    """Return the point of one run."""
    return CanaryPoint(
        run_id=f"{100 * fraction:g}pc-r{replicate}",
        fraction=fraction,
        replicate=replicate,
        wall_s=fixed_s + growing_s,
        parts=(
            Part(name="start-up and end", seconds=fixed_s, grows=False),
            Part(name="script", seconds=growing_s, grows=True),
        ),
        **more,
    )


def job(
    seconds: Callable[[float], float],
    *,
    noise: float = 0.02,
    seed: int = 0,
    fractions: Sequence[float] = FRACTIONS,
    repeats: int = 3,
    more: Callable[[float], dict[str, Any]] = lambda fraction: {},
) -> tuple[CanaryPoint, ...]:
    """Return the canary runs of a job whose growing part takes ``seconds(fraction)``."""
    random = np.random.default_rng(seed)
    return tuple(
        point(
            fraction,
            replicate,
            seconds(fraction) * (1 + noise * random.normal()),
            fixed_s=5 + 0.1 * random.normal(),
            **more(fraction),
        )
        for fraction in fractions
        for replicate in range(1, repeats + 1)
    )

"""The options of a loader of an iterable, and the checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from hetero.batches.lanes.pieces import ENDS, GUARANTEES, End, Guarantee
from hetero.batches.lanes.source import GUARANTEE_LINES
from hetero.errors import ConfigError
from hetero.plans.mixtures import Mixture

__all__ = ["LaneOptions", "check_lanes", "check_no_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneOptions:
    """Options of a loader of lanes. The framework's loader class has checked them."""

    mixture: Mixture | None = None
    """Shares of several iterables."""
    guarantee: Guarantee
    end: End
    num_lanes: int | None
    """Lanes over all ranks. None: those of a loaded state, or ``lanes_per_rank`` for each rank."""
    lanes_per_rank: int
    """Lanes of each rank without ``num_lanes``."""
    chunk_samples: int | None
    """See `LaneLayout`. None: that of a loaded state, or the batch size."""
    snapshot_every: int
    """See `LaneRules`."""
    drops_rest: bool
    """Whether batches at the end of lanes that lack samples are left out."""
    allow_version_change: bool
    """Whether a state of another version of the source's library may be loaded."""


def check_lanes(
    guarantee: str | None,
    lanes: int | None,
    end: str,
    *,
    chunk_samples: int | None,
    lanes_per_rank: int,
    snapshot_every: int | None,
    drop_last: bool,
    allow_version_change: bool,
    shuffle: object = None,
) -> LaneOptions | None:
    """Return the options of the lanes of an iterable. None without a guarantee.

    Raises:
        ConfigError: If an argument is out of its bounds, or there are lanes and no guarantee.
    """
    if guarantee is None:
        if lanes is not None or end != "stop":
            lines = GUARANTEE_LINES.rstrip()
            raise ConfigError(f"lanes= and end= are for iterables, which need a guarantee:\n{lines}")
        return None
    if guarantee not in GUARANTEES:
        raise ConfigError(f"guarantee is {guarantee!r:.80}, expected one of these:\n{GUARANTEE_LINES.rstrip()}")
    if end not in ENDS:
        raise ConfigError(f"end is {end!r:.80}, expected 'stop', 'wrap' or 'rest'")
    numbers = {"lanes": lanes, "chunk_samples": chunk_samples, "snapshot_every_n_steps": snapshot_every}
    for name, value in numbers.items():
        if value is not None and (type(value) is not int or not 1 <= value < 2**20):
            raise ConfigError(f"{name} is {value!r:.80}, expected an integer of at least 1 and below 2**20")
    mixture = shuffle if isinstance(shuffle, Mixture) else None
    if mixture is not None and (end != "wrap" or mixture.samples is not None):
        raise ConfigError(
            'a Mixture of iterables begins each of them again at its end, so it needs end="wrap" and no samples=\n'
            "  Count the steps in the training loop."
        )
    return LaneOptions(
        mixture=mixture,
        guarantee=cast(Guarantee, guarantee),
        end=cast(End, end),
        num_lanes=lanes,
        lanes_per_rank=max(1, lanes_per_rank),
        chunk_samples=chunk_samples,
        snapshot_every=snapshot_every or 1,
        drops_rest=drop_last,
        allow_version_change=bool(allow_version_change),
    )


def check_no_order(*, shuffle: object, sampler: object, batch_size: int | None, policy: str) -> None:
    """Reject arguments that need an index.

    Raises:
        ConfigError: If one of them was passed.
    """
    if shuffle and not isinstance(shuffle, Mixture):
        raise ConfigError("shuffle= needs an index\n  Shuffle in the iterable itself, with a fixed seed.")
    if sampler is not None:
        raise ConfigError("sampler= and batch_sampler= need an index; the iterable itself decides its order")
    if batch_size is None:
        raise ConfigError("an iterable needs a batch_size\n  If items are batches, pass batch_size=1 and a collate_fn.")
    if policy == "skip":
        raise ConfigError(
            'on_sample_error="skip" needs an index: a generator that has raised cannot go on\n'
            "  Catch the exception inside the iterable."
        )

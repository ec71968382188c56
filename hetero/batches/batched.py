"""Data sets with torch's ``__getitems__``, which returns several samples at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hetero.batches.imported import imported
from hetero.batches.indices import probes, sources_of
from hetero.batches.seeds import BUILD_KEY, generator_states, seed_generators
from hetero.spec import Seeding

__all__ = ["choose_seeding", "has_getitems", "innermost", "unwrap_subset"]


def unwrap_subset(dataset: Any, indices: Iterable[Any] = ()) -> tuple[Any, list[Any]]:
    """Return the data set inside a chain of torch's ``Subset``, and the indices into that data set.

    A Subset always has ``__getitems__``, even if the data set inside lacks it. With the data set inside, samples can be
    computed one by one. An error can then name the sample.
    """
    torch_data = imported("torch.utils.data")
    inner_indices = list(indices)
    # A subclass of Subset may compute samples in another way, so it is not opened.
    while torch_data is not None and type(dataset) is torch_data.Subset:
        # An index may be a list of indices, which names a whole batch.
        inner_indices = [
            [dataset.indices[part] for part in index] if isinstance(index, list) else dataset.indices[index]
            for index in inner_indices
        ]
        dataset = dataset.dataset
    return dataset, inner_indices


def innermost(dataset: Any) -> Any:
    """Return the data set inside a chain of torch's ``Subset``."""
    return unwrap_subset(dataset)[0]


def has_getitems(dataset: Any) -> bool:
    """Return whether torch's loader would ask a data set for a whole batch at once."""
    return bool(getattr(innermost(dataset), "__getitems__", None))


def choose_seeding(dataset: Any, stated: Seeding | None) -> tuple[Seeding, str]:
    """Return how often to seed the generators, and a warning for the user, which may be empty.

    If ``stated`` is None and the data set has ``__getitems__``, a few samples are computed. If they draw no random
    numbers, one seed per batch has the same effect as one seed per sample, and ``__getitems__`` can be used. If the
    data set has no ``__getitem__``, no samples are computed, because only one seed per batch is possible. This function
    may change the state of the global generators.

    Args:
        dataset: Data set that the factory returned.
        stated: The factory's ``seeding=``.
    """
    if stated is not None:
        return stated, ""
    if not has_getitems(dataset):
        return "sample", ""
    if not hasattr(type(innermost(dataset)), "__getitem__") or not _samples_draw(dataset):
        return "batch", ""
    if not getattr(innermost(dataset), "hetero_gains_by_batches", True):
        return "sample", ""
    return "sample", (
        f"{type(innermost(dataset)).__name__} has __getitems__, and its samples draw random numbers: each is seeded "
        'and fetched by itself. @hetero.dataset(seeding="batch") seeds once for a batch and uses __getitems__, which '
        "may be faster"
    )


def _samples_draw(dataset: Any) -> bool:
    """Return whether samples draw random numbers. Also true if the data set has ``on_seed`` or raises."""
    try:
        # Draws from a generator that ``on_seed`` seeds do not change the global generators, so they cannot be seen.
        if hasattr(innermost(dataset), "on_seed"):
            return True
        for probe in probes(len(dataset), sources_of(dataset)):
            # Call the method once before the comparison. The first call may import torch, which adds a generator.
            dataset.__getitems__([probe])
            seed_generators(BUILD_KEY)
            before = generator_states()
            dataset.__getitems__([probe])
            if generator_states() != before:
                return True
    except Exception:  # noqa: BLE001 - the user's code will raise again in a fetch, which reports the sample
        return True
    return False

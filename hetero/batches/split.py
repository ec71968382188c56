"""Data sets whose samples are computed in two parts: ``load(index)``, which draws nothing, and ``augment(sample)``."""

from __future__ import annotations

from typing import Any

from hetero.batches.batched import has_getitems, innermost, unwrap_subset
from hetero.batches.imported import imported
from hetero.batches.keras import is_keras_dataset
from hetero.batches.structure.conversion import type_name

__all__ = ["SplitDataset", "split_problem"]

_PARTS = ("load", "augment")


def split_problem(dataset: object) -> str:
    """Return why the samples of a data set cannot be computed in two parts. Empty if they can."""
    inner = innermost(dataset)
    kind = type(inner)
    torch_data = imported("torch.utils.data")
    if torch_data is not None and isinstance(inner, torch_data.IterableDataset):
        return f"an iterable data set ({type_name(kind)}), which @hetero.dataset(cache=...) does not support"
    if is_keras_dataset(inner) or has_getitems(inner):
        what = "a Keras data set" if is_keras_dataset(inner) else "a data set with __getitems__"
        return f"{what} ({type_name(kind)}), which @hetero.dataset(cache=...) does not support: it keeps single samples"
    missing = [name for name in _PARTS if not callable(getattr(inner, name, None))]
    if missing:
        return (
            f"a {type_name(kind)} without {' and '.join(f'{name}()' for name in missing)}, which "
            "@hetero.dataset(cache=...) needs: give it load(index), which draws no random numbers and whose result is "
            "kept, and augment(sample), which makes the sample of that"
        )
    if not hasattr(kind, "__len__"):
        return f"a {type_name(kind)} without __len__(), which @hetero.dataset(cache=...) needs"
    return ""


class SplitDataset:
    """A map-style data set that calls the two parts of the user's data set. The sample is ``augment(load(index))``.

    The user's data set may also be torch's ``Subset`` of such a data set.

    Args:
        dataset: The user's data set, see `split_problem`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        """The user's data set."""
        self.inner = innermost(dataset)
        """The data set inside a chain of torch's ``Subset``. It has ``load`` and ``augment``."""
        self.cache: Any = None
        """Returns the first part of a sample for an index of `inner`, see `hetero.cache.loads`. None without a cache.

        Its ``begin`` is called with the first index of each batch, before anything of the batch is seeded.
        """

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """Compute a sample."""
        load = self.inner.load if self.cache is None else self.cache
        return self.inner.augment(load(self.inner_index(index)))

    def inner_index(self, index: Any) -> Any:
        """Return the index of `inner` for an index of the user's data set."""
        return unwrap_subset(self.dataset, [index])[1][0]

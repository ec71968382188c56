"""The samples of a batch: one by one, or together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hetero.batches.batched import has_getitems
from hetero.batches.build import BuiltDataset
from hetero.batches.failures import dataset_error, with_note
from hetero.batches.imported import imported
from hetero.batches.request import BatchRequest, plain_indices
from hetero.batches.seeds import batch_key, sample_keys
from hetero.batches.skips import FailedSamples
from hetero.errors import DatasetError
from hetero.spec import Index

__all__ = ["Cancelled", "compute_samples"]

_MAY_SKIP = (
    'Mend the sample, or give the loader on_sample_error="skip": another sample of the batch is repeated in its place.'
)
_MAX_POLLS = 64
"""How often ``cancelled()`` is asked at most in a batch with one seed: 1,024 times took 2 % of one of table rows."""


class Cancelled(Exception):
    """`fetch` stopped between two samples because ``cancelled()`` was true."""


def compute_samples(
    built: BuiltDataset,
    request: BatchRequest,
    host: str,
    cancelled: Callable[[], bool] | None,
    failed: FailedSamples | None = None,
) -> Sequence[Any]:
    """Return the samples in order; with ``failed``, others stand in for those that raise."""
    indices = plain_indices(request.indices)
    built.enter_epoch(request.seed, request.epoch, host=host)
    compute = _compute_together if built.seeding == "batch" else _compute_each
    with built.worker_info():
        return compute(built, request, indices, host, cancelled, failed)


def _compute_each(
    built: BuiltDataset,
    request: BatchRequest,
    indices: Sequence[Index],
    host: str,
    cancelled: Callable[[], bool] | None,
    failed: FailedSamples | None,
) -> Sequence[Any]:
    """Seed for every sample. One that stands in is computed again: the same index, draws and bytes."""
    dataset, seed = built.dataset, built.seed
    key_of = sample_keys(request.seed, request.epoch)
    occurrences = [0] * len(indices) if request.occurrences is None else request.occurrences.tolist()
    samples: list[Any] = []
    for index, occurrence in zip(indices, occurrences, strict=True):
        if cancelled is not None and cancelled():
            raise Cancelled
        key = key_of(index, occurrence)
        try:
            seed(key)
            samples.append(dataset[index])
        except Exception as exc:
            note = _note_on(exc, index, built)
            if failed is None or note:
                raise _sample_error(exc, index, note, built, request, host) from exc
            failed.add(len(samples), exc)
            samples.append(None)
    if failed:
        _fill_in(samples, failed, partial(_compute_one, built, key_of, indices, occurrences), cancelled)
    return samples


def _compute_one(
    built: BuiltDataset,
    key_of: Callable[[Index, int], int],
    indices: Sequence[Index],
    occurrences: Sequence[int],
    position: int,
) -> Any:
    built.seed(key_of(indices[position], occurrences[position]))
    return built.dataset[indices[position]]


def _compute_together(
    built: BuiltDataset,
    request: BatchRequest,
    indices: Sequence[Index],
    host: str,
    cancelled: Callable[[], bool] | None,
    failed: FailedSamples | None,
) -> Sequence[Any]:
    """Seed once, and use the data set's ``__getitems__`` if it has one."""
    key = batch_key(request.seed, request.epoch, request.position, request.indices)
    if cancelled is not None and cancelled():
        raise Cancelled
    try:
        built.seed(key)
        dataset, inner_indices = _unwrap_subset(built.dataset, indices)
        is_batched = request.collate and has_getitems(dataset)
    except Exception as exc:
        raise dataset_error(exc, dataset=built.name, host=host, stage="sample") from exc
    if is_batched:
        return _compute_at_once(built, dataset, inner_indices, key, host, cancelled, failed)
    samples: list[Any] = []
    stride = max(1, -(-len(indices) // _MAX_POLLS))
    while len(samples) < len(indices):  # again only after a sample that raised
        try:
            for begin in range(len(samples), len(indices), stride):
                if begin and cancelled is not None and cancelled():
                    raise Cancelled
                for inner_index in inner_indices[begin : begin + stride]:
                    samples.append(dataset[inner_index])  # noqa: PERF401 - those before one that raises are kept
        except Cancelled:
            raise
        except Exception as exc:
            index = indices[len(samples)]
            note = _note_on(exc, index, built)
            if failed is None or note:
                raise _sample_error(exc, index, note, built, request, host) from exc
            failed.add(len(samples), exc)
            samples.append(None)
    if failed:  # what stands in goes on drawing: its draws are not those of the sample that it repeats
        _fill_in(samples, failed, partial(_compute_next, dataset, inner_indices), cancelled)
    return samples


def _compute_next(dataset: Any, indices: Sequence[Any], position: int) -> Any:
    return dataset[indices[position]]


def _compute_at_once(
    built: BuiltDataset,
    dataset: Any,
    indices: list[Any],
    key: int,
    host: str,
    cancelled: Callable[[], bool] | None,
    failed: FailedSamples | None,
) -> Sequence[Any]:
    """Return what ``__getitems__`` does. If it raises, ask for one by one, and then for those that work.

    Not ``__getitem__``: the data set may have none, and what ``__getitems__`` returns may be a whole batch.
    """
    try:
        return _get_items(dataset, indices)
    except Exception as exc:
        to_do = _MAY_SKIP if failed is None else ""
        # Whose fault it is is not known.
        error = dataset_error(exc, dataset=built.name, host=host, stage="sample", to_do=to_do)
        if failed is None:
            raise error from exc
    for position, index in enumerate(indices):
        _poll(cancelled)
        try:
            built.seed(key)
            _get_items(dataset, [index])
        except Exception as exc:  # noqa: BLE001 - kept, and raised if all do
            failed.add(position, exc)
    if not failed:
        raise with_note(error, " (each sample alone works: there is none to be skipped)")
    indices = failed.replaced(indices)
    try:
        built.seed(key)
        return _get_items(dataset, indices)
    except Exception as exc:
        raise dataset_error(exc, dataset=built.name, host=host, stage="sample") from exc


def _get_items(dataset: Any, indices: list[Any]) -> Sequence[Any]:
    together: Sequence[Any] = dataset.__getitems__(indices)
    # Some return a batch already, with a collate_fn that passes it on: only a list can be counted.
    if isinstance(together, list | tuple) and len(together) != len(indices):
        raise ValueError(f"__getitems__ returned {len(together)} samples for {len(indices)} indices")
    return together


def _fill_in(
    samples: list[Any],
    failed: FailedSamples,
    compute_again: Callable[[int], Any],
    cancelled: Callable[[], bool] | None,
) -> None:
    """Compute what stands in for the samples that raised.

    Computed, and not the same object twice: collation may write to what it is given.
    """
    for position in failed.positions:
        while True:
            _poll(cancelled)
            other = failed.stand_in(position)
            try:
                samples[position] = compute_again(other)
                break
            except Exception:  # noqa: BLE001 - another one stands in
                failed.withdraw(other)


def _poll(cancelled: Callable[[], bool] | None) -> None:
    if cancelled is not None and cancelled():
        raise Cancelled


def _unwrap_subset(dataset: Any, indices: Sequence[Index]) -> tuple[Any, list[Any]]:
    """Return what a chain of torch's ``Subset`` wraps, and the indices into that.

    ``Subset`` always has ``__getitems__``, whether or not the data set inside has; only a look
    inside tells whether samples can be computed one by one, cancelled and named in errors.
    """
    torch_data = imported("torch.utils.data")
    inner: list[Any] = list(indices)
    while torch_data is not None and type(dataset) is torch_data.Subset:
        inner = [_index_of_subset(dataset.indices, index) for index in inner]
        dataset = dataset.dataset
    return dataset, inner


def _index_of_subset(indices: Any, index: Any) -> Any:
    """Return what an index of a subset is in the data set inside; a list is several."""
    return [indices[part] for part in index] if isinstance(index, list) else indices[index]


def _note_on(error: Exception, index: Index, built: BuiltDataset) -> str:
    """Return what to add to an error about an index that is outside of the data set; empty for all others.

    Only what the data set refuses is outside: it may take keys that are integers.
    """
    if not isinstance(error, IndexError) or not isinstance(index, int):
        return ""
    try:
        num_samples = built.num_samples
    except Exception:  # noqa: BLE001 - of the user's: what the sample raised says more
        return ""
    if num_samples is None or -num_samples <= index < num_samples:
        return ""
    return f" (index {index} is out of range: the data set has {num_samples} samples)"


def _sample_error(
    error: Exception, index: Index, note: str, built: BuiltDataset, request: BatchRequest, host: str
) -> DatasetError:
    to_do = _MAY_SKIP if request.collate and not note else ""
    return dataset_error(
        error, dataset=built.name, host=host, stage="sample", sample_index=index, note=note, to_do=to_do
    )

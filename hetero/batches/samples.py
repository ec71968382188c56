"""Computation of the samples of a batch, one by one or together."""

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
"""Limit on calls of ``cancelled()`` for a batch with one seed. 1,024 calls took 2 % of the time for table rows."""


class Cancelled(Exception):
    """`fetch` stopped between two samples because ``cancelled()`` was true."""


def compute_samples(
    built: BuiltDataset,
    request: BatchRequest,
    host: str,
    cancelled: Callable[[], bool] | None,
    failed: FailedSamples | None = None,
) -> Sequence[Any]:
    """Return the samples in order. With ``failed``, other samples replace those that raise."""
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
    """Compute samples with a new seed for each. A substitute repeats another sample: same index, draws and bytes."""
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
    """Compute samples with one seed for the batch, and with the data set's ``__getitems__`` if it has one."""
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
    # There is no __getitems__. Compute the samples one by one, and poll after every ``stride`` samples.
    samples: list[Any] = []
    stride = max(1, -(-len(indices) // _MAX_POLLS))
    while len(samples) < len(indices):  # repeats only after a sample that raised
        try:
            for begin in range(len(samples), len(indices), stride):
                if begin and cancelled is not None and cancelled():
                    raise Cancelled
                for inner_index in inner_indices[begin : begin + stride]:
                    samples.append(dataset[inner_index])  # noqa: PERF401 - keep the samples before one that raises
        except Cancelled:
            raise
        except Exception as exc:
            index = indices[len(samples)]
            note = _note_on(exc, index, built)
            if failed is None or note:
                raise _sample_error(exc, index, note, built, request, host) from exc
            failed.add(len(samples), exc)
            samples.append(None)
    if failed:
        # The generators are not seeded again, so a substitute draws other numbers than the sample that it repeats.
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
    """Return the result of ``__getitems__``.

    If it raises and samples may be skipped, call it with each index alone. Then call it with the indices that work.
    ``__getitem__`` is not used, because the data set may not have it, and because ``__getitems__`` may return a whole
    batch.
    """
    try:
        return _get_items(dataset, indices)
    except Exception as exc:
        to_do = _MAY_SKIP if failed is None else ""
        # The sample that caused the error is not known.
        error = dataset_error(exc, dataset=built.name, host=host, stage="sample", to_do=to_do)
        if failed is None:
            raise error from exc
    # Find the samples that raise.
    for position, index in enumerate(indices):
        _poll(cancelled)
        try:
            built.seed(key)
            _get_items(dataset, [index])
        except Exception as exc:  # noqa: BLE001 - recorded, and raised if all samples fail
            failed.add(position, exc)
    if not failed:
        raise with_note(error, " (each sample alone works: there is none to be skipped)")
    # Compute the batch with substitutes for these samples.
    indices = failed.replaced(indices)
    try:
        built.seed(key)
        return _get_items(dataset, indices)
    except Exception as exc:
        raise dataset_error(exc, dataset=built.name, host=host, stage="sample") from exc


def _get_items(dataset: Any, indices: list[Any]) -> Sequence[Any]:
    together: Sequence[Any] = dataset.__getitems__(indices)
    # Some data sets return a finished batch, which their collate_fn passes on. Only a list or tuple can be counted.
    if isinstance(together, list | tuple) and len(together) != len(indices):
        raise ValueError(f"__getitems__ returned {len(together)} samples for {len(indices)} indices")
    return together


def _fill_in(
    samples: list[Any],
    failed: FailedSamples,
    compute_again: Callable[[int], Any],
    cancelled: Callable[[], bool] | None,
) -> None:
    """Compute a substitute for each sample that raised.

    A substitute is computed again and not the same object twice, because collation may write to its samples.
    """
    for position in failed.positions:
        while True:
            _poll(cancelled)
            other = failed.stand_in(position)
            try:
                samples[position] = compute_again(other)
                break
            except Exception:  # noqa: BLE001 - try another substitute
                failed.withdraw(other)


def _poll(cancelled: Callable[[], bool] | None) -> None:
    if cancelled is not None and cancelled():
        raise Cancelled


def _unwrap_subset(dataset: Any, indices: Sequence[Index]) -> tuple[Any, list[Any]]:
    """Return the data set inside a chain of torch's ``Subset``, and the indices into that data set.

    ``Subset`` always has ``__getitems__``, even if the data set inside does not have it. Without
    it, samples can be computed one by one, cancelled and named in errors.
    """
    torch_data = imported("torch.utils.data")
    inner: list[Any] = list(indices)
    while torch_data is not None and type(dataset) is torch_data.Subset:
        inner = [_index_of_subset(dataset.indices, index) for index in inner]
        dataset = dataset.dataset
    return dataset, inner


def _index_of_subset(indices: Any, index: Any) -> Any:
    """Return the index in the data set inside for an index of a subset. A list holds several indices."""
    return [indices[part] for part in index] if isinstance(index, list) else indices[index]


def _note_on(error: Exception, index: Index, built: BuiltDataset) -> str:
    """Return a note for an error about an index out of range, or an empty string for other errors.

    Only an index that the data set rejects is out of range, because a data set may use integers as keys.
    """
    if not isinstance(error, IndexError) or not isinstance(index, int):
        return ""
    try:
        num_samples = built.num_samples
    except Exception:  # noqa: BLE001 - the user's __len__ raised; the error of the sample is more useful
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

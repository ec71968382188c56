"""Computes the samples at the indices in a request, for map-style data sets.

Each sample has its own seed, or the whole batch has one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.batches.batched import has_getitems, unwrap_subset
from hetero.batches.build import BuiltDataset
from hetero.batches.failures import Cancelled, check_not_exit, dataset_error, with_note
from hetero.batches.indices import Indices, plain_indices
from hetero.batches.lanes.source import iterable_problem
from hetero.batches.request import BatchRequest, ChoosePositions
from hetero.batches.seeds import batch_key, sample_key
from hetero.batches.skips import FailedSamples
from hetero.errors import ConfigError, DatasetError
from hetero.spec import Index

__all__ = ["IndexedWork"]

_MAY_SKIP = (
    'Fix the sample, or give the loader on_sample_error="skip": another sample of the batch is repeated in its place. '
    "If it works alone, it may depend on the samples before it, but each sample may depend on its index only."
)
_SALTS = (0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F)


@dataclass(frozen=True, slots=True, eq=False)
class IndexedWork:
    """The samples at some indices. See `hetero.batches.request.Work` for the methods.

    Raises:
        ConfigError: If indices and occurrences differ in number.
    """

    indices: Indices
    """Indices that the sampler yielded: an int64 array, or a tuple if some are not integers. See
    `hetero.batches.indices.as_indices`."""
    occurrences: npt.NDArray[np.uint32] | None = None
    """For each index, how often it came before in the epoch's global order. None means that all counts are 0."""

    def __post_init__(self) -> None:
        if self.occurrences is not None and len(self.occurrences) != len(self.indices):
            raise ConfigError(f"{len(self.indices)} indices but {len(self.occurrences)} occurrences; expected as many")

    @property
    def may_be_hedged(self) -> bool:
        """Return True, because each endpoint computes the same batch for these indices."""
        return True

    @property
    def may_be_checked(self) -> bool:
        """Return True, because samples depend on their indices and seeds only."""
        return True

    @property
    def num_samples(self) -> int:
        """Number of indices."""
        return len(self.indices)

    @property
    def labels(self) -> Sequence[Index]:
        """The indices in Python's own types."""
        return plain_indices(self.indices)

    def key(self, seed: int, epoch: int, position: int) -> int:
        """Return the 64-bit random key of the whole batch, which does not depend on occurrences."""
        return batch_key(seed, epoch, position, self.indices)

    def compute(
        self,
        built: BuiltDataset,
        request: BatchRequest,
        *,
        host: str,
        cancelled: Callable[[], bool] | None = None,
        failed: FailedSamples | None = None,
        positions: ChoosePositions | None = None,
    ) -> Sequence[Any]:
        """Return the samples in order. With ``failed``, substitutes replace the samples that raise.

        ``positions`` needs one seed for each sample. With one seed for the batch, all samples are computed here.
        """
        if built.lanes is not None:
            raise dataset_error(
                f"ConfigError: {iterable_problem(f'data set {built.name!r}')}",
                dataset=built.name,
                host=host,
                stage="build",
            )
        built.enter_epoch(request.seed, request.epoch, host=host)
        with built.worker_info():
            # Only a data set with a cache has a `SplitDataset`. It lacks the cache while all samples are loaded anew.
            if built.split is not None and built.split.cache is not None and len(self.indices):
                # At the first batch, the cache checks the data set with one of the job's own samples.
                _prepare_cache(built.split.cache, self.labels[0], built, host)
            if built.seeding == "batch":
                return _compute_together(built, request, self, host, cancelled, failed)
            return _compute_each(built, request, self, host, cancelled, failed, positions)

    def part(self, positions: Sequence[int]) -> IndexedWork:
        """Return the work for the samples at some positions."""
        chosen = np.asarray(positions, np.intp)
        occurrences = None if self.occurrences is None else self.occurrences[chosen]
        if isinstance(self.indices, np.ndarray):
            return IndexedWork(self.indices[chosen], occurrences)
        return IndexedWork(tuple([self.indices[position] for position in positions]), occurrences)

    def digest(self) -> bytes:
        """Return a 16-byte hash of the indices in order, with their occurrences."""
        hasher = blake2b(digest_size=16, person=b"hetero.indices")
        if isinstance(self.indices, np.ndarray):
            hasher.update(b"integers %d " % len(self.indices))
            hasher.update(np.ascontiguousarray(self.indices, dtype="<i8").data)
        else:
            hasher.update(b"keys %d " % len(self.indices))
            for index in self.indices:
                text = _key_text(index)
                hasher.update(b"%d " % len(text))
                hasher.update(text)
        # Leave out counts that are all 0, because None means the same and must give the same digest.
        if self.occurrences is not None and self.occurrences.any():
            hasher.update(np.ascontiguousarray(self.occurrences, dtype="<u4").data)
        return hasher.digest()

    def samples_sum(self, *, leave_out_repeats: bool) -> bytes:
        """Return a 16-byte sum over the samples, which does not depend on their order.

        The sums of a batch's parts add up to the sum of the whole batch. The value consists of two 64-bit sums over
        hashes of index and occurrence. It detects accidental but not deliberate differences, because other samples with
        the same sum are easy to find.

        Args:
            leave_out_repeats: Whether to ignore indices that came before in the epoch.
        """
        if isinstance(self.indices, np.ndarray):
            keys = np.ascontiguousarray(self.indices, dtype=np.int64).view(np.uint64)
            halves = [_mixed(keys, salt) for salt in _SALTS]
        else:
            # Each digest of 16 bytes gives one number for each half.
            digests = b"".join(blake2b(_key_text(index), digest_size=16).digest() for index in self.indices)
            halves = list(np.frombuffer(digests, "<u8").reshape(-1, 2).T)
        occurrences = self.occurrences
        if occurrences is not None and occurrences.any():
            if leave_out_repeats:
                halves = [half[occurrences == 0] for half in halves]
            else:
                # A repeat of an index counts as another sample, so mix its occurrence into the hash.
                repeats = occurrences.astype(np.uint64)
                halves = [
                    np.where(occurrences == 0, half, _mixed(half ^ repeats, salt))
                    for half, salt in zip(halves, _SALTS, strict=True)
                ]
        return np.array([half.sum(dtype=np.uint64) for half in halves], dtype="<u8").tobytes()


def _prepare_cache(cache: Any, index: Index, built: BuiltDataset, host: str) -> None:
    """Let the cache open its files, and check with the sample at ``index`` that the data set's samples may be kept."""
    try:
        cache.begin(index)
    except Exception as exc:
        # hetero raises a `ConfigError` itself, and its text says what is wrong with the data set. Report only the text,
        # because a traceback would show only code of hetero.
        found = str(exc) if isinstance(exc, ConfigError) else exc
        raise dataset_error(found, dataset=built.name, host=host, stage="sample", sample_index=index) from exc


def _compute_each(
    built: BuiltDataset,
    request: BatchRequest,
    work: IndexedWork,
    host: str,
    cancelled: Callable[[], bool] | None,
    failed: FailedSamples | None,
    positions: ChoosePositions | None,
) -> Sequence[Any]:
    """Compute each sample with its own seed. A substitute has the same seed and bytes as the sample that it repeats.

    ``positions`` gets the list of samples. It yields the positions of the samples that this function has to compute. It
    puts all other samples, which other endpoints have computed, into the list.
    """
    dataset, seed = built.dataset, built.seed
    key_of = partial(sample_key, request.seed, request.epoch)
    indices = work.labels
    occurrences = [0] * len(indices) if work.occurrences is None else work.occurrences.tolist()
    samples: list[Any] = [None] * len(indices)
    for position in range(len(indices)) if positions is None else positions(samples):
        _poll(cancelled)
        index = indices[position]
        key = key_of(index, occurrences[position])
        try:
            seed(key)
            samples[position] = dataset[index]
        except BaseException as exc:
            check_not_exit(exc, in_worker=built.num_workers > 0)
            # An index out of range and a `ConfigError` are mistakes of the script, which skipping would hide.
            note = _out_of_range_note(exc, index, built)
            if failed is None or note or isinstance(exc, ConfigError):
                raise _sample_error(exc, index, note, built, request, host) from exc
            failed.add(position, exc)
    if failed:

        def compute_again(position: int) -> Any:
            seed(key_of(indices[position], occurrences[position]))
            return dataset[indices[position]]

        _fill_in(samples, failed, compute_again, cancelled)
    return samples


def _compute_together(
    built: BuiltDataset,
    request: BatchRequest,
    work: IndexedWork,
    host: str,
    cancelled: Callable[[], bool] | None,
    failed: FailedSamples | None,
) -> Sequence[Any]:
    """Compute samples with one seed for the batch, and with the data set's ``__getitems__`` if it has one."""
    key, indices = request.key, work.labels
    # Poll only once, because these samples are cheap: 1,024 calls took 2 % of the time of a batch of table rows.
    _poll(cancelled)
    try:
        built.seed(key)
        dataset, inner_indices = unwrap_subset(built.dataset, indices)
        is_batched = request.collate and has_getitems(dataset)
    except Exception as exc:
        raise dataset_error(exc, dataset=built.name, host=host, stage="sample") from exc
    if is_batched:
        return _compute_at_once(built, dataset, inner_indices, key, host, cancelled, failed)
    samples: list[Any] = []
    # The outer loop goes round again only after a sample raised. With a `try` for each sample, a batch of 64 cheap
    # samples took 19.5 us instead of 17.8.
    while len(samples) < len(indices):
        try:
            for inner_index in inner_indices[len(samples) :]:
                samples.append(dataset[inner_index])  # noqa: PERF401 - keep the samples before one that raises
        except BaseException as exc:
            check_not_exit(exc, in_worker=built.num_workers > 0)
            index = indices[len(samples)]
            # An index out of range and a `ConfigError` are mistakes of the script, which skipping would hide.
            note = _out_of_range_note(exc, index, built)
            if failed is None or note or isinstance(exc, ConfigError):
                raise _sample_error(exc, index, note, built, request, host) from exc
            failed.add(len(samples), exc)
            samples.append(None)
    if failed:
        # With one seed per batch, the generators are not seeded again. So a substitute draws other numbers than the
        # sample that it repeats.
        _fill_in(samples, failed, lambda position: dataset[inner_indices[position]], cancelled)
    return samples


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

    If it raises and samples may be skipped, call it with each index alone to find the samples that raise. Then call it
    again, with the indices of substitutes in place of these samples. ``__getitem__`` is not used, because the data set
    may not have it, and because ``__getitems__`` may return a whole batch.
    """
    try:
        return _get_items(dataset, indices)
    except BaseException as exc:
        check_not_exit(exc, in_worker=built.num_workers > 0)
        to_do = _MAY_SKIP if failed is None and not isinstance(exc, ConfigError) else ""
        # Pass no sample_index, because it is not known which sample raised.
        error = dataset_error(exc, dataset=built.name, host=host, stage="sample", to_do=to_do)
        if failed is None:
            raise error from exc
    # Find the samples that raise. Seed before each call, because a sample must not depend on the samples before it.
    for position, index in enumerate(indices):
        _poll(cancelled)
        try:
            built.seed(key)
            _get_items(dataset, [index])
        except BaseException as exc:  # noqa: BLE001 - recorded, and raised if all samples fail
            check_not_exit(exc, in_worker=built.num_workers > 0)
            failed.add(position, exc)
    if not failed:
        raise with_note(error, " (each sample alone works, so hetero does not know which one to skip)")
    # Compute the batch with substitutes for these samples.
    indices = failed.replaced(indices)
    try:
        built.seed(key)
        return _get_items(dataset, indices)
    # The samples that raise are left out now. So a SystemExit, for example, is not from a sample, and is not caught.
    except Exception as exc:
        raise dataset_error(exc, dataset=built.name, host=host, stage="sample") from exc


def _get_items(dataset: Any, indices: list[Any]) -> Sequence[Any]:
    """Return the result of ``__getitems__``. Raise `ValueError` if it has another number of samples than indices."""
    together: Sequence[Any] = dataset.__getitems__(indices)
    # Check the length only of lists and tuples. Another result is a whole batch for the data set's collate_fn.
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

    The sample that serves as the substitute is computed again. Collation may write to the samples of a batch, so the
    same object must not be in the batch twice.
    """
    for position in failed.positions:
        # The loop ends, because `substitute` raises when no sample is left.
        while True:
            _poll(cancelled)
            substitute = failed.substitute(position)
            try:
                samples[position] = compute_again(substitute)
                break
            except Exception:  # noqa: BLE001 - try another substitute
                failed.withdraw(substitute)


def _poll(cancelled: Callable[[], bool] | None) -> None:
    """Raise `Cancelled` if the computation should stop."""
    if cancelled is not None and cancelled():
        raise Cancelled


def _out_of_range_note(error: BaseException, index: Index, built: BuiltDataset) -> str:
    """Return a note for an `IndexError` about an index out of range, or an empty string for other errors.

    Indices are not checked before the data set raises, because a data set may use integers as keys.
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
    error: BaseException, index: Index, note: str, built: BuiltDataset, request: BatchRequest, host: str
) -> DatasetError:
    """Return the error for a sample that raised, with advice about skipping if such a sample can be skipped."""
    # A request without collation cannot skip. Mistakes of the script are not skipped. These are an index out of range,
    # which has a note, and a `ConfigError`.
    to_do = _MAY_SKIP if request.collate and not note and not isinstance(error, ConfigError) else ""
    return dataset_error(
        error, dataset=built.name, host=host, stage="sample", sample_index=index, note=note, to_do=to_do
    )


def _key_text(index: object) -> bytes:
    return repr(index).encode("utf-8", "surrogatepass")


def _mixed(keys: Any, salt: int) -> npt.NDArray[np.uint64]:
    """Return hashes of 64-bit numbers, by the finalizer of splitmix64."""
    mixed: npt.NDArray[np.uint64] = keys + np.uint64(salt)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D0_49BB_1331_11EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed

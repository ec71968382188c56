"""The pure function: one batch from a data set, its indices, seed, epoch and position."""

from __future__ import annotations

import logging
import os
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import dataset_error
from hetero.batches.imported import imported
from hetero.batches.keras import to_arrays
from hetero.batches.purity import IMPURITY_ADVICE, compare, freeze, outline, sketch
from hetero.batches.request import BatchRequest, plain_indices
from hetero.batches.samples import compute_samples
from hetero.batches.seeds import batch_key, preserved_generators, seed_generators
from hetero.batches.skips import FailedSamples, Skips
from hetero.errors import ConfigError, DatasetError
from hetero.spec import DatasetSpec

__all__ = ["Description", "describe", "describe_environment", "fetch"]

logger = logging.getLogger(__name__)

_NUM_PROBES = 8
_NUM_PROBED_BATCHES = 2
"""Of data sets whose items are batches: each takes as long as all the samples in it."""
_BATCHES_ALREADY = (
    "ConfigError: the items of a Keras data set are batches already; pass batch_size=None to the loader, "
    "and the number of samples to the data set"
)

_T = TypeVar("_T")


def fetch(
    built: BuiltDataset,
    request: BatchRequest,
    *,
    host: str = "local",
    cancelled: Callable[[], bool] | None = None,
    on_skips: Callable[[Skips], object] | None = None,
) -> Any:
    """Compute one batch: the same in every process for the same request.

    Seeds and uses the process's global generators, so only one thread of a
    process may be in here; inside a trainer wrap it in `preserved_generators`.

    Args:
        built: The data set of ``request.spec``.
        request: What to compute.
        host: Named in errors.
        cancelled: Polled before every sample. With one seed for the batch at most 64 times, at equal distances;
            with ``__getitems__`` once, before it, unless that raises and samples may be skipped.
        on_skips: Given the samples that others stand in for, if there are any and the request allows it; once, when the
            batch is there.

    Returns:
        What ``collate_fn`` returned; ``default_collate`` where the user gave none. Without
        collation the sample, through the user's ``collate_fn``, else torch's ``default_convert`` unless the request
        wants it as it is.

    Raises:
        Cancelled: If ``cancelled()`` was true between two samples.
        DatasetError: If the user's code raises, an index is out of range, or with
            ``request.verify`` if the batch differs from itself.
        ConfigError: If seed, epoch or position are out of range, or there is neither a ``collate_fn`` nor torch.
    """
    if request.collate and built.makes_batches:
        raise dataset_error(_BATCHES_ALREADY, dataset=built.name, host=host, stage="collate")
    collate = built.collate_fn or _default_function(request)  # first: it may import torch

    def compute() -> tuple[Sequence[Any], Any, FailedSamples | None]:
        failed = None if request.on_sample_error == "raise" else _failed_samples(built, request, host)
        samples = compute_samples(built, request, host, cancelled, failed)
        return samples, _collate(built, collate, samples, request, host), failed

    samples, batch, failed = _with_torch_seeded(compute)
    if not request.verify:
        return batch if failed is None else _told(batch, failed, on_skips)
    # Frozen before the second time, which may reuse the memory of the first.
    first, first_samples = freeze(batch), [freeze(sample) for sample in samples] if isinstance(samples, list) else ()
    samples, again, failed_again = compute()
    _check_same_failed(built, request, host, failed, failed_again)
    difference = compare(first, again)
    if difference is None:
        return _told(batch, failed, on_skips)
    pairs = zip(plain_indices(request.indices), first_samples, samples, strict=True) if first_samples else ()
    differing = [index for index, one, other in pairs if compare(one, other)]
    raise dataset_error(
        f"computed twice, {difference}. {IMPURITY_ADVICE}",
        dataset=built.name,
        host=host,
        stage="purity",
        sample_index=differing[0] if differing else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a data set looks like from one host; equal on all hosts that have the same data."""

    num_samples: int | None
    """None if the data set has no length."""
    fingerprint: str
    """Hexadecimal digest of length and probed samples, or the factory's own text."""
    environment: dict[str, str]
    """Versions and settings that may change a sample's bytes."""
    globals: dict[str, str] = field(default_factory=dict)
    """Digests of the script's globals that the data set's code reads, by name."""
    warnings: tuple[str, ...] = ()
    """What the user should know of the data set, a sentence each."""


def describe(built: BuiltDataset, *, host: str = "local") -> Description:
    """Return length, fingerprint and environment.

    Unless the factory has a ``fingerprint=``, up to 8 samples from the first to the last are
    computed twice under a fixed seed; of a Keras data set the first batch and the last one. One that
    differs from itself, or raises, adds that fact and nothing else to the fingerprint: what is wrong
    with it is for the purity check and `fetch` to say.

    Raises:
        DatasetError: If the user's ``__len__`` or ``fingerprint`` raises.
    """
    with preserved_generators():
        built.enter_epoch(0, 0, host=host)
        try:
            num_samples = built.num_samples
            if callable(built.fingerprint):
                seed_generators(0)  # it may look at samples that it draws: the same ones on all hosts
                fingerprint = str(built.fingerprint(built.dataset))
            else:
                fingerprint = built.fingerprint or _probe(built, num_samples, host)
            if built.seeding_was_probed:
                fingerprint += "+getitems"  # a host where samples draw would make other batches
        except Exception as exc:
            raise dataset_error(exc, dataset=built.name, host=host, stage="describe") from exc
    return Description(
        num_samples=num_samples, fingerprint=fingerprint, environment=describe_environment(), warnings=built.warnings
    )


def _with_torch_seeded(compute: Callable[[], _T]) -> _T:
    """Return what ``compute`` does; do it again if it imported torch, which was then neither seeded nor informed."""
    had_torch = "torch" in sys.modules
    result = compute()
    return result if had_torch or "torch" not in sys.modules else compute()


def _failed_samples(built: BuiltDataset, request: BatchRequest, host: str) -> FailedSamples:
    return FailedSamples(plain_indices(request.indices), dataset=built.name, host=host, epoch=request.epoch)


def _told(batch: _T, failed: FailedSamples | None, on_skips: Callable[[Skips], object] | None) -> _T:
    """Return the batch after telling what was skipped in it."""
    if failed and on_skips is not None:
        on_skips(failed.skips())
    return batch


def _check_same_failed(
    built: BuiltDataset, request: BatchRequest, host: str, failed: FailedSamples | None, again: FailedSamples | None
) -> None:
    """Raise if a sample raised only one of two times: what stands in for it would be a matter of chance."""
    if failed is None or again is None or failed.positions == again.positions:
        return
    index = plain_indices(request.indices)[min({*failed.positions} ^ {*again.positions})]
    raise dataset_error(
        f"computed twice, sample {index!r} raised only once. {IMPURITY_ADVICE}",
        dataset=built.name,
        host=host,
        stage="purity",
        sample_index=index,
    )


def _collate(
    built: BuiltDataset, function: Callable[[Any], Any], samples: Sequence[Any], request: BatchRequest, host: str
) -> Any:
    """Make the batch, under a key of its own if samples had theirs."""
    key = None
    if built.seeding == "sample":
        key = batch_key(request.seed, request.epoch, request.position, request.indices)
    try:
        if key is not None:
            built.seed(key)
        if request.collate:
            batch = function(samples)
            return _contiguous(batch) if request.contiguous and built.collate_fn is None else batch
        return function(to_arrays(samples[0]) if built.makes_batches else samples[0])
    except Exception as exc:
        raise dataset_error(
            exc, dataset=built.name, host=host, stage="collate", note=_compare_outlines(samples, request)
        ) from exc


def _contiguous(batch: Any) -> Any:
    """Return what torch's own collation made as torch's workers make it.

    There it puts tensors into new shared memory in C order. Elsewhere those made of channels-last samples of four
    dimensions or more keep that order.
    """
    torch = imported("torch")
    if torch is not None and type(batch) is torch.Tensor:
        return batch if batch.ndim < 5 or batch.layout is not torch.strided else batch.contiguous()
    if isinstance(batch, dict | list):
        for key, value in batch.items() if isinstance(batch, dict) else enumerate(batch):
            if (made := _contiguous(value)) is not value:
                with suppress(TypeError):  # of a class that takes no assignment
                    batch[key] = made
        return batch
    if type(batch) is tuple:
        return tuple([_contiguous(value) for value in batch])
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return tuple.__new__(type(batch), [_contiguous(value) for value in batch])
    return batch


def _default_function(request: BatchRequest) -> Callable[[Any], Any]:
    """Return torch's function for users who gave none, unless the request wants a sample as it is."""
    collate = request.collate
    if request.as_is and not collate:
        return _as_it_is
    try:
        # The look into the table first: 2 us, where import_module takes 15 to 20 whose code has left the caches.
        torch_data = imported("torch.utils.data") or import_module("torch.utils.data")
    except ImportError:
        if not collate:
            return _as_it_is
        raise ConfigError(
            "torch is not installed, so there is no default_collate; pass @hetero.dataset(collate_fn=...),\n"
            "  for example hetero.collate_arrays, which makes NumPy arrays."
        ) from None
    return cast("Callable[[Any], Any]", torch_data.default_collate if collate else torch_data.default_convert)


def _as_it_is(sample: Any) -> Any:
    return sample


def _compare_outlines(samples: Sequence[Any], request: BatchRequest) -> str:
    """Return types and shapes of the first sample and of the first one that differs; never raises."""
    if not isinstance(samples, list) or not samples:
        return ""
    outlines = [outline(sample) for sample in samples]
    other = next((position for position, text in enumerate(outlines) if text != outlines[0]), None)
    indices = plain_indices(request.indices)
    note = f" (sample {indices[0]!r} is {outlines[0]}"
    return note + (")" if other is None else f"; sample {indices[other]!r} is {outlines[other]})")


def _probe(built: BuiltDataset, num_samples: int | None, host: str) -> str:
    """Return a digest of the length and of a few samples."""
    hasher = blake2b(struct.pack("<q", -1 if num_samples is None else num_samples), digest_size=16)
    count = num_samples or 0
    spec = DatasetSpec("probe")
    last_step = (_NUM_PROBED_BATCHES if built.makes_batches else _NUM_PROBES) - 1
    for probe in sorted({round(step * (count - 1) / last_step) for step in range(last_step + 1)} if count else ()):
        request = BatchRequest(spec=spec, indices=np.array([probe]), seed=0, epoch=0, position=0)
        compute = partial(compute_samples, built, request, host, None)  # a list, or what __getitems__ returns
        try:
            first = _with_torch_seeded(compute)
            mark, frozen = sketch(first), freeze(first)  # now: the second time may reuse the first one's memory
            pure = compare(frozen, compute()) is None
        except DatasetError as exc:
            logger.warning("sample %d of data set %r could not be probed: %s", probe, built.name, exc)
            hasher.update(b"raised")
        else:
            hasher.update(mark if pure else b"impure")
    return hasher.hexdigest()


def describe_environment() -> dict[str, str]:
    """Return versions of what is imported here, and settings that change bytes."""
    facts = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "random"),
    }
    for name in ("numpy", "torch", "torchvision", "cv2", "PIL"):
        module = imported(name)
        if module is not None:
            facts[name] = str(getattr(module, "__version__", "unknown"))
    torch = imported("torch")
    if torch is not None:
        facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        facts["torch_threads"] = str(torch.get_num_threads())
    return facts

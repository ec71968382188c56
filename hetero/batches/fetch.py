"""The pure function that computes one batch from a data set, indices, seed, epoch and position."""

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
from hetero.batches.failures import check_not_exit, dataset_error
from hetero.batches.imported import imported
from hetero.batches.indexed import IndexedWork
from hetero.batches.indices import probes
from hetero.batches.keras import to_arrays
from hetero.batches.lanes.work import LaneSamples
from hetero.batches.purity.comparison import IMPURITY_ADVICE, compare, digest, freeze, outline, sketch
from hetero.batches.request import BatchRequest, ChoosePositions
from hetero.batches.seeds import preserved_generators, seed_generators
from hetero.batches.skips import FailedSamples, Skips
from hetero.errors import ConfigError, DatasetError
from hetero.plans.plan import Source
from hetero.spec import DatasetSpec

__all__ = ["Description", "describe", "describe_environment", "fetch", "fetch_part"]

logger = logging.getLogger(__name__)

_BATCHES_ALREADY = (
    "ConfigError: the items of a Keras data set are batches already; pass batch_size=None to the loader, "
    "and the number of samples to the data set"
)

_STALE_ADVICE = (
    "The first result was made with kept samples and the second one without. If the data have changed, change "
    "@hetero.dataset(fingerprint=...), so that the samples are kept anew."
)

_T = TypeVar("_T")


def fetch(
    built: BuiltDataset,
    request: BatchRequest,
    *,
    host: str = "local",
    cancelled: Callable[[], bool] | None = None,
    on_skips: Callable[[Skips], object] | None = None,
    on_samples: Callable[[], object] | None = None,
    positions: ChoosePositions | None = None,
) -> Any:
    """Compute one batch. The batch is the same in every process for the same request.

    This function seeds and uses the global generators of the process. Only one thread of a
    process may therefore call it. In a trainer, call it inside `preserved_generators`.

    Args:
        built: The data set of ``request.spec``.
        request: The batch to compute.
        host: Name of this host in error messages.
        cancelled: Function that is called before every sample and returns whether to stop. With one seed per batch, it
            is called only before the first sample, because a call before each would take 2 % of the time of a batch of
            table rows. It is called again only if samples raise and may be skipped.
        on_skips: Function that receives a report of the skipped samples. It is called at most once, after the batch is
            computed, and only if samples were skipped. The request must allow skipping.
        on_samples: Function that is called when all samples are computed, before they are collated.
        positions: Chooses the samples to compute here. None selects all. Only for data sets that are
            `BuiltDataset.is_divisible`. If the batch is computed twice, the function is called twice.

    Returns:
        The result of ``collate_fn``, or of torch's ``default_collate`` if the user gave no ``collate_fn``. Without
        collation, ``collate_fn`` gets the one sample. The default is then torch's ``default_convert``. If the request
        has ``as_is`` (the caller wants no tensors) or torch is not installed, the default returns the sample itself.

    Raises:
        Cancelled: If ``cancelled()`` returned True.
        DatasetError: If the user's code raises, an index is out of range, or ``request.verify`` is set and two
            computations of the batch differ.
        ConfigError: If seed, epoch or position are out of range, or there is no ``collate_fn`` and no torch to collate.
    """
    if request.collate and built.makes_batches:
        raise dataset_error(_BATCHES_ALREADY, dataset=built.name, host=host, stage="collate")
    # Find the function before the samples are computed, because this may import torch.
    collate = built.collate_fn or _default_function(request)

    def compute() -> tuple[Sequence[Any], Any, FailedSamples | None]:
        """Return the samples, the batch, and the record of the samples that raised (None if none may be skipped)."""
        failed = None
        if request.on_sample_error == "skip":
            failed = FailedSamples(request.work.labels, dataset=built.name, host=host, epoch=request.epoch)
        samples = request.work.compute(
            built, request, host=host, cancelled=cancelled, failed=failed, positions=positions
        )
        if on_samples is not None:
            on_samples()
        if isinstance(samples, LaneSamples):
            # At the end of a lane the batch may be empty.
            batch = _collate(built, collate, list(samples), request, host) if samples else None
            return samples, (batch, samples.report.to_array()), failed
        return samples, _collate(built, collate, samples, request, host), failed

    # If the samples import torch, they have drawn from torch's generator before it was seeded. Then compute them again.
    samples, batch, failed = _repeat_if_it_imports_torch(compute)
    # Without ``failed``, `_reported` has nothing to report. Most batches come here, so save the call.
    if not request.verify:
        return batch if failed is None else _reported(batch, failed, on_skips)
    # The purity check: compute the batch again and compare. First copy the first batch, because the second computation
    # may reuse its memory.
    first = freeze(batch[0] if isinstance(samples, LaneSamples) else batch)
    # Without a list, `__getitems__` has returned a whole batch, and no single sample can be named.
    first_samples = [freeze(sample) for sample in samples] if isinstance(samples, list) else ()
    with built.loading_anew():
        samples, again, failed_again = compute()
    _check_same_failed(built, request, host, failed, failed_again)
    # The report of lanes says where the iterators were begun, which differs.
    difference = compare(first, again[0] if isinstance(samples, LaneSamples) else again)
    if difference is None:
        return _reported(batch, failed, on_skips)
    # Find the samples that differ, to name the first of them in the error.
    pairs = zip(request.work.labels, first_samples, samples, strict=True) if first_samples else ()
    differing = [index for index, one, other in pairs if compare(one, other)]
    # Only a data set with a cache has a `BuiltDataset.split`, because a cache keeps the first of two parts of a
    # sample. The first computation may then have used samples that were kept before the data changed.
    advice = IMPURITY_ADVICE if built.split is None else f"{_STALE_ADVICE} {IMPURITY_ADVICE}"
    raise dataset_error(
        f"computed twice, {difference}. {advice}",
        dataset=built.name,
        host=host,
        stage="purity",
        sample_index=differing[0] if differing else "",
    )


def fetch_part(
    built: BuiltDataset, request: BatchRequest, *, host: str = "local", cancelled: Callable[[], bool] | None = None
) -> list[Any]:
    """Compute the samples of a part of a batch. They are the same as in `fetch` for the whole batch.

    Args:
        built: The data set of ``request.spec``. It is `BuiltDataset.is_divisible`.
        request: The part. The ``work`` of the request has only the samples of the part.
        host: Name of this host in error messages.
        cancelled: Function that is called before every sample and returns whether to stop.

    Raises:
        Cancelled, DatasetError, ConfigError: As in `fetch`.
    """
    if built.collate_fn is None:
        # This call may import torch. `fetch` makes it before the samples too, and once torch is imported, its generator
        # is seeded for each sample. So the samples of a part are the same as in `fetch`.
        _default_function(request)
    compute = partial(request.work.compute, built, request, host=host, cancelled=cancelled)
    return list(_repeat_if_it_imports_torch(compute))


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Description of a data set as one host sees it.

    Length and fingerprint are equal on all hosts that have the same data.
    """

    num_samples: int | None
    """Length of the data set, or None if it lacks one."""
    fingerprint: str
    """Hexadecimal digest of length and probed samples, or the factory's own text."""
    environment: dict[str, str]
    """Versions and settings that may change a sample's bytes."""
    globals: dict[str, str] = field(default_factory=dict)
    """Digests of the script's globals that the data set's code reads, by name."""
    warnings: tuple[str, ...] = ()
    """Facts about the data set that the user should know, one sentence each."""
    keeps_samples: bool = False
    """Whether this host keeps samples in a cache, and computes them for other hosts."""
    sources: tuple[Source, ...] = ()
    """The parts of the data set that a plan may draw from, see `hetero.plans`."""
    is_iterable: bool = False
    """Whether the data set lacks an index, see `hetero.batches.lanes`."""


def describe(built: BuiltDataset, *, host: str = "local") -> Description:
    """Return the description of a data set on this host.

    If the factory has a ``fingerprint=``, that function or text gives the fingerprint. Otherwise the fingerprint is a
    hash of up to 8 samples from the first to the last, or of the first and the last batch of a Keras data set. Each of
    them is computed twice with a fixed seed. If one raises, or if its two results differ, the hash contains this fact
    instead of the sample. Such a fault is not reported here, because `fetch` and the purity check report it.

    The user's code runs, but the global random generators have their earlier states afterwards.

    Raises:
        DatasetError: If the user's ``__len__`` or ``fingerprint`` raises.
    """
    # Load the samples anew, because samples from the cache would hide that the files have changed.
    with preserved_generators(), built.loading_anew():
        # Probe a Keras data set as it is in the first epoch, because its items may differ between epochs.
        built.enter_epoch(seed=0, epoch=0, host=host)
        try:
            num_samples = built.num_samples
            if callable(built.fingerprint):
                # The function may draw random numbers, and must draw the same ones on all hosts.
                seed_generators(key=0)
                fingerprint = str(built.fingerprint(built.user_dataset))
            else:
                fingerprint = built.fingerprint or _probe(built, num_samples, host)
                # The files of a data set of hetero may differ where no sample was probed.
                if hasattr(type(built.user_dataset), "hetero_fingerprint"):
                    both = f"{fingerprint} {built.user_dataset.hetero_fingerprint}"
                    fingerprint = blake2b(both.encode(), digest_size=8).hexdigest()
            if built.seeding_was_probed:
                # The seeding of this data set was found by a probe. Another host that seeds every sample would make
                # other batches, so its fingerprint must differ.
                fingerprint += "+getitems"
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            # This includes sys.exit in the user's code, which must not end an endpoint.
            raise dataset_error(exc, dataset=built.name, host=host, stage="describe") from exc
    return Description(
        num_samples=num_samples,
        fingerprint=fingerprint,
        environment=describe_environment(),
        warnings=built.warnings,
        sources=built.sources,
        is_iterable=built.lanes is not None,
    )


def _repeat_if_it_imports_torch(compute: Callable[[], _T]) -> _T:
    """Return the result of ``compute``. If the call imports torch, call it a second time, and return that result.

    In the first call, torch's generator was not seeded and torch's worker info was missing.
    """
    had_torch = "torch" in sys.modules
    result = compute()
    return result if had_torch or "torch" not in sys.modules else compute()


def _reported(batch: _T, failed: FailedSamples | None, on_skips: Callable[[Skips], object] | None) -> _T:
    """Report the skipped samples of the batch to ``on_skips``, and return the batch."""
    if failed and on_skips is not None:
        on_skips(failed.skips())
    return batch


def _check_same_failed(
    built: BuiltDataset, request: BatchRequest, host: str, failed: FailedSamples | None, again: FailedSamples | None
) -> None:
    """Raise an error if a sample raised in only one of two computations, because the batch then depends on chance."""
    if failed is None or again is None or failed.positions == again.positions:
        return
    # The first sample that raised in one computation and not in the other.
    index = request.work.labels[min({*failed.positions} ^ {*again.positions})]
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
    """Return the batch that ``function`` makes of the samples. Without collation, it gets the one sample.

    With ``seeding="sample"``, seed the generators with the key of the batch first. With ``seeding="batch"``, they were
    seeded with this key before the samples.
    """
    # Compute the key before the `try`, because its errors do not come from the user's code.
    key = request.key if built.seeding == "sample" else None
    try:
        if key is not None:
            built.seed(key)
        if request.collate:
            batch = function(samples)
            return _contiguous(batch) if request.contiguous and built.collate_fn is None else batch
        # A batch of a Keras data set may have tensors of TensorFlow or JAX, which cannot be sent.
        return function(to_arrays(samples[0]) if built.makes_batches else samples[0])
    except BaseException as exc:
        check_not_exit(exc, in_worker=built.num_workers > 0)
        raise dataset_error(
            exc, dataset=built.name, host=host, stage="collate", note=_compare_outlines(samples, request)
        ) from exc


def _contiguous(batch: Any) -> Any:
    """Return a batch of torch's own collation with its tensors in C order, as in torch's workers.

    In torch's workers, collation puts tensors into new shared memory in C order. In other processes, a tensor that is
    made of channels-last samples of four dimensions or more is also channels-last.
    """
    torch = imported("torch")
    if torch is not None and type(batch) is torch.Tensor:
        # With the dimension of the batch, samples of four dimensions make five.
        return batch if batch.ndim < 5 or batch.layout is not torch.strided else batch.contiguous()
    if isinstance(batch, dict | list):
        for key, value in batch.items() if isinstance(batch, dict) else enumerate(batch):
            if (made := _contiguous(value)) is not value:
                # A subclass of dict may not allow assignment.
                with suppress(TypeError):
                    batch[key] = made
        return batch
    if type(batch) is tuple:
        return tuple([_contiguous(value) for value in batch])
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        # The class of a namedtuple takes the items as separate arguments.
        return tuple.__new__(type(batch), [_contiguous(value) for value in batch])
    return batch


def _default_function(request: BatchRequest) -> Callable[[Any], Any]:
    """Return the default of ``collate_fn``: torch's function, or one that returns the sample itself."""
    collate = request.collate
    if request.as_is and not collate:
        return lambda sample: sample
    try:
        # Look in sys.modules first, which takes 2 us. import_module takes 15 to 20 us, because its code is no longer in
        # the CPU caches.
        torch_data = imported("torch.utils.data") or import_module("torch.utils.data")
    except ImportError:
        if not collate:
            return lambda sample: sample
        raise ConfigError(
            "torch is not installed, so there is no default_collate; pass @hetero.dataset(collate_fn=...),\n"
            "  for example hetero.collate_arrays, which makes NumPy arrays."
        ) from None
    return cast("Callable[[Any], Any]", torch_data.default_collate if collate else torch_data.default_convert)


def _compare_outlines(samples: Sequence[Any], request: BatchRequest) -> str:
    """Return a note with types and shapes of the first sample, and of the first sample that differs from it.

    Never raises.
    """
    # A result of `__getitems__` that is not a list is a whole batch, without single samples.
    if not isinstance(samples, list) or not samples:
        return ""
    outlines = [outline(sample) for sample in samples]
    differing = next((position for position, text in enumerate(outlines) if text != outlines[0]), None)
    labels = request.work.labels
    note = f" (sample {labels[0]!r} is {outlines[0]}"
    return note + (")" if differing is None else f"; sample {labels[differing]!r} is {outlines[differing]})")


def _probe(built: BuiltDataset, num_samples: int | None, host: str) -> str:
    """Return a digest of the length and of a few samples."""
    hasher = blake2b(struct.pack("<q", -1 if num_samples is None else num_samples), digest_size=16)
    # A request needs a spec, which does not affect the samples.
    spec = DatasetSpec("probe")
    positions = probes(num_samples or 0, built.sources)
    if built.makes_batches:
        # An item is a whole batch and takes time, so compute only the first and the last one.
        positions = sorted({*positions[:1], *positions[-1:]})
    for probe in positions:
        request = BatchRequest(spec=spec, work=IndexedWork(np.array([probe])), seed=0, epoch=0, position=0)
        compute = partial(request.work.compute, built, request, host=host)
        try:
            first = _repeat_if_it_imports_torch(compute)
            # Keep only hashes of the sample. The second computation may reuse its memory, and a copy may be too large.
            # The sketch ignores rounding, which differs between hosts. The digest does not.
            first_sketch, first_digest = sketch(first), digest(first, skip_unreadable=True)
            del first
            is_pure = first_digest == digest(compute(), skip_unreadable=True)
        except DatasetError as exc:
            logger.warning("sample %d of data set %r could not be probed: %s", probe, built.name, exc)
            hasher.update(b"raised")
        else:
            hasher.update(first_sketch if is_pure else b"impure")
    return hasher.hexdigest()


def describe_environment() -> dict[str, str]:
    """Return the versions of imported modules, and settings that may change a sample's bytes."""
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

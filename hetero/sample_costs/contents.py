"""Measures what a batch consists of: its leaves, its bytes on the network, and its size and time with each codec."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.structure.conversion import flatten
from hetero.errors import ConfigError
from hetero.metrics.figures import Figure
from hetero.metrics.profile.parts import Contents
from hetero.metrics.profile.profile import CodecProfile, LeafProfile
from hetero.wire.compression import COMPRESSIONS, compress_leaf, is_installed, load_codec, raw_block_sizes
from hetero.wire.framing import EncodedBatch

__all__ = ["measure_contents"]

_CODEC_S = 0.6
"""Seconds of work that are enough for the figures of a codec."""
_MAX_LEAVES = 100
_MAX_VALUES = 2**20
_TOLERANCE = 1e-3


def measure_contents(batches: Sequence[tuple[Any, int]], *, batch_samples: int) -> Contents:
    """Return what some batches consist of. Blocks for about a second per codec.

    Args:
        batches: Batches of the same structure, each with its number of samples. They may be parts of the job's batches.
        batch_samples: Samples of a whole batch.
    """
    leaves = _leaves(batches)
    try:
        payload_bytes = sum(sum(leaf.nbytes for leaf in flatten(batch)[1]) for batch, _ in batches)
        batch, num_samples = batches[0]
        # Only the header's size is used, so the payload needs no copy.
        header_bytes = len(EncodedBatch(batch, copy=False).message)
    except ConfigError:  # the batch cannot be sent
        return Contents(leaves=leaves)
    total_samples = sum(count for _, count in batches)
    # The payload grows with the number of samples. The header is sent once for a whole batch, which has at least as
    # many samples as the measured part.
    wire_bytes = payload_bytes / total_samples + header_bytes / max(batch_samples, num_samples)
    codecs = tuple(_codec(name, batches) for name in COMPRESSIONS if is_installed(name) and payload_bytes)
    return Contents(
        leaves=leaves, wire_bytes_per_sample=Figure(value=wire_bytes, unit="B", basis="measured"), codecs=codecs
    )


def _leaves(batches: Sequence[tuple[Any, int]]) -> tuple[LeafProfile, ...]:
    """Return the first leaves of the batches, each with its dtype and its mean bytes per sample."""
    total_samples = sum(count for _, count in batches)
    arrays_of: dict[str, list[Any]] = {}
    for batch, _ in batches:
        for path, array in _arrays(batch, path=""):
            arrays_of.setdefault(path, []).append(array)
    return tuple(
        LeafProfile(
            path=path[:200],
            dtype=str(arrays[-1].dtype).removeprefix("torch."),
            bytes_per_sample=sum(array.nbytes for array in arrays) / total_samples,
            fits_uint8=all(map(_fits_uint8, arrays)),
        )
        for path, arrays in list(arrays_of.items())[:_MAX_LEAVES]
    )


def _arrays(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each tensor and array."""
    torch = imported("torch")
    if isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _arrays(item, f"{path}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        for index, item in enumerate(value):
            yield from _arrays(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _arrays(getattr(value, field.name, None), f"{path}.{field.name}")


def _fits_uint8(array: Any) -> bool:
    """Return whether uint8 could carry the values of an array of a wider dtype, perhaps after a division by 255."""
    torch = imported("torch")
    try:
        if torch is not None and isinstance(array, torch.Tensor):
            # NumPy has no bfloat16.
            array = array.detach().to(torch.float64 if array.dtype == torch.bfloat16 else array.dtype).numpy()
    except (TypeError, RuntimeError):  # a dtype that NumPy lacks, or a sparse tensor
        return False
    if array.dtype.kind not in "iuf" or array.dtype.itemsize == 1 or not array.size:
        return False
    # Look at no more than twice `_MAX_VALUES` values, at equal distances. All values of a video would take seconds.
    values = np.ravel(array)[:: max(1, array.size // _MAX_VALUES)].astype(np.float64)
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > 255:
        return False
    if (values == np.rint(values)).all():
        return True
    # If all values times 255 are integers up to rounding, the values are integers that were divided by 255.
    scaled = values * 255
    return bool(values.max() <= 1 and (np.abs(scaled - np.rint(scaled)) < _TOLERANCE).all())


def _codec(name: str, batches: Sequence[tuple[Any, int]]) -> CodecProfile:
    """Compress and decompress the leaves of the batches with one codec, until its time is over."""
    encoder, decoder = load_codec(name), load_codec(name)
    raw_bytes = sent_bytes = 0
    total_samples = encode_s = decode_s = 0.0
    for batch, num_samples in batches:
        _, leaves = flatten(batch)
        for leaf in leaves:
            begin_s = time.thread_time()
            pieces, sizes = compress_leaf(leaf.data, encoder)
            encode_s += time.thread_time() - begin_s
            for piece, size, raw_size in zip(pieces, sizes, raw_block_sizes(leaf.nbytes), strict=True):
                # A size of 0 means that the block is sent uncompressed.
                if size:
                    # Allocate before the clock starts, because a reader already has its memory.
                    room = memoryview(bytearray(raw_size))
                    begin_s = time.thread_time()
                    decoder.decompress(piece, room)
                    decode_s += time.thread_time() - begin_s
            raw_bytes += leaf.nbytes
            sent_bytes += sum(map(len, pieces))
        total_samples += num_samples
        if encode_s + decode_s > _CODEC_S:
            break
    return CodecProfile(
        name=name,
        ratio=sent_bytes / raw_bytes,
        encode_cpu_s_per_sample=encode_s / total_samples,
        decode_cpu_s_per_sample=decode_s / total_samples,
    )

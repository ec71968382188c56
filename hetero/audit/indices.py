"""Digests of the samples in a batch."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.batches.request import Indices

__all__ = ["indices_digest", "samples_sum"]

Occurrences = npt.NDArray[np.uint32]

_SALTS = (0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F)


def indices_digest(indices: Indices, occurrences: Occurrences | None) -> bytes:
    """Return a 16-byte hash of a batch's indices in order, with their occurrences."""
    hasher = blake2b(digest_size=16, person=b"hetero.indices")
    if isinstance(indices, np.ndarray):
        hasher.update(b"integers %d " % len(indices))
        hasher.update(np.ascontiguousarray(indices, dtype="<i8").data)
    else:
        hasher.update(b"keys %d " % len(indices))
        for index in indices:
            text = _key_text(index)
            hasher.update(b"%d " % len(text))
            hasher.update(text)
    if occurrences is not None and occurrences.any():  # None and all zeros give the same digest
        hasher.update(np.ascontiguousarray(occurrences, dtype="<u4").data)
    return hasher.digest()


def samples_sum(indices: Indices, occurrences: Occurrences | None, *, leave_out_repeats: bool) -> bytes:
    """Return a 16-byte sum over the samples of a batch, which does not depend on their order.

    The sums of a batch's parts add up to the sum of the whole batch. The value consists of two 64-bit sums over a
    mixture of index and occurrence. It detects accidental differences. It does not protect against someone who looks
    for other samples with the same sum, because such samples are easy to find.

    Args:
        indices: Indices of the samples.
        occurrences: How often each index came before. None means all zeros.
        leave_out_repeats: Whether to ignore indices that came before. Padding repeats indices, and the number of these
            depends on the number of ranks.
    """
    if isinstance(indices, np.ndarray):
        keys = np.ascontiguousarray(indices, dtype=np.int64).view(np.uint64)
        lanes = [_mixed(keys, salt) for salt in _SALTS]
    else:
        digests = b"".join(blake2b(_key_text(index), digest_size=16).digest() for index in indices)
        lanes = list(np.frombuffer(digests, "<u8").reshape(-1, 2).T)
    if occurrences is not None and occurrences.any():
        if leave_out_repeats:
            lanes = [lane[occurrences == 0] for lane in lanes]
        else:
            repeats = occurrences.astype(np.uint64)
            lanes = [
                np.where(occurrences == 0, lane, _mixed(lane ^ repeats, salt))
                for lane, salt in zip(lanes, _SALTS, strict=True)
            ]
    return np.array([lane.sum(dtype=np.uint64) for lane in lanes], dtype="<u8").tobytes()


def _key_text(index: object) -> bytes:
    return repr(index).encode("utf-8", "surrogatepass")


def _mixed(keys: Any, salt: int) -> npt.NDArray[np.uint64]:
    """Return well mixed 64-bit numbers, by the finalizer of splitmix64."""
    mixed: npt.NDArray[np.uint64] = keys + np.uint64(salt)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D0_49BB_1331_11EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed

"""Which host keeps a sample. Every rank with the same directory finds the same host."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

__all__ = ["homes_of"]


def homes_of(indices: npt.NDArray[np.int64], hosts: Mapping[str, int]) -> npt.NDArray[np.intp]:
    """Return for each sample the number of its host in ``hosts``.

    This is weighted rendezvous hashing: each host has a pseudo-random score for each sample, and the largest score
    wins. If a host comes or leaves, only its own samples move.

    Args:
        indices: Positions in the data set.
        hosts: Number of endpoints by the name of the host, at least one host. Its share of the samples is its share of
            the endpoints.
    """
    keys = np.ascontiguousarray(indices).view(np.uint64)
    # An exponential variable with rate n is the least of n with rate 1: as if each endpoint took part.
    scores = [np.log((_mixed(keys ^ _key(host)) + 0.5) * 2.0**-64) / number for host, number in hosts.items()]
    numbers: npt.NDArray[np.intp] = np.argmax(scores, axis=0)
    return numbers


def _key(host: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(host.encode(), digest_size=8).digest(), "little"))


def _mixed(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return hashes of 64-bit numbers, by the finalizer of splitmix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return keys ^ (keys >> np.uint64(31))

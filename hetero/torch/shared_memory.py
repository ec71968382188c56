"""Checks that /dev/shm has room for the tensors of batches that torch's own workers send through it.

Without room, torch's worker dies of SIGBUS, or its sending thread dies, and the batch never arrives.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hetero.torch.leaf_copies import leaves_of

__all__ = ["is_roomy", "shared_bytes", "why_full", "why_too_small"]

FOLDER = "/dev/shm"
_ADVICE = (
    "  to do: give the container more (docker run --shm-size=..., or --ipc=host); or have fewer bytes wait there: a "
    "smaller num_workers or prefetch_factor, smaller batches. All sharing strategies of torch.multiprocessing use it."
)
_TORCHS_WORDS = ("unable to allocate shared memory", "No space left on device")


def shared_bytes(batch: Any) -> tuple[int, int]:
    """Return how many bytes of a batch go through shared memory, and how many of these bytes are not there yet.

    Args:
        batch: The batch. Only tensors in mappings, sequences and dataclasses count. A pipe carries anything else.
    """
    sizes: dict[int, int] = {}
    absent: dict[int, int] = {}
    tensors = (leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))
    for storage in (storage for tensor in tensors for storage in _storages(tensor)):
        # Count each address once, because several views of one storage go through shared memory once.
        sizes[storage.data_ptr()] = storage.nbytes()
        if not storage.is_shared():
            absent[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()), sum(absent.values())


def _storages(tensor: torch.Tensor) -> list[Any]:
    """Return the storage of a dense CPU tensor. Return an empty list for any other tensor."""
    try:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return []
        storage = tensor.untyped_storage()
        # This raises for a tensor without memory.
        storage.data_ptr()
        return [storage]
    except Exception:  # noqa: BLE001 - an uninitialised parameter, or a class without memory
        return []


def why_too_small(batch: Any, num_prefetched: int, num_workers: int) -> str | None:
    """Return why shared memory is too small for this batch or for all waiting batches. Return None if they may fit.

    There are two checks. All waiting batches together, each as large as this one, must fit into the total size of
    shared memory. The free part does not count for them, because other processes may release memory before they arrive.
    This batch alone must fit into the free part, because it is sent now.

    Without these checks, a worker would end by SIGBUS, or the trainer would hang. A container has only 64 MiB of
    ``/dev/shm`` by default.

    Args:
        batch: A worker's batch that is about to be sent.
        num_prefetched: Batches that wait in shared memory while the trainer is in a step. 0 skips the first check.
        num_workers: Workers that make these batches.
    """
    num_bytes, num_absent = shared_bytes(batch)
    room, free = _room_and_free()
    # No part of the batch goes through shared memory, or the size of shared memory is not known.
    if not num_bytes or not room:
        return None
    if num_bytes * num_prefetched > room:
        return (
            f"shared memory ({FOLDER}) is too small for the batches of {num_workers} workers: {_mib(room)}\n"
            f"  needed: {_mib(num_bytes * num_prefetched)}: {num_prefetched} batches that wait for the trainer, of "
            f"{_mib(num_bytes)} each\n{_ADVICE}"
        )
    return _full(room, free, f"the next batch needs {_mib(num_absent)}") if num_absent > free else None


def is_roomy(num_bytes: int) -> bool:
    """Return whether so many bytes of shared memory are free. Return True if the size of shared memory is not known."""
    room, free = _room_and_free()
    return not room or num_bytes <= free


def why_full(exception: str) -> str | None:
    """Return the error text if torch's exception reports that shared memory is full, else None.

    torch's own collation raises such an exception because it makes its tensors in shared memory directly.
    """
    if not all(words in exception for words in _TORCHS_WORDS):
        return None
    return _full(*_room_and_free(), "the next batch needs more")


def _full(room: int, free: int, need: str) -> str:
    """Return the error text for shared memory that is full. ``need`` says what needs more of it."""
    return (
        f"shared memory ({FOLDER}) is full: {_mib(room)}, {_mib(free)} free, and {need}\n"
        f"  it holds what workers have sent, and every batch that the script keeps\n{_ADVICE}"
    )


def _room_and_free() -> tuple[int, int]:
    """Return the size of shared memory and its free part, in bytes. Both are 0 if they are not known."""
    try:
        facts = os.statvfs(FOLDER)
    except OSError:
        return 0, 0
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"

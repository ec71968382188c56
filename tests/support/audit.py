"""Ledgers as tests need them: written by the real class, from places and plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from hetero.audit.ledger import BatchEntry, Ledger, LoaderFacts, Writer
from hetero.batches.indexed import IndexedWork

FACTS = LoaderFacts(
    name="train",
    dataset="photos",
    arguments="00",
    fingerprint="aa",
    num_samples=64,
    seed=17,
    global_batch=4,
    order="shuffled",
)


def facts(**changes: Any) -> LoaderFacts:
    values = {name: getattr(FACTS, name) for name in FACTS.__slots__}
    return LoaderFacts(**{**values, **changes})


def entry(epoch: int, position: int, indices: Iterable[int], *, content: object = None) -> BatchEntry:
    array = np.array(list(indices), np.int64)
    text = repr(array.tolist() if content is None else content).encode()
    return BatchEntry(
        epoch=epoch,
        position=position,
        size=len(array),
        indices=IndexedWork(array).digest(),
        samples=IndexedWork(array).samples_sum(leave_out_repeats=True),
        content=blake2b(text, digest_size=16).digest(),
    )


def order(epoch: int, position: int, *, rank: int = 0, world_size: int = 1, global_batch: int = 4) -> list[int]:
    """Return the indices of a rank's batch: in every epoch others, the same global batches for every world size."""
    first = 1000 * epoch + position * global_batch
    return list(range(first + rank, first + global_batch, world_size))


def write(
    folder: Path,
    places: Iterable[tuple[int, int]],
    *,
    rank: int = 0,
    world_size: int = 1,
    loader: LoaderFacts = FACTS,
    close: bool = True,
    changed: dict[tuple[int, int], Any] | None = None,
    other_indices: dict[tuple[int, int], list[int]] | None = None,
) -> Path:
    """Write, or go on with, the ledger of one rank."""
    ledger = Ledger(folder, Writer(job="job-1", rank=rank, world_size=world_size))
    for epoch, position in places:
        indices = (other_indices or {}).get((epoch, position))
        if indices is None:
            indices = order(epoch, position, rank=rank, world_size=world_size)
        ledger.add(loader, entry(epoch, position, indices, content=(changed or {}).get((epoch, position))))
    assert ledger.num_lost == 0
    if close:
        ledger.close()
    else:
        ledger.abandon()  # as if the process had been killed
    return ledger.path


def run_places(epochs: int = 2, positions: int = 5) -> list[tuple[int, int]]:
    return [(epoch, position) for epoch in range(epochs) for position in range(positions)]

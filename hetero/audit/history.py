"""Finds the batches that a rank finally trained on: the last entry for each place in its ledger.

A *place* is a loader, an epoch and a position in the epoch. A run that restarts from a checkpoint repeats the steps
after the checkpoint, so a place may have several entries. The last entry counts, and must equal the earlier ones.

A user's sampler may choose other samples each time that the script repeats an epoch. For such loaders, a place also has
a *visit*: the number of earlier entries of the same process for this loader, epoch and position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.audit.reading import LedgerRecord

__all__ = ["Places", "Repetition", "settle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A batch that was delivered again and differed from the earlier delivery."""

    loader: int
    epoch: int
    position: int
    first_line: int
    line: int
    what: str
    """``indices`` or ``content``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of one rank, sorted by loader, epoch, position and visit."""

    entries: npt.NDArray[Any]
    """Last entry of each place, of dtype `hetero.audit.reading.ENTRY`."""
    visits: npt.NDArray[np.int64]
    """Visit of each place. 0 except for a user's sampler."""
    world_sizes: npt.NDArray[np.int64]
    """World size of the process that wrote each entry."""
    num_repeated: int
    """Number of entries that were replaced by a later entry for the same place."""
    differing: Repetition | None
    """First repetition that differs, or None."""


def settle(record: LedgerRecord) -> Places:
    """Return the entries of a ledger that count: the last entry for each place.

    A place is a loader, an epoch, a position and a visit. The visit is the number of earlier entries of the same
    process with the same loader, epoch and position. It is 0 unless the loader has a user's sampler.
    """
    entries = record.entries
    world_size = np.array([section.world_size for section in record.sections], np.int64)
    visits = _visits(record)
    # Sort by loader, epoch, position, visit and line. np.lexsort expects the most important key last.
    order = np.lexsort((entries["line"], visits, entries["position"], entries["epoch"], entries["loader"]))
    entries, visits = entries[order], visits[order]
    is_same = _same_as_before(entries["loader"], entries["epoch"], entries["position"], visits)
    # An entry is the last of its place if the next entry has another place. The slice is for an empty ledger.
    is_last = np.append(~is_same[1:], True)[: len(entries)]
    worlds = world_size[entries["section"]]
    return Places(
        entries=entries[is_last],
        visits=visits[is_last],
        world_sizes=worlds[is_last],
        num_repeated=int(is_same.sum()),
        differing=_first_difference(entries, is_same, worlds),
    )


def _visits(record: LedgerRecord) -> npt.NDArray[np.int64]:
    """Return the visit of each entry, which is the number of earlier entries with its loader, epoch and position.

    Only entries of the same section count. A section has the entries of one process.
    """
    entries = record.entries
    visits = np.zeros(len(entries), np.int64)
    # Only a user's sampler may choose other samples when an epoch is repeated. Other loaders must deliver the same
    # samples again, so their visits stay 0.
    with_sampler = [number for number, facts in enumerate(record.loaders) if facts.order == "sampler"]
    chosen = np.flatnonzero(np.isin(entries["loader"], with_sampler))
    part = entries[chosen]
    order = np.lexsort((part["line"], part["section"], part["position"], part["epoch"], part["loader"]))
    part = part[order]
    # Entries of one section and place are now neighbours. The visit of an entry is its distance from the first of them.
    is_same = _same_as_before(part["loader"], part["epoch"], part["position"], part["section"])
    starts = np.flatnonzero(~is_same)
    lengths = np.diff(np.append(starts, len(part)))
    visits[chosen[order]] = np.arange(len(part)) - np.repeat(starts, lengths)
    return visits


def _same_as_before(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each row whether it equals the row before it in all columns."""
    result = np.ones(len(columns[0]), bool)
    result[:1] = False
    for column in columns:
        result[1:] &= column[1:] == column[:-1]
    return result


def _first_difference(
    entries: npt.NDArray[Any], is_same: npt.NDArray[np.bool_], worlds: npt.NDArray[np.int64]
) -> Repetition | None:
    """Return the first entry of the ledger that differs from the previous entry for its place, or None.

    Entries of different world sizes are not compared.

    Args:
        entries: Entries sorted by place and line.
        is_same: For each entry, whether the entry before it has the same place.
        worlds: World size of the process that wrote each entry.
    """
    later = np.flatnonzero(is_same)
    # A rank's part of a global batch depends on the world size.
    later = later[worlds[later] == worlds[later - 1]]
    one, other = entries[later - 1], entries[later]
    indices_differ = (one["indices"] != other["indices"]).any(axis=1)
    differ = indices_differ | (one["content"] != other["content"]).any(axis=1)
    if not differ.any():
        return None
    # The entries are sorted by place, so look for the lowest line.
    found = np.flatnonzero(differ)
    first = int(found[np.argmin(other["line"][found])])
    return Repetition(
        loader=int(other["loader"][first]),
        epoch=int(other["epoch"][first]),
        position=int(other["position"][first]),
        first_line=int(one["line"][first]),
        line=int(other["line"][first]),
        what="indices" if indices_differ[first] else "content",
    )

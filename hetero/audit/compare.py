"""Compares the data that two runs trained on, and finds where they first differ.

If all ledgers of both runs have the same world size, each rank is compared with the same rank of the other run: the
indices in order, and the content bit for bit. If world sizes differ, the ranks of the two runs have different parts of
the same global batch, so ranks cannot be compared. Then the samples of whole global batches are compared, by sums of
digests over all ranks. The content is not compared.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.audit.ledger import LoaderFacts
from hetero.audit.reading import read_ledger
from hetero.audit.runs import Run, Side, load_side
from hetero.documents.text import listing, printable
from hetero.epochs import epoch_text
from hetero.errors import ConfigError

__all__ = ["AuditResult", "compare_runs"]

_MEANINGS = {
    "indices": "the indices differ",
    "content": "the indices are the same, the content differs",
    "samples": "the samples differ",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """Result of the comparison of two runs."""

    differences: tuple[str, ...]
    """Reasons why the data differ or cannot be compared. Empty if both runs trained on the same data."""
    notes: tuple[str, ...]
    """Further facts for the user that are not differences."""
    num_compared: int
    """Number of batches that both runs have."""
    by_rank: bool
    """True if ranks were compared, with content. False if global batches were compared, without content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Batches of one loader, by place (see `hetero.audit.history`)."""

    keys: npt.NDArray[np.int64]
    """Epoch, position and visit of each place, sorted. Shape (places, 3)."""
    digests: tuple[tuple[str, npt.NDArray[np.uint64]], ...]
    """Names and values of the digests to compare. The report names the first digest that differs."""
    lines: npt.NDArray[np.int64] | None = None
    """Line of each place in the ledger. None for global batches, because their parts are in several ledgers."""


@dataclass(slots=True)
class _Findings:
    differences: list[tuple[tuple[int, int, int], str]]
    """Pairs of a place (epoch, position, visit) and a text. `result` sorts the texts by place."""
    notes: list[str]
    num_compared: int = 0

    def differ(self, text: str, key: Sequence[int] = (-1, -1, -1)) -> None:
        """Record a difference at a place. Without a place, the difference comes first."""
        self.differences.append(((int(key[0]), int(key[1]), int(key[2])), text))

    def result(self, *, by_rank: bool) -> AuditResult:
        """Return the differences in order, with the notes. No batch in common is a difference too."""
        if not self.num_compared and not self.differences:
            self.differ("the runs have no batch in common")
        ordered = sorted(self.differences, key=lambda pair: pair[0])
        return AuditResult(
            differences=tuple(text for _, text in ordered),
            notes=tuple(dict.fromkeys(self.notes)),
            num_compared=self.num_compared,
            by_rank=by_rank,
        )


def compare_runs(one: Run, other: Run) -> AuditResult:
    """Compare two runs, by rank if all ledgers have one world size, and by global batch otherwise.

    At most two ledgers are in memory at a time.

    Raises:
        ConfigError: If a ledger cannot be read, or if the ledgers that exist cannot be compared.
    """
    runs = (one, other)
    # Read only verified lines, because a size of 1e999 in a damaged line once raised OverflowError.
    sections = (each for run in runs for path in run.ledgers.values() for each in read_ledger(path).sections)
    sizes = {section.world_size for section in sections}
    findings = _Findings(differences=[], notes=[])
    if len(sizes) > 1:
        tables = [_global_tables(run, findings) for run in runs]
        _compare_loaders(where="", loaders_a=tables[0], loaders_b=tables[1], findings=findings)
        return findings.result(by_rank=False)
    for rank in _ranks(one, other, findings):
        sides = [load_side(run, rank) for run in runs]
        for side in sides:
            _record_problems(side, rank, findings)
        _compare_loaders(f"rank {rank}, ", _tables(sides[0]), _tables(sides[1]), findings)
    # Here all ledgers have one world size, so each rank below it should have a ledger.
    absent = sorted(set(range(max(sizes, default=0))) - set(one.ledgers) - set(other.ledgers))
    if absent:
        findings.notes.append(
            f"neither run has a ledger of rank {listing(absent)}, so the batches of these ranks were not compared"
        )
    return findings.result(by_rank=True)


def _ranks(one: Run, other: Run, findings: _Findings) -> list[int]:
    """Return the ranks to compare.

    Records a difference for each run that lacks ranks of the other run, unless a single file was given.

    Raises:
        ConfigError: If a single file was given and the runs do not share a rank.
    """
    common = sorted(set(one.ledgers) & set(other.ledgers))
    if one.is_file or other.is_file:
        if not common:
            names = " and ".join(f"{run.label} has rank {listing(sorted(run.ledgers))}" for run in (one, other))
            raise ConfigError(
                f"the ledgers belong to different ranks: {names}\n  Give ledgers of one rank, or whole folders."
            )
        return common
    for run, counterpart in ((one, other), (other, one)):
        # A folder is a whole run, so a ledger that it lacks was lost. A single file says nothing of other ranks.
        if alone := sorted(set(run.ledgers) - set(counterpart.ledgers)):
            findings.differ(f"{counterpart.label} has no ledger of rank {listing(alone)}")
    return common


def _record_problems(side: Side, rank: int, findings: _Findings) -> None:
    """Record the ledger's damage and notes, and the batches that were delivered again after a restart."""
    where = f"{side.label}, rank {rank}"
    if side.record.damage:
        damage = _shown(side.record.damage, max_chars=300)
        findings.differ(f"{where}: the ledger is damaged and was compared only up to there: {damage}")
    findings.notes += [f"{where}: {_shown(note, max_chars=300)}" for note in side.record.notes]
    # The first batch whose repeated delivery differs from its earlier delivery, or None.
    repetition = side.places.differing
    if repetition is not None:
        name = _shown(side.record.loaders[repetition.loader].name)
        place = f"epoch {epoch_text(repetition.epoch)}, position {repetition.position}"
        findings.differ(
            f"{where}, loader {name}: {place} was delivered again after a restart, and "
            f"{_MEANINGS[repetition.what]} (lines {repetition.first_line} and {repetition.line})",
            # Differences are sorted by epoch, position and visit (see `hetero.audit.history`). A `Repetition` does not
            # state its visit, so 0 puts it before the other differences at its position.
            (repetition.epoch, repetition.position, 0),
        )
    if side.places.num_repeated:
        findings.notes.append(
            f"{where}: {side.places.num_repeated:,} batches were delivered again; the last delivery counts"
        )


def _tables(side: Side) -> list[tuple[LoaderFacts, _Table]]:
    """Return each loader of one rank with its batches."""
    places = side.places
    found = []
    for number, facts in enumerate(side.record.loaders):
        chosen = places.entries["loader"] == number
        entries = places.entries[chosen]
        table = _Table(
            # The visit counts how often this epoch and position came before, see `hetero.audit.history`.
            keys=np.stack([entries["epoch"], entries["position"], places.visits[chosen]], axis=1),
            digests=(("indices", entries["indices"]), ("content", entries["content"])),
            lines=entries["line"],
        )
        found.append((facts, table))
    return found


def _global_tables(run: Run, findings: _Findings) -> list[tuple[LoaderFacts, _Table]]:
    """Return each loader of a run with its global batches. The world size may differ between batches.

    Raises:
        ConfigError: If the ledger of a rank is missing.
    """
    facts_of: dict[tuple[object, ...], tuple[int, LoaderFacts]] = {}
    parts = []
    for rank in sorted(run.ledgers):
        side = load_side(run, rank)
        _record_problems(side, rank, findings)
        absent = sorted(set(range(side.world_size)) - set(run.ledgers))
        if absent:
            raise ConfigError(
                f"{run.label} has no ledger of rank {listing(absent)}, and the world sizes of the runs differ\n"
                "  Then global batches are compared, which needs the ledgers of all ranks. Give the run's whole folder."
            )
        # Loaders have other numbers in each ledger. Number them in the same way for all ranks, by their identity.
        numbers = [facts_of.setdefault(facts.identity, (len(facts_of), facts))[0] for facts in side.record.loaders]
        entries = side.places.entries
        columns = [
            np.array(numbers, np.int64)[entries["loader"]],
            entries["epoch"],
            entries["position"],
            side.places.visits,
            np.full(len(entries), rank),
            side.places.world_sizes,
        ]
        parts.append((np.stack(columns, axis=1), entries["samples"]))
    rows = np.concatenate([part[0] for part in parts])
    samples = np.concatenate([part[1] for part in parts])
    # Sort by the first five columns: loader, epoch, position, visit and rank. np.lexsort expects the most important
    # column last, so 4::-1 reverses these columns.
    order = np.lexsort(rows[:, 4::-1].T)
    rows, samples = rows[order], samples[order]
    # Rows with the same loader, epoch, position and visit form a global batch. These four columns are its key. The last
    # column is the world size. `first_rows` has the first row of each global batch.
    batch_keys, world_sizes = rows[:, :4], rows[:, 5]
    # The slice is for runs without rows.
    first_rows = np.flatnonzero(np.append(True, (batch_keys[1:] != batch_keys[:-1]).any(axis=1))[: len(rows)])
    num_rows = np.diff(np.append(first_rows, len(rows)))
    # An entry counts only if its world size equals the world size of the lowest rank's entry. If a run restarts with
    # fewer ranks, old entries remain in the ledgers of the higher ranks.
    is_counted = world_sizes == np.repeat(world_sizes[first_rows], num_rows)
    samples = np.where(is_counted[:, None], samples, np.uint64(0))
    sums = np.add.reduceat(samples, first_rows, axis=0) if len(first_rows) else samples
    tables = []
    for number, facts in facts_of.values():
        is_of_loader = batch_keys[first_rows, 0] == number
        keys, digests = batch_keys[first_rows][is_of_loader, 1:], (("samples", sums[is_of_loader]),)
        tables.append((facts, _Table(keys=keys, digests=digests)))
    return tables


def _compare_loaders(
    where: str,
    loaders_a: list[tuple[LoaderFacts, _Table]],
    loaders_b: list[tuple[LoaderFacts, _Table]],
    findings: _Findings,
) -> None:
    """Compare the loaders of one rank, or the loaders of the whole run with their global batches.

    Args:
        where: The rank, for messages. Empty for the whole run.
        loaders_a: Loaders of run A with their batches.
        loaders_b: Loaders of run B with their batches.
        findings: Receives the differences and notes.
    """
    for index_a, index_b in _pairs([facts for facts, _ in loaders_a], [facts for facts, _ in loaders_b]):
        if index_a is None or index_b is None:
            # Only one run has the loader, so the index in the other run is None. ``or 0`` is for the type checker.
            label, (facts, table) = ("A", loaders_a[index_a]) if index_a is not None else ("B", loaders_b[index_b or 0])
            findings.differ(f"{where}only {label} has loader {_shown(facts.name)}, with {len(table.keys):,} batches")
            continue
        facts, table = loaders_a[index_a]
        name = f"loader {_shown(facts.name)}"
        for part in fields(LoaderFacts):
            one, other = getattr(facts, part.name), getattr(loaders_b[index_b][0], part.name)
            if part.name == "fingerprint" and (one is None) != (other is None):
                findings.notes.append(
                    f"{name}: {'A' if one is None else 'B'} has no fingerprint of the data set, because its ranks did "
                    "not build it (torch's workers did). The batches themselves were compared"
                )
            elif one != other:
                what = part.name.replace("_", " ")
                findings.notes.append(f"{name}: {what} is {_shown(one)} in A, {_shown(other)} in B")
        _compare_tables(f"{where}{name}", table, loaders_b[index_b][1], findings)


def _pairs(facts_a: Sequence[LoaderFacts], facts_b: Sequence[LoaderFacts]) -> Iterator[tuple[int | None, int | None]]:
    """Yield pairs of matching loaders: first by identity, then by name, each in the order of their first batches.

    A loader without a match is paired with None.
    """
    free_a, free_b = list(range(len(facts_a))), list(range(len(facts_b)))
    # The second round matches by name. So loaders whose seed or arguments differ are compared, and the difference
    # is reported.
    for alike in (operator.attrgetter("identity"), operator.attrgetter("name")):
        for index_a in list(free_a):
            index_b = next((number for number in free_b if alike(facts_b[number]) == alike(facts_a[index_a])), None)
            if index_b is not None:
                free_a.remove(index_a)
                free_b.remove(index_b)
                yield index_a, index_b
    yield from ((index_a, None) for index_a in free_a)
    yield from ((None, index_b) for index_b in free_b)


def _compare_tables(name: str, one: _Table, other: _Table, findings: _Findings) -> None:
    """Compare the batches of one loader in both runs."""
    # Compare the digests at the places that both runs have. `rows_a` and `rows_b` are the rows of these places.
    rows_a, rows_b = _common(one.keys, other.keys)
    findings.num_compared += len(rows_a)
    if not len(rows_a):
        findings.differ(f"{name}: the runs have no place in common: A has {_span(one)}, B has {_span(other)}")
        return
    # For each digest, which of these batches differ.
    differs_by_digest = {
        what: (values_a[rows_a] != values_b[rows_b]).any(axis=1)
        for (what, values_a), (_, values_b) in zip(one.digests, other.digests, strict=True)
    }
    differ = np.any(list(differs_by_digest.values()), axis=0)
    # Report the first difference. All later ones may follow from it.
    if differ.any():
        first = int(np.argmax(differ))
        what = next(what for what, differs in differs_by_digest.items() if differs[first])
        key = one.keys[rows_a[first]]
        # Global batches have no line numbers.
        lines = ""
        if one.lines is not None and other.lines is not None:
            lines = f" (line {one.lines[rows_a[first]]} of A, line {other.lines[rows_b[first]]} of B)"
        findings.differ(
            f"{name}: the first difference is at {_place(key)}: {_MEANINGS[what]}{lines}; "
            f"{int(differ.sum()):,} of {len(rows_a):,} batches differ",
            key,
        )
    # Report the places that only one run has.
    for label, table, common, counterpart in (("A", one, rows_a, "B"), ("B", other, rows_b, "A")):
        _record_unshared(name, label, table, common, counterpart, findings)


def _record_unshared(
    name: str, label: str, table: _Table, common: npt.NDArray[np.int64], counterpart: str, findings: _Findings
) -> None:
    """Record the places that only one run has: before the other run's start, in between, and after its end.

    Args:
        name: Name of the loader, for messages.
        label: The run with the places, ``A`` or ``B``.
        table: Batches of that run.
        common: Indices in ``table`` of the places that both runs have, sorted. Not empty.
        counterpart: The run that lacks the places.
        findings: Receives the differences and notes.
    """
    first, last = int(common[0]), int(common[-1])
    if first:
        findings.notes.append(
            f"{name}: {counterpart} starts at {_place(table.keys[first])}, as a resumed run does; {label} has "
            f"{first:,} batches before that, which were not compared"
        )
    between = np.setdiff1d(np.arange(first, last), common)
    if len(between):
        key = table.keys[between[0]]
        more = f" and {len(between) - 1:,} more" if len(between) > 1 else ""
        findings.differ(f"{name}: {counterpart} lacks {_place(key)}{more}, and continues after it", key)
    if last + 1 < len(table.keys):
        key = table.keys[last + 1]
        findings.differ(f"{name}: {counterpart} ends before {_place(key)}; {label} has {_span(table, last + 1)}", key)


def _common(
    one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the indices, in each of two sorted arrays, of the rows that both arrays have."""
    # View each row of three 8-byte numbers as one byte string. Big-endian byte strings sort like the numbers in them.
    texts = [np.ascontiguousarray(keys, dtype=">i8").view("S24").ravel() for keys in (one, other)]
    _, rows_of_one, rows_of_other = np.intersect1d(texts[0], texts[1], assume_unique=True, return_indices=True)
    return rows_of_one, rows_of_other


def _place(key: Sequence[Any]) -> str:
    """Return a place in words. A key has its epoch, position and visit."""
    again = f", time {int(key[2]) + 1}" if key[2] else ""
    return f"epoch {epoch_text(int(key[0]))}, position {int(key[1])}{again}"


def _span(table: _Table, start: int = 0) -> str:
    """Return in words how many batches a table has from a row on, and their first and last place."""
    count = len(table.keys) - start
    if not count:
        return "none"
    return f"{count:,} batches from {_place(table.keys[start])} to {_place(table.keys[-1])}"


def _shown(value: object, max_chars: int = 80) -> str:
    """Return a value from a ledger as printable text of limited length."""
    return printable(str(value), max_chars=max_chars)

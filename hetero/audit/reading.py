"""Reads ledgers: verifies the hash chain line by line, and keeps 80 bytes per batch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.audit.ledger import (
    CHAIN_START,
    FORMAT_VERSION,
    MAX_LINE_BYTES,
    LoaderFacts,
    chain_value,
    split_line,
)
from hetero.documents.records import MAX_ITEMS, decode
from hetero.documents.text import printable
from hetero.epochs import epoch_text
from hetero.errors import ConfigError

__all__ = ["ENTRY", "LedgerRecord", "Section", "read_ledger"]

ENTRY = np.dtype(
    [
        ("loader", "<i4"),
        ("section", "<i4"),
        ("epoch", "<i8"),
        ("position", "<i8"),
        ("line", "<i8"),
        ("indices", "<u8", (2,)),
        ("samples", "<u8", (2,)),
        ("content", "<u8", (2,)),
    ]
)
"""Type of a batch's entry. ``loader`` and ``section`` are indices into the lists of the `LedgerRecord`."""

_PACKED = struct.Struct("<iiqqq16s16s16s")
_DIGEST = re.compile("[0-9a-f]{32}")
_MAX_WORLD_SIZE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The part of a ledger that one process wrote."""

    rank: int
    world_size: int


@dataclass(slots=True, kw_only=True)
class LedgerRecord:
    """One rank's ledger."""

    path: Path
    sections: list[Section] = field(default_factory=list)
    loaders: list[LoaderFacts] = field(default_factory=list)
    """Loaders of all sections. Loaders with the same `LoaderFacts.identity` count as one."""
    entries: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, ENTRY))
    """Batches in the order of the file, of dtype `ENTRY`."""
    damage: str = ""
    """Reason why the rest of the file was not read. Empty if the whole file was read."""
    notes: list[str] = field(default_factory=list)
    """Further facts for the user."""
    has_end: bool = False
    """Whether the last process closed the ledger."""


class _DamagedError(Exception):
    """A line of the ledger is damaged or does not continue the hash chain."""


def read_ledger(path: Path) -> LedgerRecord:
    """Read a ledger up to its end, or up to the first damaged line.

    An incomplete last line is skipped and noted, because a process that is killed while it writes leaves one behind.

    Raises:
        ConfigError: If the file cannot be read, is not a ledger, or has another version.
    """
    reader = _Reader(path)
    try:
        with path.open("rb") as file:
            # A line that is too long comes in pieces, which are not valid lines.
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                reader.take(number, line)
    except _DamagedError as error:
        reader.record.damage = f"line {number} {error}"
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    return reader.finished()


class _Reader:
    """Verifies and collects the lines of one ledger, from first to last."""

    def __init__(self, path: Path) -> None:
        self.record = LedgerRecord(path=path)
        self._chain = CHAIN_START
        """Chain value of the last line that was read."""
        self._packed = bytearray()
        """The batches so far, each as one entry of dtype `ENTRY`."""
        self._loaders: list[int] = []
        """For each loader of the current section, its index in `LedgerRecord.loaders`."""
        self._indices: dict[tuple[str, ...], int] = {}
        """Index in `LedgerRecord.loaders` by the identity of a loader."""
        self._num_batches = 0
        """Batches of the current section."""

    def take(self, number: int, line: bytes) -> None:
        """Check that a line continues the chain of hashes, and record what it says."""
        # A line that is too long comes in pieces without a line end. They are damage, and not an incomplete last line.
        if not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
            self.record.notes.append("its last line is incomplete: the process was killed while it wrote")
            if number == 1:
                raise ConfigError(f"{self.record.path} is not a ledger, or was cut off in its first line")
            return
        parts = split_line(line[:-1])
        if parts is None:
            raise _DamagedError("is not a line of a ledger")
        body, value = parts
        self._chain = chain_value(self._chain, body)
        if self._chain != value:
            raise _DamagedError("does not follow from the lines before it: some were changed, removed or inserted")
        # The chain value was the last key of the JSON object, so only the closing bracket is missing.
        self._interpret(number, body + b"}")

    def finished(self) -> LedgerRecord:
        """Return the record of the ledger. Call this after the last line.

        Raises:
            ConfigError: If the file is not a ledger.
        """
        record = self.record
        if not record.sections:
            raise ConfigError(
                f"{record.path} is not a ledger: {record.damage or 'it is empty'}\n"
                "  Give a file that a rank of a run with --audit has written."
            )
        # numpy cannot make an array from an empty buffer.
        if self._packed:
            record.entries = np.frombuffer(self._packed, ENTRY)
        if not record.has_end and not record.damage:
            record.notes.append("it has no end: the process was killed, still runs, or the file was cut off")
        return record

    def _interpret(self, number: int, text: bytes) -> None:
        """Record what a line contains: the beginning of a section, a loader, a batch or an end."""
        try:
            entry = json.loads(text)
        # Thousands of open brackets raise RecursionError.
        except (ValueError, RecursionError):
            raise _DamagedError("is not JSON") from None
        # A restarted process appends to the ledger, so lines may follow an end.
        self.record.has_end = False
        if "batch" in entry:
            self._take_batch(number, entry)
        elif "loader" in entry:
            self._take_loader(entry)
        elif "skip" in entry:
            count, epoch, position = (_whole(entry, name) for name in ("skip", "epoch", "position"))
            self.record.notes.append(
                f"the script skipped {count} batches of loader {printable(str(entry.get('name')))[:200]} before "
                f"position {position} of epoch {epoch_text(epoch)}"
            )
        elif "ledger" in entry:
            self._take_beginning(entry)
        elif "end" in entry:
            self.record.has_end = True
            if _whole(entry, "end") != self._num_batches:
                raise _DamagedError(f"states that {entry['end']} batches precede it, found {self._num_batches}")
        else:
            raise _DamagedError("is of an unknown kind")

    def _take_beginning(self, entry: Mapping[str, Any]) -> None:
        """Begin a section. A process writes this line when it opens the ledger."""
        if entry["ledger"] != FORMAT_VERSION:
            raise _DamagedError(f"has version {entry['ledger']!r:.20}, this hetero reads {FORMAT_VERSION}")
        section = Section(rank=_whole(entry, "rank"), world_size=_whole(entry, "world_size"))
        # Bound the world size. A size of 10**12 would take all memory, because ranks are listed.
        if not section.rank < section.world_size <= _MAX_WORLD_SIZE:
            raise _DamagedError(f"is of rank {section.rank} of {section.world_size}")
        sections = self.record.sections
        if sections and sections[0].rank != section.rank:
            raise _DamagedError(f"is of rank {section.rank}, the lines before are of rank {sections[0].rank}")
        sections.append(section)
        # Each process numbers its loaders from 0.
        self._loaders.clear()
        self._num_batches = 0

    def _take_loader(self, entry: Mapping[str, Any]) -> None:
        """Record a loader. The lines of its batches state its number, which is its place in the section."""
        # A damaged or forged ledger may describe any number of loaders, so bound it.
        if _whole(entry, "loader") != len(self._loaders) or len(self._loaders) >= MAX_ITEMS:
            raise _DamagedError(f"is of loader {entry['loader']!r:.20}, expected {len(self._loaders)}")
        try:
            facts = decode(LoaderFacts, {part.name: entry.get(part.name) for part in fields(LoaderFacts)})
        except ConfigError as error:
            raise _DamagedError(f"is wrong at {error}") from None
        # A loader that an earlier process had too gets the same index.
        index = self._indices.setdefault(facts.identity, len(self.record.loaders))
        if index == len(self.record.loaders):
            self.record.loaders.append(facts)
        elif self.record.loaders[index].fingerprint != facts.fingerprint:
            self.record.notes.append(f"the data set of loader {facts.name} changed: its fingerprint differs")
        self._loaders.append(index)

    def _take_batch(self, number: int, entry: Mapping[str, Any]) -> None:
        """Record a batch in packed form."""
        loader = _whole(entry, "batch")
        if loader >= len(self._loaders):
            raise _DamagedError(f"is of loader {loader}, but no earlier line describes that loader")
        # A packed entry takes 80 bytes. Python objects would take many times as much.
        self._packed += _PACKED.pack(
            self._loaders[loader],
            len(self.record.sections) - 1,
            _whole(entry, "epoch"),
            _whole(entry, "position"),
            number,
            _digest(entry, "indices"),
            _digest(entry, "samples"),
            _digest(entry, "content"),
        )
        self._num_batches += 1


# Lines of batches are checked value by value, because a ledger may have millions of them.


def _whole(entry: Mapping[str, Any], name: str) -> int:
    """Return a whole number of a line, or raise `_DamagedError`."""
    value = entry.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise _DamagedError(f"has {name} {value!r:.40}, expected a whole number")
    return value


def _digest(entry: Mapping[str, Any], name: str) -> bytes:
    """Return a digest of a line, or raise `_DamagedError`."""
    value = entry.get(name)
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _DamagedError(f"has {name} {value!r:.40}, expected 32 hexadecimal digits")
    return bytes.fromhex(value)

"""Finds the ledgers of a run in its folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hetero.audit.history import Places, settle
from hetero.audit.reading import LedgerRecord, read_ledger
from hetero.errors import ConfigError

__all__ = ["Run", "Side", "find_run", "load_side"]

_NAME = re.compile(r"ledger-rank-(\d{1,7})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One of the two runs that are compared."""

    label: str
    """``A`` or ``B``."""
    path: Path
    """Path that the user gave."""
    ledgers: dict[int, Path]
    """Path of the ledger of each rank."""
    is_file: bool
    """Whether the user gave a single ledger and not a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One rank's ledger of one run."""

    label: str
    record: LedgerRecord
    places: Places

    @property
    def world_size(self) -> int:
        """World size of the last process that wrote the ledger."""
        return self.record.sections[-1].world_size


def find_run(label: str, path: Path) -> Run:
    """Return the run at a path: a single ledger, or a folder that contains the ledgers of one run at any depth.

    Raises:
        ConfigError: If the path lacks a ledger, or has two ledgers of one rank.
    """
    if path.is_file():
        rank = read_ledger(path).sections[0].rank
        return Run(label=label, path=path, ledgers={rank: path}, is_file=True)
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; give a run's folder, or one of its ledgers")
    ledgers: dict[int, Path] = {}
    # `os.walk` follows no links. This is needed, because the links in a simulated host's channels lead to whole data
    # sets.
    for folder, _, names in os.walk(path):
        for name in names:
            found = _NAME.fullmatch(name)
            if found is None:
                continue
            rank, ledger = int(found[1]), Path(folder) / name
            if rank in ledgers:
                raise ConfigError(
                    f"{path} contains two ledgers of rank {rank}\n    {ledgers[rank]}\n    {ledger}\n"
                    "  Give the folder of one run."
                )
            ledgers[rank] = ledger
    if not ledgers:
        raise ConfigError(
            f"{path} contains no ledger\n"
            "  A run writes ledgers with --audit, or with HETERO_AUDIT_DIR=DIR in the environment."
        )
    return Run(label=label, path=path, ledgers=ledgers, is_file=False)


def load_side(run: Run, rank: int) -> Side:
    """Read one rank's ledger.

    Raises:
        ConfigError: If the ledger cannot be read, or belongs to another rank.
    """
    record = read_ledger(run.ledgers[rank])
    # `find_run` takes the rank from the name of the file, which the user may have changed.
    if record.sections[0].rank != rank:
        raise ConfigError(f"{record.path} belongs to rank {record.sections[0].rank}, but its name states rank {rank}")
    return Side(label=run.label, record=record, places=settle(record))

"""A number with its unit, and whether it was measured, simulated or computed. Reports, profiles and plans use it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero.documents.records import limits

__all__ = ["BASES", "Figure"]

BASES = ("measured", "simulated", "modelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that is derived from observations, with its unit and basis."""

    value: float = field(metadata=limits(minimum=-(2.0**63)))
    unit: str
    basis: str = field(metadata=limits(choices=BASES))
    """``measured`` on this hardware, ``simulated`` (measured with an emulated part), or ``modelled`` (computed)."""

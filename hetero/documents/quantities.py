"""Texts of numbers with their unit, for tables that people read. An unknown value is a dash."""

from __future__ import annotations

__all__ = ["GIB", "NOT_KNOWN", "bytes_text", "number_text", "seconds_text"]

NOT_KNOWN = "-"
GIB = 2**30
"""Bytes."""


def seconds_text(value: float | None) -> str:
    """Return a duration in milliseconds below 10 s, otherwise in seconds, with about three digits."""
    if value is None:
        return NOT_KNOWN
    # Change the form a little before 100 ms and 10 s, because a value just below would be rounded up to 100.0 ms or
    # 10000 ms.
    if value < 0.0995:
        return f"{1000 * value:.1f} ms"
    if value < 9.95:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s"


def number_text(value: float | None) -> str:
    """Return a number, with a decimal place below 100 and with separators of thousands."""
    if value is None:
        return NOT_KNOWN
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def bytes_text(value: float | None) -> str:
    """Return a size in kB, MB or GB, which are powers of 1000."""
    if value is None:
        return NOT_KNOWN
    if value < 1e7:
        return f"{value / 1e3:,.0f} kB"
    return f"{value / 1e6:,.0f} MB" if value < 1e10 else f"{value / 1e9:,.1f} GB"

"""Tables that are readable both as plain text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MAX_ROWS", "markdown_table"]

MAX_ROWS = 100
"""Rows that a table for people has at most. A file beside it has all."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return a Markdown table with every cell padded to the width of its column.

    Args:
        header: Column titles.
        rows: Cells of each row, already escaped. Each row has one cell per title.
        right: Indices of right-aligned columns.

    Returns:
        The lines of the table, without a final newline.
    """
    widths = [max(3, *(len(row[i]) for row in [header, *rows])) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    # A colon at the end of its dashes aligns a column to the right. Markdown needs three dashes at least.
    rule = (f"{'-' * (w + 1)}:" if i in right else "-" * (w + 2) for i, w in enumerate(widths))
    return "\n".join([line(header), f"|{'|'.join(rule)}|", *(line(row) for row in rows)])

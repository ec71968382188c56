"""Reports: tables in Markdown, and figures that were asked for, met or MISSED."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from harness.trials import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    title: str
    metric: str
    """Attribute or fact of `Run`."""
    form: str = "{:,.2f}"
    scale: float = 1.0


_SHARED = {
    column.metric: column
    for column in (
        Column(title="batches/s", metric="batches_per_s"),
        Column(title="samples/s", metric="samples_per_s", form="{:,.1f}"),
        Column(title="GB/s", metric="gb_per_s", form="{:.3f}"),
        Column(title="trainer CPU-s/GB", metric="trainer_cpu_s_per_gb"),
        Column(title="supply CPU-s/GB", metric="supply_cpu_s_per_gb"),
        Column(title="trainer peak MB", metric="trainer_peak_bytes", form="{:,.0f}", scale=1e-6),
        Column(title="trainer growth MB", metric="trainer_growth_bytes", form="{:,.1f}", scale=1e-6),
        Column(title="first batch s", metric="first_batch_s"),
    )
}


def columns(*wanted: str | Column) -> tuple[Column, ...]:
    """Return columns. Columns that several benchmarks use are given by the name of their metric."""
    return tuple(_SHARED[column] if isinstance(column, str) else column for column in wanted)


def report(
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column],
    figures: Callable[[Sequence[Row]], Sequence[str]] = lambda members: (),
    *,
    ratio_metric: str,
    references: Collection[str] = (),
) -> str:
    """Return a table for each group of rows.

    Args:
        title: Of the whole.
        rows: Of any groups.
        columns: See `table`.
        figures: Gives the lines below the table of a group.
        ratio_metric: See `table`.
        references: See `table`.
    """
    lines = [f"# {title}"]
    for group, members in grouped(rows).items():
        lines += ["", f"## {group}"] if group else []
        lines += ["", table(members, columns, ratio_metric=ratio_metric, references=references)]
        below = figures(members)
        lines += ["", *below] if below else []
    return "\n".join(lines)


def table(
    rows: Sequence[Row], columns: Sequence[Column], *, ratio_metric: str, references: Collection[str] = ()
) -> str:
    """Return rows of one group as Markdown: medians, spread, and ratios of one metric to each other row.

    Args:
        rows: Rows of one group.
        columns: Columns to show.
        ratio_metric: Metric of the ratios. Higher is better. The table shows its spread too.
        references: The row with one of these names is in the numerator of the ratios, ``x reference / row``. Without
            such a row the table lacks the ratio column.
    """
    base = next((row for row in rows if row.trial.name in references), None)
    ratio_titles = [f"{base.trial.name} / this"] if base else []
    titles = ["", *(column.title for column in columns), "spread", *ratio_titles, "basis"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        if not row.runs:
            lines.append(f"| {row.trial.name} | failed: {row.error.splitlines()[0][:200] if row.error else ''} |")
            continue
        cells = [row.trial.name + (f" ({len(row.runs)} runs, then failed)" if row.error else "")]
        cells += [column.form.format(row.median(column.metric) * column.scale) for column in columns]
        cells.append(f"{100 * row.spread(ratio_metric):.0f} %")
        if base is not None:
            found = base.over(row, ratio_metric)
            cells.append("" if math.isnan(found) else f"{found:.2f}")
        cells.append(row.trial.basis)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by group, in the order of their first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.trial.group, []).append(row)
    return groups


def ratio(rows: Sequence[Row], name: str, other: str, metric: str) -> float:
    """Return the ratio of one name to another, see `Row.over`. NaN if one of them has not run."""
    found = {row.trial.name: row for row in rows}
    return found[name].over(found[other], metric) if name in found and other in found else float("nan")


def target(what: str, found: float, bound: float, *, at_most: bool = False) -> str:
    """Return one line that says whether a figure is met."""
    if math.isnan(found):
        return f"- {what}: not measured"
    met = found <= bound if at_most else found >= bound
    shown = f"{found:,.1f}" if abs(bound) >= 10 else f"{found:.3f}"
    return (
        f"- {what}: {shown}, {'at most' if at_most else 'at least'} {bound:g} wanted: {'met' if met else '**MISSED**'}"
    )

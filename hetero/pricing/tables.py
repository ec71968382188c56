"""Tables that are readable both as plain text and as Markdown, and the output of ``hetero prices``."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.pricing.catalog import Catalogue, InstanceTypeInfo

__all__ = ["list_text", "markdown_table", "show_text"]

_NOT_KNOWN = "-"


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

    rule = (f"{'-' * (w + 1)}:" if i in right else "-" * (w + 2) for i, w in enumerate(widths))
    return "\n".join([line(header), f"|{'|'.join(rule)}|", *(line(row) for row in rows)])


def list_text(catalogue: Catalogue) -> str:
    """Return the catalogue as a table, for ``hetero prices list``."""
    header = ("instance type", "USD/hour", "vCPU", "memory GiB", "accelerators", "network Gbit/s", "price as of")
    rows = [
        (
            info.instance_type,
            _number(info.hourly_usd),
            _number(info.vcpus),
            _number(info.memory_gib),
            _accelerators(info),
            _number(info.network_gbps),
            (info.price and info.price.as_of) or _NOT_KNOWN,
        )
        for info in catalogue.types()
    ]
    table = markdown_table(header, rows, right=(1, 2, 3, 5))
    num_priced = sum(info.price is not None for info in catalogue.types())
    return f"{table}\n\n{num_priced} of {len(rows)} types have a price. {_HOW_TO_PRICE}\n"


def show_text(catalogue: Catalogue, instance_type: str) -> str:
    """Return all facts about one type, for ``hetero prices show``.

    Raises:
        ConfigError: If the type is unknown. The message lists the closest known names.
    """
    info = catalogue.get(instance_type)
    lines = [
        f"{info.instance_type}",
        f"  vCPU          {_number(info.vcpus)}",
        f"  memory        {_number(info.memory_gib)} GiB",
        f"  accelerators  {_accelerators(info)}",
        f"  network       {_number(info.network_gbps)} Gbit/s sustained",
        f"  local NVMe    {_storage(info)}",
        f"  facts         {info.source}, {info.as_of or 'no date'}",
    ]
    if info.price is None:
        lines.append(f"  price         {catalogue.explain(instance_type)}")
    else:
        where = f" in {info.price.region}" if info.price.region else ""
        lines.append(f"  price         {_number(info.hourly_usd)} USD/hour{where}")
        lines.append(f"  price from    {info.price.source}, {info.price.as_of or 'no date'}")
    return "\n".join(lines) + "\n"


_HOW_TO_PRICE = "Give prices with --price TYPE=USD, --price-file FILE or --price-profile NAME."


def _accelerators(info: InstanceTypeInfo) -> str:
    if info.num_accelerators is None:
        return _NOT_KNOWN
    return f"{info.num_accelerators} x {info.accelerator}" if info.num_accelerators else "none"


def _storage(info: InstanceTypeInfo) -> str:
    return "none" if info.instance_storage_gb == 0 else f"{_number(info.instance_storage_gb)} GB"


def _number(value: float | None) -> str:
    return _NOT_KNOWN if value is None else f"{value:.10g}"

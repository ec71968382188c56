"""The output of ``hetero prices``."""

from __future__ import annotations

from hetero.documents.quantities import NOT_KNOWN
from hetero.documents.tables import markdown_table
from hetero.pricing.catalog import Catalogue
from hetero.pricing.instance_types import FactSource, InstanceTypeInfo

__all__ = ["list_text", "show_text"]


def list_text(catalogue: Catalogue) -> str:
    """Return the catalogue as a table, for ``hetero prices list``."""
    header = ("instance type", "USD/hour", "vCPU", "memory GiB", "accelerators", "Gbit/s", "at most", "price as of")
    rows = [
        (
            info.instance_type,
            _number(info.hourly_usd),
            _number(info.vcpus),
            _number(info.memory_gib),
            _accelerators(info),
            _number(info.network_baseline_gbps),
            _number(info.network_burst_gbps or info.network_limit_gbps),
            (info.price and info.price.as_of) or NOT_KNOWN,
        )
        for info in catalogue.types()
    ]
    table = markdown_table(header, rows, right=(1, 2, 3, 5, 6))
    num_priced = sum(info.price is not None for info in catalogue.types())
    return f"{table}\n\n{num_priced} of {len(rows)} types have a price. {_HOW_TO_PRICE}\n"


def show_text(catalogue: Catalogue, instance_type: str) -> str:
    """Return all facts about one type and their sources, for ``hetero prices show``.

    Raises:
        ConfigError: If the type is unknown. The message lists the closest known names.
    """
    info = catalogue.get(instance_type)
    lines = [
        f"{info.instance_type}",
        f"  vCPU          {_vcpus(info)}",
        f"  processor     {_processor(info)}",
        f"  memory        {_memory(info)}",
        f"  accelerators  {_accelerators(info)}{_accelerator_memory(info)}",
        f"  network       {_network(info)}",
        f"  local NVMe    {_storage(info)}",
    ]
    if info.price is None:
        lines.append(f"  price         {catalogue.explain(instance_type)}")
    else:
        where = f" in {info.price.region}" if info.price.region else ""
        lines.append(f"  price         {_number(info.hourly_usd)} USD/hour{where}")
        lines.append(f"  price from    {info.price.source}, {info.price.as_of or 'no date'}")
    return "\n".join([*lines, *_source_lines(info)]) + "\n"


_HOW_TO_PRICE = "Give prices with --price TYPE=USD, --price-file FILE or --price-profile NAME."


def _accelerators(info: InstanceTypeInfo) -> str:
    """Return number and name of the accelerators, such as ``8 x NVIDIA A100``."""
    if info.num_accelerators is None:
        return NOT_KNOWN
    if not info.num_accelerators:
        return "none"
    return f"{info.num_accelerators} x {info.accelerator or 'not known'}"


def _vcpus(info: InstanceTypeInfo) -> str:
    """Return the number of vCPUs and their limits, such as ``4, two per core, 40 % of each sustained``."""
    threads = {1: ", each a core", 2: ", two per core"}.get(info.threads_per_core or 0, "")
    limit = f", {info.cpu_baseline_percent} % of each sustained" if info.cpu_baseline_percent is not None else ""
    return f"{_number(info.vcpus)}{threads}{limit}"


def _processor(info: InstanceTypeInfo) -> str:
    clock = f", {_number(info.clock_ghz)} GHz" if info.clock_ghz is not None else ""
    return f"{info.processor or NOT_KNOWN}{clock}"


def _memory(info: InstanceTypeInfo) -> str:
    technology = f", {info.memory_technology}" if info.memory_technology else ""
    return NOT_KNOWN if info.memory_gib is None else f"{_number(info.memory_gib)} GiB{technology}"


def _accelerator_memory(info: InstanceTypeInfo) -> str:
    if info.accelerator_memory_gib is None:
        return ""
    return f" with {_number(info.accelerator_memory_gib)} GiB{' each' if info.num_accelerators != 1 else ''}"


def _network(info: InstanceTypeInfo) -> str:
    """Return the bandwidth. Mention bursts only if they differ from it, and cards only if there are several."""
    if info.network_limit_gbps is not None:
        return f"at most {_number(info.network_limit_gbps)} Gbit/s"
    if info.network_baseline_gbps is None:
        return NOT_KNOWN
    text = f"{_number(info.network_baseline_gbps)} Gbit/s sustained"
    if info.network_burst_gbps not in (None, info.network_baseline_gbps):
        text += f", {_number(info.network_burst_gbps)} Gbit/s in bursts"
    if info.num_network_cards is not None and info.num_network_cards > 1:
        text += f", on {info.num_network_cards} cards, the first with {_number(info.network_card_gbps)} Gbit/s"
    return text


def _source_lines(info: InstanceTypeInfo) -> list[str]:
    """Return one entry for each source of the facts, with the groups of facts that it states."""
    groups: dict[FactSource, list[str]] = {}
    for group, source in info.sources.items():
        groups.setdefault(source, []).append(group.replace("_", " "))
    lines = ["  sources of the facts"] if groups else []
    for source, names in groups.items():
        lines.append(f"    {', '.join(names)}: {source.title}, {source.as_of or 'date not recorded'}")
        lines.append(f"      {source.url}")
    return lines


def _storage(info: InstanceTypeInfo) -> str:
    if info.instance_storage_gb is None:
        return NOT_KNOWN
    return f"{_number(info.instance_storage_gb)} GB" if info.instance_storage_gb else "none"


def _number(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.10g}"

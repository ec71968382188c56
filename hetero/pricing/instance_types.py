"""An instance type: its facts, each with its source, and its price. Reads the shipped facts.

There is a file of facts for each cloud, ``data/instance_types*.json``. A file lists its sources, each under a key, and
has a default source for each group of facts, for example ``network``. If a group of a row has another source, the row
states the key of that source. A row leaves out the facts that no source states.

A source has its address and its date. For most guides, only the year is recorded. For the SageMaker API and the guide
to previous generations, no date is recorded. Where sources contradict each other, the file follows one source:

* ml.trn2.48xlarge has 96 GiB per accelerator (Neuron documentation), not 512 GiB (EC2 API).
* ml.p3.8xlarge and ml.p3.16xlarge have cards of 10 and 25 Gbit/s (EC2 Instance Types guide), not 5 Gbit/s (EC2 API).
  The API no longer lists ml.p3, so its other facts are from an older record of the API.
* M5 has one processor (guide), not two generations (AWS's product page).
* Azure's page of NDm_A100_v4 states the memory of one accelerator, other pages state the sum of all. The file has 80 GB
  for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

__all__ = [
    "FACT_GROUPS",
    "FactSource",
    "InstanceTypeInfo",
    "Price",
    "data_folder",
    "family_of",
    "shipped_types",
    "stated_resources",
]

_FILES = ("instance_types.json", "instance_types_google.json", "instance_types_azure.json")
_RESOURCES = re.compile(r"(?P<kind>CPU|GPU):(?P<number>[1-9][0-9]{0,3})")
_FAMILIES = (
    re.compile(r"(?:ml\.)?([a-z0-9-]+)\..+"),  # ml.c5.xlarge
    re.compile(r"([a-z]{1,2}[0-9]+[a-z]?)-[a-z].*"),  # n2-highcpu-32
    re.compile(r"Standard_([A-Z]+)[0-9]+(?:-[0-9]+)?([a-z]*(?:_.+)?)"),  # Standard_F32s_v2
)

FACT_GROUPS: Mapping[str, tuple[str, ...]] = {
    "offer": ("instance_type",),
    "hardware": (
        "vcpus",
        "threads_per_core",
        "clock_ghz",
        "memory_gib",
        "num_accelerators",
        "accelerator",
        "instance_storage_gb",
    ),
    "processor": ("processor",),
    "cpu_baseline": ("cpu_baseline_percent",),
    "memory_technology": ("memory_technology",),
    "accelerator_memory": ("accelerator_memory_gib",),
    "network": (
        "network_baseline_gbps",
        "network_burst_gbps",
        "network_limit_gbps",
        "num_network_cards",
        "network_card_gbps",
    ),
}
"""Fields of `InstanceTypeInfo` by group. The facts of a group have one source. ``offer`` is the fact that SageMaker
trains on the type, or that its cloud has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSource:
    """The document that states a group of facts."""

    title: str
    url: str
    as_of: str | None
    """ISO date or year of the facts. None if it is not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of an instance type and its source."""

    hourly_usd: float
    """USD per instance and hour, in (0, 1000)."""
    region: str | None = None
    as_of: str | None = None
    """ISO date or year of the price. None if the source states no date."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTypeInfo:
    """Facts about one instance type. None: no source states the fact."""

    instance_type: str
    vcpus: int | None = None
    threads_per_core: int | None = None
    """2 if a vCPU is one of a core's two hyper-threads, 1 if a vCPU is a whole core."""
    cpu_baseline_percent: int | None = None
    """Share of each vCPU that a burstable or flex type may use without end, in percent. None if AWS states no limit."""
    clock_ghz: float | None = None
    """Sustained clock of the processor."""
    processor: str | None = None
    """Name of the processor, as AWS's guide states it. AWS may run a family on a second processor too."""
    memory_gib: float | None = None
    memory_technology: str | None = None
    """Kind and rate of the memory in MT/s, for example ``DDR5-7200``."""
    num_accelerators: int | None = None
    accelerator: str | None = None
    """Name of the accelerator, such as ``NVIDIA A100`` or ``AWS Trainium``."""
    accelerator_memory_gib: float | None = None
    """Memory of each accelerator."""
    network_baseline_gbps: float | None = None
    """Sustained bandwidth in each direction, in Gbit/s, of all network cards together."""
    network_burst_gbps: float | None = None
    """Bandwidth in each direction while the host has network credits, in Gbit/s. At least the sustained bandwidth. A
    burst lasts 5 to 60 minutes, and AWS does not guarantee it."""
    network_limit_gbps: float | None = None
    """Upper limit of a host's bandwidth, in Gbit/s. Google Cloud and Azure state this limit instead of the sustained
    bandwidth, and do not guarantee it."""
    num_network_cards: int | None = None
    network_card_gbps: float | None = None
    """Sustained bandwidth of the first network card, in Gbit/s. An address belongs to one card, so a host that has one
    address reaches at most this. The other cards serve EFA or more addresses."""
    instance_storage_gb: int | None = None
    """Size of the local NVMe storage. 0 if all storage is EBS."""
    sources: Mapping[str, FactSource] = field(default_factory=dict, hash=False)
    """Source of each group in `FACT_GROUPS` that has a known fact."""
    price: Price | None = None

    @property
    def hourly_usd(self) -> float | None:
        """USD per instance and hour, or None without a price."""
        return self.price.hourly_usd if self.price else None


def data_folder() -> Any:
    """Return the folder of the shipped facts and price profiles."""
    return resources.files("hetero.pricing").joinpath("data")


def shipped_types() -> dict[str, InstanceTypeInfo]:
    """Return the shipped instance types by name, in the order of the files: SageMaker, Google Cloud, Azure.

    A file has CPU types first, by family, then size.
    """
    infos: dict[str, InstanceTypeInfo] = {}
    for name in _FILES:
        document = json.loads(data_folder().joinpath(name).read_text(encoding="utf-8"))
        sources = {key: FactSource(**source) for key, source in document["sources"].items()}
        rows = (_parse_row(row, sources, document["default_sources"]) for row in document["instances"])
        infos.update((info.instance_type, info) for info in rows)
    return infos


def stated_resources(instance_type: str) -> InstanceTypeInfo | None:
    """Return what ``CPU:16`` or ``GPU:8`` states about a host. None if the text is the name of a type.

    ``CPU:16`` is a host with 16 vCPUs and no accelerators. ``GPU:8`` is a host with 8 accelerators.
    """
    found = _RESOURCES.fullmatch(instance_type)
    if found is None:
        return None
    number = int(found["number"])
    if found["kind"] == "GPU":
        return InstanceTypeInfo(instance_type=instance_type, num_accelerators=number)
    return InstanceTypeInfo(instance_type=instance_type, vcpus=number, num_accelerators=0)


def family_of(instance_type: str) -> str:
    """Return the family of an instance type. Other names are their own family.

    The family is ``c5`` for ``ml.c5.xlarge``, ``n2`` for ``n2-highcpu-32``, and ``Fs_v2`` for ``Standard_F32s_v2``.
    """
    found = next((match for family in _FAMILIES if (match := family.fullmatch(instance_type))), None)
    # The pattern of Azure's names has two groups, because the size is in the middle of the family: F, 32, s_v2.
    return "".join(found.groups()) if found else instance_type


def _parse_row(row: dict[str, Any], sources: Mapping[str, FactSource], defaults: Mapping[str, str]) -> InstanceTypeInfo:
    """Return the facts of one row of a file.

    Args:
        row: The facts by name. Its entry ``sources`` has the key of the source of each group of facts whose source is
            not the default.
        sources: The sources of the file by key.
        defaults: Key of the default source of each group.
    """
    keys = {**defaults, **row["sources"]}
    # A group without a known fact lacks a source.
    stated = {group: sources[keys[group]] for group, names in FACT_GROUPS.items() if not row.keys().isdisjoint(names)}
    return InstanceTypeInfo(**{**row, "sources": stated})

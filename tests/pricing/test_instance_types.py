"""The shipped facts: each has a source, and none is implausible."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from hetero.pricing import Catalogue, InstanceTypeInfo
from hetero.pricing.instance_types import FACT_GROUPS, data_folder, shipped_types

DOCUMENTS: dict[str, dict[str, Any]] = {
    name: json.loads(data_folder().joinpath(name).read_text(encoding="utf-8"))
    for name in ("instance_types.json", "instance_types_google.json", "instance_types_azure.json")
}
DOCUMENT = DOCUMENTS["instance_types.json"]
FACTS = {field.name for field in dataclasses.fields(InstanceTypeInfo)} - {"sources", "price"}
X86 = re.compile(r"(2nd Gen )?(Intel|AMD) ")


def sagemaker_types() -> list[InstanceTypeInfo]:
    return [info for info in Catalogue.load().types() if info.instance_type.startswith("ml.")]


def test_groups_hold_every_fact_once() -> None:
    names = [name for group in FACT_GROUPS.values() for name in group]
    assert len(names) == len(set(names))
    assert set(names) == FACTS


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sources_are_complete_and_each_is_used(name: str) -> None:
    document = DOCUMENTS[name]
    for key, source in document["sources"].items():
        assert set(source) == {"title", "url", "as_of"}, key
        assert source["title"], key
        assert source["url"].startswith("https://"), key
        assert source["as_of"] is None or re.fullmatch(r"20\d\d(-\d\d-\d\d)?", source["as_of"]), key
    named = set(document["default_sources"].values()).union(*(row["sources"].values() for row in document["instances"]))
    assert named == set(document["sources"])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_rows_state_only_facts_and_name_sources_only_for_them(name: str) -> None:
    for row in DOCUMENTS[name]["instances"]:
        facts = row.keys() - {"sources"}
        assert facts <= FACTS, row
        assert None not in row.values(), f"{row['instance_type']}: leave an unknown fact out"
        for group in row["sources"]:
            assert not facts.isdisjoint(FACT_GROUPS[group]), row


def test_every_fact_has_a_source() -> None:
    for info in shipped_types().values():
        for group, names in FACT_GROUPS.items():
            is_known = any(getattr(info, name) is not None for name in names)
            assert is_known == (group in info.sources), (info.instance_type, group)


def test_types_are_in_the_order_of_family_and_size() -> None:
    named = {"medium": 0.25, "large": 0.5, "xlarge": 1.0}

    def position(info: InstanceTypeInfo) -> tuple[bool, str, float]:
        family, _, size = info.instance_type.rpartition(".")
        return bool(info.num_accelerators), family, named.get(size) or float(size.removesuffix("xlarge"))

    positions = [position(info) for info in sagemaker_types()]
    assert positions == sorted(positions)
    assert len(set(positions)) == len(DOCUMENT["instances"])


def test_hardware_is_plausible() -> None:
    for info in sagemaker_types():
        assert info.vcpus in range(2, 385), info
        assert info.threads_per_core in (1, 2), info
        assert info.processor is not None
        assert X86.match(info.processor), info
        assert info.clock_ghz is not None
        assert 2 <= info.clock_ghz <= 4, info
        assert info.memory_gib is not None
        assert 1.6 <= info.memory_gib / info.vcpus <= 22, info
        assert info.memory_technology is None or re.fullmatch(r"DDR\d-\d{4}", info.memory_technology), info
        assert info.instance_storage_gb is not None
        assert info.instance_storage_gb == 0 or 75 <= info.instance_storage_gb <= 30_400, info


def test_cpu_baseline_is_known_for_burstable_and_flex_types_only() -> None:
    for info in sagemaker_types():
        is_limited = re.match(r"ml\.(t\d|.*-flex\.)", info.instance_type) is not None
        assert (info.cpu_baseline_percent is not None) == is_limited, info
        assert info.cpu_baseline_percent is None or 20 <= info.cpu_baseline_percent <= 40, info


def test_accelerators_have_a_count_a_name_and_memory_together() -> None:
    for info in sagemaker_types():
        assert info.num_accelerators is not None
        assert (info.num_accelerators > 0) == (info.accelerator is not None), info
        assert (info.num_accelerators > 0) == (info.accelerator_memory_gib is not None), info
        assert info.accelerator_memory_gib is None or 16 <= info.accelerator_memory_gib <= 269, info


def test_network_burst_is_at_least_the_baseline_and_the_card_at_most() -> None:
    for info in sagemaker_types():
        assert info.network_baseline_gbps is not None
        assert info.network_burst_gbps is not None
        assert info.network_card_gbps is not None
        assert info.num_network_cards in range(1, 33), info
        assert 0.2 <= info.network_baseline_gbps <= info.network_burst_gbps <= 6400, info
        if info.num_network_cards == 1:
            assert info.network_card_gbps == info.network_baseline_gbps, info
        else:
            assert info.network_card_gbps <= 400, info
            assert info.network_burst_gbps == info.network_baseline_gbps, info  # only small types have credits


@pytest.mark.parametrize(
    ("name", "baseline_gbps", "burst_gbps", "num_cards", "card_gbps"),
    [
        ("ml.c5.xlarge", 1.25, 10, 1, 1.25),
        ("ml.c5.9xlarge", 12, 12, 1, 12),
        ("ml.c4.xlarge", 1.25, 2.8, 1, 1.25),  # the guide states "High", the API numbers
        ("ml.p3.16xlarge", 25, 25, 1, 25),  # the guide states 25. The API contradicts itself
        ("ml.p4d.24xlarge", 400, 400, 4, 100),
        ("ml.g6e.48xlarge", 400, 400, 4, 400),  # the API states the total for each card
    ],
)
def test_network_of_known_types(
    name: str, baseline_gbps: float, burst_gbps: float, num_cards: int, card_gbps: float
) -> None:
    info = Catalogue.load().get(name)
    assert (info.network_baseline_gbps, info.network_burst_gbps) == (baseline_gbps, burst_gbps)
    assert (info.num_network_cards, info.network_card_gbps) == (num_cards, card_gbps)

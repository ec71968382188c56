"""Types of Google Cloud and Azure, and hosts whose resources alone are stated: facts, families and messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero import cli
from hetero.cluster.roles import has_accelerator
from hetero.errors import ConfigError, ExitCode
from hetero.pricing import Catalogue, InstanceTypeInfo, family_of, list_text, show_text

OTHERS = [info for info in Catalogue.load().types() if not info.instance_type.startswith("ml.")]
GOOGLE = [info for info in OTHERS if not info.instance_type.startswith("Standard_")]
AZURE = [info for info in OTHERS if info.instance_type.startswith("Standard_")]


@pytest.mark.parametrize(
    ("name", "vcpus", "memory_gib", "accelerators", "limit_gbps"),
    [
        ("n2-highcpu-32", 32, 32, (0, None, None), 32),
        ("n2d-highcpu-64", 64, 64, (0, None, None), 32),
        ("c2-standard-60", 60, 240, (0, None, None), 32),
        ("c3-highcpu-22", 22, 44, (0, None, None), 23),
        ("e2-highcpu-32", 32, 32, (0, None, None), 16),
        ("g2-standard-48", 48, 192, (4, "NVIDIA L4", None), 50),
        ("a2-highgpu-1g", 12, 85, (1, "NVIDIA A100", 40), 24),
        ("a2-ultragpu-8g", 96, 1360, (8, "NVIDIA A100", 80), 100),
        ("a3-highgpu-8g", 208, 1872, (8, "NVIDIA H100", 80), None),  # it has several network interfaces
        ("Standard_F72s_v2", 72, 144, (0, None, None), 30),
        ("Standard_D16s_v5", 16, 64, (0, None, None), 12.5),
        ("Standard_NC24ads_A100_v4", 24, 220, (1, "NVIDIA A100", 80), 20),
        ("Standard_NC64as_T4_v3", 64, 440, (4, "NVIDIA T4", 16), 32),
        ("Standard_ND96asr_v4", 96, 900, (8, "NVIDIA A100", 40), 24),
        ("Standard_ND96isr_H200_v5", 96, 1850, (8, "NVIDIA H200", 141), 80),
    ],
)
def test_facts_of_known_types(
    name: str,
    vcpus: int,
    memory_gib: float,
    accelerators: tuple[int, str | None, float | None],
    limit_gbps: float | None,
) -> None:
    info = Catalogue.load().get(name)
    assert (info.vcpus, info.memory_gib, info.network_limit_gbps) == (vcpus, memory_gib, limit_gbps)
    assert (info.num_accelerators, info.accelerator, info.accelerator_memory_gib) == accelerators


def test_facts_are_plausible() -> None:
    assert len(GOOGLE) >= 15
    assert len(AZURE) >= 12
    for info in OTHERS:
        assert info.price is None, info
        assert info.vcpus in range(8, 257), info
        assert info.memory_gib is not None
        assert 1 <= info.memory_gib / info.vcpus <= 20, info
        assert info.network_baseline_gbps is None, info  # these clouds state only a limit
        assert info.network_limit_gbps is None or 8 <= info.network_limit_gbps <= 100, info
        assert (info.num_accelerators == 0) == (info.accelerator is None), info
        assert has_accelerator(info.instance_type) == bool(info.num_accelerators), info
        number = re.search(r"[0-9]+", info.instance_type.partition("-")[2] or info.instance_type)
        assert number is not None
        if info.num_accelerators == 0 or info in AZURE:  # the name has the number of vCPUs
            assert int(number[0]) == info.vcpus, info
        elif info.instance_type.startswith("a"):  # the name has the number of accelerators
            assert int(number[0]) == info.num_accelerators, info


@pytest.mark.parametrize("types", [GOOGLE, AZURE], ids=["Google Cloud", "Azure"])
def test_types_are_in_the_order_of_family_and_size(types: list[InstanceTypeInfo]) -> None:
    cpu_first = [bool(info.num_accelerators) for info in types]
    assert cpu_first == sorted(cpu_first)
    assert len({info.instance_type for info in types}) == len(types)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("ml.c5.9xlarge", "c5"),
        ("ml.m7i-flex.large", "m7i-flex"),
        ("c5.9xlarge", "c5"),
        ("n2-highcpu-32", "n2"),
        ("n2-standard-8", "n2"),
        ("n2d-highcpu-32", "n2d"),
        ("a2-ultragpu-1g", "a2"),
        ("n1-standard-16+GPU:4", "n1"),
        ("Standard_F32s_v2", "Fs_v2"),
        ("Standard_F64s_v2", "Fs_v2"),
        ("Standard_D16s_v5", "Ds_v5"),
        ("Standard_NC24ads_A100_v4", "NCads_A100_v4"),
        ("CPU:16", "CPU:16"),
        ("local_gpu", "local_gpu"),
    ],
)
def test_family_of_a_type(name: str, family: str) -> None:
    assert family_of(name) == family


@pytest.mark.parametrize(
    ("name", "vcpus", "num_accelerators"),
    [("CPU:16", 16, 0), ("CPU:1", 1, 0), ("GPU:8", None, 8), ("n1-standard-16+GPU:4", 16, 4)],
)
def test_stated_resources_are_facts(name: str, vcpus: int | None, num_accelerators: int) -> None:
    catalogue = Catalogue.load()
    info = catalogue.get(name)
    assert (info.instance_type, info.vcpus, info.num_accelerators) == (name, vcpus, num_accelerators)
    assert info.price is None
    assert catalogue.explain(name) == f"no price for {name}; pass --price {name}=USD"
    priced = Catalogue.load(overrides=[f"{name}=1.25"])
    assert (priced.get(name).hourly_usd, priced.get(name).vcpus) == (1.25, vcpus)
    assert priced.explain(name) is None


def test_accelerators_that_a_type_has_anyway_change_nothing() -> None:
    catalogue = Catalogue.load(overrides=["a2-highgpu-2g=7", "n1-standard-16=0.8"])
    info = catalogue.get("a2-highgpu-2g+GPU:2")
    assert (info.num_accelerators, info.accelerator, info.accelerator_memory_gib) == (2, "NVIDIA A100", 40)
    assert info.hourly_usd == 7
    assert catalogue.get("n1-standard-16+GPU:2").hourly_usd is None  # the accelerators cost more


@pytest.mark.parametrize(
    "name", ["CPU:0", "GPU:", "CPU:x", "TPU:4", "CPU:16+GPU:1", "nosuch-8+GPU:1", "n1-standard-16+"]
)
def test_malformed_resources_are_unknown(name: str) -> None:
    assert Catalogue.load().find(name) is None


@pytest.mark.parametrize(
    ("name", "close"), [("n2-highcpu-23", "n2-highcpu-32"), ("Standard_F32_v2", "Standard_F32s_v2")]
)
def test_unknown_type_is_answered_with_the_closest(name: str, close: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean .*{close}"):
        Catalogue.load().get(name)


def test_price_file_may_have_stated_resources(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text('hourly_usd: {"CPU:16": 0.5, n2-highcpu-32: 1.1, Standard_F32s_v2: 1.3}\n')
    catalogue = Catalogue.load(price_file=path)
    assert [catalogue.get(name).hourly_usd for name in ("CPU:16", "n2-highcpu-32", "Standard_F32s_v2")] == [
        0.5,
        1.1,
        1.3,
    ]


def test_tables_show_limits_and_unknown_facts() -> None:
    catalogue = Catalogue.load()
    row = next(line for line in list_text(catalogue).splitlines() if "| n2-highcpu-32 " in line)
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["n2-highcpu-32", "-", "32", "32", "none", "-", "32", "-"]
    text = show_text(catalogue, "Standard_ND96asr_v4")
    assert "  network       at most 24 Gbit/s\n" in text
    assert "  local NVMe    -\n" in text
    assert "2024-07-31" in text
    text = show_text(catalogue, "GPU:8")
    assert "  accelerators  8 x not known\n" in text
    assert "  network       -\n" in text
    assert "pass --price GPU:8=USD" in text


def test_prices_command_shows_a_type_of_another_cloud(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prices", "show", "c3-highcpu-22", "--price", "c3-highcpu-22=0.8"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "price         0.8 USD/hour" in shown
    assert "https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator/blob/" in shown

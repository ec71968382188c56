"""Plans with types of Google Cloud and Azure, and with hosts whose resources alone are stated."""

from __future__ import annotations

import pytest

from hetero.decide.planning.machines import Machine, bigger_machines, menu_of
from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.plan import make_plan
from hetero.errors import ConfigError
from hetero.pricing import Catalogue
from tests.support.planning import make_profile


@pytest.mark.parametrize(
    ("trainer", "data", "vcpus"),
    [
        ("a2-highgpu-1g", "n2-highcpu-32", 12),
        ("Standard_NC24ads_A100_v4", "Standard_F32s_v2", 24),
        ("GPU:1", "CPU:32", 8),  # the profile states the vCPUs
        ("n1-standard-16+GPU:4", "CPU:32", 16),
    ],
)
def test_plan_adds_data_hosts(trainer: str, data: str, vcpus: int) -> None:
    profile = make_profile(headspace_s=0.1, cpu_s=0.1, batch=64, vcpus=vcpus, processes=vcpus, trainer=trainer)
    catalogue = Catalogue.load(overrides=[f"{trainer}=4.0", f"{data}=1.0"])
    plan = make_plan(profile, catalogue, PlanOptions(menu=(data,)))
    assert [(group.role, group.instance_type) for group in plan.chosen.groups] == [("data", data), ("trainer", trainer)]
    assert f"={data}:" in plan.chosen.flags


def test_menu_without_price_says_which_option_to_pass() -> None:
    profile = make_profile(headspace_s=0.1, cpu_s=0.1, trainer="GPU:1")
    with pytest.raises(ConfigError, match="no price for CPU:32; pass --price CPU:32=USD, or leave it out of --menu"):
        make_plan(profile, Catalogue.load(overrides=["GPU:1=4"]), PlanOptions(menu=("CPU:32",)))
    with pytest.raises(ConfigError, match="no price for GPU:1; pass --price GPU:1=USD, because the goal is cost"):
        make_plan(profile, Catalogue.load(overrides=["CPU:32=1"]), PlanOptions(menu=("CPU:32",)))


def test_priced_types_without_accelerators_are_on_the_default_menu() -> None:
    catalogue = Catalogue.load(overrides=["CPU:16=0.5", "n2-highcpu-32=1", "Standard_F32s_v2=1", "a2-highgpu-1g=4"])
    assert {machine.instance_type for machine in menu_of(catalogue)} == {"CPU:16", "n2-highcpu-32", "Standard_F32s_v2"}


def test_gpus_alone_are_no_data_host() -> None:
    with pytest.raises(ConfigError, match="the number of vCPUs of GPU:8 is not known"):
        menu_of(Catalogue.load(overrides=["GPU:8=9"]), ["GPU:8"])


def test_limit_of_the_network_is_the_bandwidth() -> None:
    catalogue = Catalogue.load()
    assert Machine.from_info(catalogue.get("n2-highcpu-32")).network_bytes_per_s == 4e9
    assert Machine.from_info(catalogue.get("CPU:32")).network_bytes_per_s is None


def test_bigger_machines_are_of_the_same_family() -> None:
    catalogue = Catalogue.load(overrides=["g2-standard-8=1", "g2-standard-16=2", "g2-standard-48=4", "ml.g6.8xlarge=3"])
    trainer = Machine.from_info(catalogue.get("g2-standard-8"))
    assert [machine.instance_type for machine in bigger_machines(catalogue, trainer)] == ["g2-standard-16"]

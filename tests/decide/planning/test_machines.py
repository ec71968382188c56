"""The machines that a plan chooses from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hetero.decide.planning.machines import Machine, menu_of
from hetero.errors import ConfigError
from hetero.pricing import Catalogue


def names(menu: tuple[Machine, ...]) -> list[str]:
    return [machine.instance_type for machine in menu]


def test_default_menu_has_priced_cpu_types_that_sustain_their_vcpus() -> None:
    prices = ["ml.c7i.large=1", "ml.c7i-flex.xlarge=1", "ml.t3.large=1", "ml.g5.xlarge=1"]
    assert names(menu_of(Catalogue.load(overrides=prices))) == ["ml.c7i.large"]


def test_menu_with_a_burstable_type_by_name_has_it() -> None:
    catalogue = Catalogue.load(overrides=["ml.c7i.large=1", "ml.t3.large=1"])
    assert names(menu_of(catalogue, ["ml.t3.large"])) == ["ml.t3.large"]


def test_default_menu_with_prices_of_burstable_types_only_raises() -> None:
    with pytest.raises(ConfigError, match="nothing to choose from"):
        menu_of(Catalogue.load(overrides=["ml.t3.large=1"]))


def test_machine_with_several_network_cards_has_the_bandwidth_of_the_first() -> None:
    catalogue = Catalogue.load()
    assert Machine.from_info(catalogue.get("ml.p4d.24xlarge")).network_bytes_per_s == 12.5e9
    assert Machine.from_info(catalogue.get("ml.c5.xlarge")).network_bytes_per_s == 1.25e9 / 8


def test_default_menu_leaves_out_types_without_known_vcpus_and_names_them(caplog: pytest.LogCaptureFixture) -> None:
    prices = ["ml.zz9.4xlarge=0.1", "ml.c5.9xlarge=1.8", "ml.p3.2xlarge=3.8"]
    assert names(menu_of(Catalogue.load(overrides=prices))) == ["ml.c5.9xlarge"]
    assert caplog.messages == ["the plan leaves out ml.zz9.4xlarge: the number of vCPUs is not known"]


@pytest.mark.parametrize("prices", [(), ("ml.zz9.huge=1",)])
@pytest.mark.parametrize("options", [{"instance_types": ["ml.zz9.huge"]}, {"spot_usd": {"ml.zz9.huge": 1.0}}])
def test_advice_for_an_unknown_type_leads_to_no_other_error(prices: tuple[str, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the number of vCPUs of ml\.zz9\.huge is not known") as caught:
        menu_of(Catalogue.load(overrides=["ml.c5.9xlarge=1.8", *prices]), **options)
    found = re.search(r"--menu (\S+) --price (\S+)=USD", str(caught.value))
    assert found is not None
    assert names(menu_of(Catalogue.load(overrides=[f"{found[2]}=1.0"]), [found[1]])) == ["CPU:16"]


def test_default_menu_with_prices_of_unknown_types_only_names_them() -> None:
    with pytest.raises(ConfigError, match=r"the number of vCPUs of ml\.zz9\.4xlarge is not known, and no other type"):
        menu_of(Catalogue.load(overrides=["ml.zz9.4xlarge=0.1", "ml.p3.2xlarge=3.8"]))

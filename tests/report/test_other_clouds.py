"""Reports of jobs on types of other clouds, and on hosts whose resources alone are stated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetero.pricing import Catalogue
from hetero.report.build import build_report
from hetero.report.model import GroupFacts, RunFacts


@pytest.mark.parametrize(
    ("trainer", "data"),
    [("a2-highgpu-1g", "n2-highcpu-32"), ("Standard_NC24ads_A100_v4", "Standard_F32s_v2"), ("GPU:1", "CPU:32")],
)
def test_report_has_vcpus_and_says_which_price_to_pass(
    make_facts: Callable[..., RunFacts], trainer: str, data: str
) -> None:
    groups = (
        GroupFacts(name="dnn_group", role="trainer", instance_type=trainer, count=1),
        GroupFacts(name="data_group", role="data", instance_type=data, count=2),
    )
    facts = make_facts(is_heterogeneous=True, groups=groups)
    report = build_report(facts, Catalogue.load())
    assert set(report.cost.missing) == {f"no price for {name}; pass --price {name}=USD" for name in (trainer, data)}
    assert report.verdict.vcpus == 64
    priced = build_report(facts, Catalogue.load(overrides=[f"{trainer}=4", f"{data}=1.5"]))
    assert priced.cost.missing == ()
    assert priced.cost.hourly is not None
    assert priced.cost.hourly.value == 7.0

"""The options of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.decide.planning.options import PlanOptions, WrongOption
from hetero.errors import ConfigError


def test_options_within_their_bounds_are_accepted() -> None:
    PlanOptions(
        menu=("ml.c5.9xlarge",),
        num_steps=100,
        max_hours=2,
        max_usd_per_1k_steps=1.5,
        spot_usd={"ml.c5.9xlarge": 0.6},
        vcpu_speeds={"ml.c5.9xlarge": 100},
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"menu": 5}, "menu is 5; expected a list of instance types"),
        ({"menu": (5,)}, r"menu is \(5,\); expected a list of instance types"),
        ({"menu": "ml.c5.9xlarge"}, "menu is 'ml.c5.9xlarge'; expected a list of instance types"),
        ({"trainer_type": None}, "trainer_type is None; expected an instance type"),
        ({"num_ranks": 1.5}, "num_ranks is 1.5; expected a number above 0 without decimals"),
        ({"num_ranks": True}, "num_ranks is True; expected a number above 0"),
        ({"endpoints_per_host": "8"}, "endpoints_per_host is '8'; expected a number above 0"),
        ({"endpoints_per_host": 1025}, "endpoints_per_host is 1025; expected at most 1024, as in a job"),
        ({"num_trainer_hosts": -1}, "num_trainer_hosts is -1; expected a number above 0"),
        ({"max_hours": "2", "num_steps": 10}, "max_hours is '2'; expected a number above 0"),
        ({"max_usd_per_1k_steps": float("inf")}, "max_usd_per_1k_steps is inf; expected a number above 0"),
        ({"vcpu_speeds": ["a"]}, r"vcpu_speeds is \['a'\]; expected a dict from instance type to relative speed"),
        ({"vcpu_speeds": {5: 1.0}}, r"vcpu_speeds is \{5: 1.0\}; expected a dict from instance type"),
        ({"vcpu_speeds": {"ml.c5.9xlarge": 0}}, r"vcpu_speeds\['ml.c5.9xlarge'\] is 0; expected a number above 0.001"),
        ({"vcpu_speeds": {"ml.c5.9xlarge": -1.0}}, r"is -1.0; expected a number above 0.001 and at most 100"),
        ({"vcpu_speeds": {"ml.c5.9xlarge": "1"}}, r"is '1'; expected a number above 0.001 and at most 100"),
        ({"spot_usd": {"ml.c5.9xlarge": float("nan")}}, r"is nan; expected a number above 0 and at most 1000"),
    ],
)
def test_option_of_another_type_or_out_of_range_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PlanOptions(**options)
    assert isinstance(caught.value.record, WrongOption)


def test_steps_without_a_longest_time_are_rejected() -> None:
    with pytest.raises(ConfigError, match="num_steps is given without max_hours, so nothing uses it"):
        PlanOptions(num_steps=100)

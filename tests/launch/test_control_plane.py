"""What the launchers of a job check about its hosts before it begins."""

from __future__ import annotations

import pytest

from hetero.cluster import Role
from hetero.cluster.roles import check_spot_groups
from hetero.errors import ConfigError

ROLES = {"data": Role.DATA, "dnn": Role.TRAINER}


@pytest.mark.parametrize(
    ("spot", "found"),
    [
        ("dta", "--spot dta: the job has no such group"),
        ("dnn", "--spot dnn: this group trains"),
    ],
)
def test_spot_names_a_group_of_data_hosts(spot: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_spot_groups(["data", spot], ROLES)
    assert found in str(caught.value)
    assert "expected: a group of data hosts; this job has data" in str(caught.value)


def test_spot_group_of_data_hosts_is_accepted() -> None:
    check_spot_groups(["data"], ROLES)

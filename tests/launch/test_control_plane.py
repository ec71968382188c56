"""What the launchers of a job check about its hosts before it begins."""

from __future__ import annotations

import pytest

from hetero.config import LaunchOptions
from hetero.errors import ConfigError
from hetero.launch.control_plane import check_spot_groups
from tests.support.launch.clusters import cluster


@pytest.mark.parametrize(
    ("spot", "found"),
    [
        ("dta=0.1", "--spot dta: the job has no such group"),
        ("dnn=0.1", "--spot dnn: this group trains"),
    ],
)
def test_spot_names_a_group_of_data_hosts(spot: str, found: str) -> None:
    options = LaunchOptions(script="train.py", spot_groups=("data=0.2", spot))
    with pytest.raises(ConfigError) as caught:
        check_spot_groups(options, cluster("algo-9"))
    assert found in str(caught.value)
    assert "expected: a group of data hosts; this job has data" in str(caught.value)


def test_spot_group_of_data_hosts_is_accepted() -> None:
    check_spot_groups(LaunchOptions(script="train.py", spot_groups=("data=0.2",)), cluster("algo-9"))

"""Ray Train's workers get the batches of hetero's data service, the same as without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray_harness import SCRIPT, Training, alone

from hetero.ray import DataService


def chains(found: list[dict[str, Any]]) -> list[str]:
    return [each["chain"] for each in found]


def batches(found: list[dict[str, Any]]) -> list[list[str]]:
    return [each["batches"] for each in found]


@pytest.fixture(scope="module")
def service(cluster: Any) -> Iterator[DataService]:
    """Two data hosts for the tests of this file."""
    with DataService(str(SCRIPT), num_hosts=2) as service:
        yield service


def test_batches_are_those_of_the_script_without_ray(service: DataService, train: Callable[..., Training]) -> None:
    config = {"epochs": 2}
    found = train(service, config).results()
    assert chains(found) == chains(alone(config))


def test_resumed_run_with_other_numbers_of_data_hosts_gets_the_remaining_batches(
    service: DataService, train: Callable[..., Training]
) -> None:
    config = {"save_every": 20, "stop_at": 20}
    with DataService(str(SCRIPT)) as small:
        first = train(small, config)
        first.wait()
    found = train(service, {"checkpoint": first.result.checkpoint}).results()
    assert batches(found) == [whole[20:] for whole in batches(alone({}))]


def test_worker_that_fails_is_restarted_by_ray_and_resumes(
    service: DataService, train: Callable[..., Training]
) -> None:
    config = {"step_s": 0.01, "save_every": 20, "fail_at": 30}
    found = train(service, config, max_failures=1).results()
    assert batches(found) == [whole[20:] for whole in batches(alone({}))]

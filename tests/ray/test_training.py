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


def test_restarted_and_resumed_runs_get_the_remaining_batches(
    service: DataService, train: Callable[..., Training]
) -> None:
    expected = batches(alone({}))
    # Ray restarts the workers from the checkpoint after 20 steps. They save another one after 20 more.
    restarted = train(service, {"step_s": 0.01, "save_every": 20, "fail_at": 30}, max_failures=1)
    assert batches(restarted.results()) == [whole[20:] for whole in expected]
    # Another run resumes from there, with another number of data hosts.
    with DataService(str(SCRIPT)) as small:
        resumed = train(small, {"checkpoint": restarted.result.checkpoint}).results()
    assert batches(resumed) == [whole[40:] for whole in expected]

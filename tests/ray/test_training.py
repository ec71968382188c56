"""Ray Train's workers get the batches of hetero's data service, the same as without Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_harness import SCRIPT, Training, alone

from hetero.ray import DataService


def chains(found: list[dict[str, Any]]) -> list[str]:
    return [each["chain"] for each in found]


def test_batches_are_those_of_the_script_without_ray(cluster: Any, train: Callable[..., Training]) -> None:
    config = {"epochs": 2}
    with DataService(str(SCRIPT), num_hosts=2, label_selector={"role": "data"}) as service:
        found = train(service, config).results()
    assert len(found) == 2
    assert chains(found) == chains(alone(config))

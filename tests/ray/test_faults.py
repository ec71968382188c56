"""Processes of a data service that are killed while Ray Train trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_harness import SCRIPT, Training, alone, living

from hetero.ray import DataService

LONG = {"num_samples": 80_000, "step_s": 0.02}
MAX_WAIT_S = 2.0
TWICE = {"data-0-start2", "data-1-start2"}
ACTOR, LAUNCHER = 0, 1
"""Positions in the list of a host's processes."""


@pytest.mark.usefixtures("cluster")
def test_data_host_that_is_killed_costs_no_batch_and_comes_back(train: Callable[..., Training]) -> None:
    config = {"num_samples": 80_000, "step_s": 0.02}
    with DataService(str(SCRIPT), num_hosts=2) as service:
        service.wait_serving()
        training = train(service, config)
        training.wait_step(20)
        for host, process, names in (("0", LAUNCHER, {"data-0-start2", "data-1"}), ("1", ACTOR, TWICE)):
            os.kill(service.call("processes")[host][process], signal.SIGKILL)
            deadline_s = time.monotonic() + 100
            while set(service.serving()) != names:
                assert time.monotonic() < deadline_s, service.serving()
                time.sleep(0.1)
        training.wait_step(training.steps() + 50)
        (training.folder / "stop").touch()
        found = training.results()
    for rank, each in enumerate(alone({**config, "stop_at": max(len(each["batches"]) for each in found)})):
        assert found[rank]["batches"] == each["batches"][: len(found[rank]["batches"])]
    waits_s = [each["longest_wait_s"] for each in found]
    print(f"the longest waits of the ranks are {waits_s} s")
    assert max(waits_s) < MAX_WAIT_S


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("which", ["actor", "hub"])
def test_coordinator_that_is_killed_fails_the_training_with_a_cause(which: str, train: Callable[..., Training]) -> None:
    service = DataService(str(SCRIPT))
    try:
        training = train(service, LONG)
        training.wait_step(20)
        processes = service.call("processes")
        begin_s = time.monotonic()
        os.kill(processes["coordinator"][which == "hub"], signal.SIGKILL)
        training.wait()
        took_s = training.ended_s - begin_s
        print(f"killed the {which}; the training failed after {took_s:.1f} s: {str(training.error)[:300]}")
        cause = (
            "the data service is gone" if which == "actor" else "the coordinator of the data service killed by SIGKILL"
        )
        assert cause in str(training.error)
        assert took_s < 30
    finally:
        service.shutdown()
    deadline_s = time.monotonic() + 10
    while living([pid for pids in processes.values() for pid in pids]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert living([pid for pids in processes.values() for pid in pids]) == []


DRIVER = """
import json, sys, time
import ray
from hetero.ray import DataService
ray.init(address=sys.argv[1], log_to_driver=False)
service = DataService(sys.argv[2], num_hosts=2)
service.wait_serving(2)
print(json.dumps(service.call("processes")), flush=True)
time.sleep(600)
"""


def test_driver_that_is_killed_leaves_nothing(cluster: Any, tmp_path: Path) -> None:
    address = cluster.get_runtime_context().gcs_address
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), address, str(SCRIPT)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        line = next(line for line in driver.stdout if line.startswith("{"))
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    pids = [pid for each in json.loads(line).values() for pid in each]
    assert len(pids) == 6
    deadline_s = time.monotonic() + 30
    while living(pids) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert living(pids) == []
    total = cluster.cluster_resources()["CPU"]
    while cluster.available_resources().get("CPU") != total and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert cluster.available_resources()["CPU"] == total

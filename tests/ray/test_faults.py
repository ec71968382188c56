"""Processes of a data service that are killed while Ray Train trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import DataPlaneError
from hetero.ray import DataService
from tests.support.ray.harness import (
    DATA,
    SCRIPT,
    Training,
    check_batches,
    check_ended,
    processes_of,
    wait_until,
)

LONG = {"num_samples": 80_000, "step_s": 0.02}
TWICE = {"data-0-start2", "data-1-start2"}
ACTOR, LAUNCHER, HUB = 0, 1, 1
"""Positions in the lists of processes."""


@pytest.mark.fault("F43")
@pytest.mark.usefixtures("cluster")
def test_killed_data_hosts_cost_no_batch_and_the_killed_hub_fails_the_training(
    train: Callable[..., Training],
) -> None:
    with DataService(str(SCRIPT), num_hosts=2, label_selector=DATA) as service:
        training = train(service, LONG)
        service.wait_serving()
        training.wait_step(5)
        for host, process, names in (("0", LAUNCHER, {"data-0-start2", "data-1"}), ("1", ACTOR, TWICE)):
            os.kill(processes_of(service.call("admission"))[host][process], signal.SIGKILL)
            wait_until(lambda names=names: set(service.serving()) == names, f"{names} serve")
        training.wait_step(training.steps() + 50)
        processes = processes_of(service.call("admission"))
        os.kill(processes["coordinator"][HUB], signal.SIGKILL)
        training.wait_failed("the coordinator of the data service killed by SIGKILL")
    check_batches(training.folder, LONG)
    check_ended(processes)


@pytest.mark.fault("F44")
def test_killed_coordinator_ends_the_service(cluster: Any) -> None:
    with DataService(str(SCRIPT), label_selector=DATA) as service:
        service.wait_serving()
        processes = processes_of(service.call("admission"))
        os.kill(processes["coordinator"][ACTOR], signal.SIGKILL)
        check_ended(processes)
        with pytest.raises(DataPlaneError, match="the data service is gone"):
            service.serving()


DRIVER = """
import json, sys, time
import ray
from hetero.errors import DataPlaneError
from hetero.ray import DataService
ray.init(address=sys.argv[1], log_to_driver=False)
service = DataService(sys.argv[2])
service.wait_serving()
print(json.dumps(service.call("admission")), flush=True)
time.sleep(600)
"""


@pytest.mark.fault("F44")
def test_driver_that_is_killed_leaves_nothing(cluster: Any, service: DataService, tmp_path: Path) -> None:
    free = cluster.cluster_resources()["CPU"] - len(service.serving())
    address = cluster.get_runtime_context().gcs_address
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script), address, str(SCRIPT)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        line = next(line for line in driver.stdout if line.startswith("{"))
        processes = processes_of(json.loads(line))
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert sorted(processes) == ["0", "coordinator"]
    check_ended(processes)
    wait_until(lambda: cluster.available_resources()["CPU"] == free, "CPUs are left", timeout_s=300.0)

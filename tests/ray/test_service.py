"""A data service from its start to its end, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hetero.ray
from hetero.errors import CapacityError, ConfigError, DataPlaneError
from hetero.ray import DataService
from tests.support.ray.harness import (
    DATA,
    SCRIPT,
    Training,
    alone,
    check_batches,
    check_ended,
    processes_of,
    wait_until,
)


def test_token_is_in_no_argument_environment_or_pickle(service: DataService, cluster: Any) -> None:
    token = service.call("admission")["token"].encode()
    found = cluster.cloudpickle.dumps(service)
    processes = processes_of(service.call("admission"))
    assert sorted(processes) == ["0", "1", "coordinator"]
    for pid in [pid for pids in processes.values() for pid in pids]:
        found += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
    assert token not in found
    logs = Path(cluster._private.worker._global_node.get_logs_dir_path())
    assert not [path for path in logs.iterdir() if path.is_file() and token in path.read_bytes()]


def test_process_without_rank_cannot_connect(service: DataService) -> None:
    with pytest.raises(ConfigError, match="has no rank"):
        service.connect()


def test_copy_cannot_shut_the_service_down(service: DataService, cluster: Any) -> None:
    copy = cluster.cloudpickle.loads(cluster.cloudpickle.dumps(service))
    with pytest.raises(ConfigError, match="only the process that made"):
        copy.shutdown()
    assert sorted(copy.serving()) == ["data-0", "data-1"]


def test_script_that_fails_on_data_hosts_fails_the_service_with_its_traceback(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('no such folder')\n")
    with DataService(str(script)) as service, pytest.raises(DataPlaneError) as caught:
        service.wait_serving(timeout_s=300.0)
    assert "the data service has failed: data host data-0 exited with 30" in str(caught.value)
    assert "no such folder" in str(caught.value)


def test_hosts_that_ray_cannot_place_are_an_error(cluster: Any) -> None:
    with pytest.raises(CapacityError, match=r"needed: 2 data hosts with 99 CPUs each"):
        DataService(str(SCRIPT), num_hosts=2, cpus_per_host=99, start_timeout_s=2)


def test_script_that_no_node_has_is_an_error(cluster: Any) -> None:
    with pytest.raises(hetero.HeteroError, match="the script 'missing.py' is not on node"):
        DataService("missing.py")


@pytest.mark.long
def test_number_of_data_hosts_follows_the_demand_of_a_resumed_run_until_shutdown(
    service: DataService, cluster: Any, train: Callable[..., Training], tmp_path: Path
) -> None:
    free = cluster.cluster_resources()["CPU"] - len(service.serving())
    # A rank takes a batch of 8 samples in 20 ms, and an endpoint needs 8 x 5 ms for it: four endpoints for two ranks.
    # Later a rank takes a batch in 300 ms, and one endpoint is enough.
    config = {"num_samples": 480_000, "sleep_s": 0.005, "step_s": 0.02, "slow_step_s": 0.3}

    def save(loader: Any, step: int) -> None:
        if step == 40:
            (tmp_path / "loader.json").write_text(json.dumps(loader.state_dict()))

    alone(tmp_path / "alone", {**config, "stop_at": 40}, report=save)
    resumed = {**config, "checkpoint": cluster.train.Checkpoint.from_directory(tmp_path)}
    with DataService(str(SCRIPT), num_hosts=1, max_hosts=2, label_selector=DATA) as own:
        training = train(own, resumed)
        training.wait_step(1)
        own.wait_serving(2, timeout_s=300.0)
        (training.folder / "slow").touch()
        wait_until(lambda: own.serving() == ["data-0"], "a data host leaves")
        training.wait_step(training.steps() + 3)
        # The launcher of the data host leaves the job before its actor ends.
        wait_until(lambda: sorted(processes_of(own.call("admission"))) == ["0", "coordinator"], "its actor ends")
        processes = processes_of(own.call("admission"))
    training.wait_failed("the data service is gone")
    check_batches(training.folder, config, first=40)
    own.shutdown()  # idempotent
    check_ended(processes)
    wait_until(lambda: cluster.available_resources()["CPU"] == free, "CPUs are left", timeout_s=300.0)
    with pytest.raises(DataPlaneError, match="the data service was shut down"):
        own.serving()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_hosts": 0}, "num_hosts is 0; expected at least 1"),
        ({"cpus_per_host": 0}, "cpus_per_host is 0; expected at least 1"),
        ({"min_hosts": 2, "max_hosts": 1}, "max_hosts is 1; expected at least min_hosts, which is 2"),
        ({"num_hosts": 5, "min_hosts": 1, "max_hosts": 3}, "num_hosts is 5; expected at least"),
        ({"tls_dir": "certs"}, "does not support the option 'tls_dir'"),
        ({"data_timeout": 3}, "no option 'data_timeout'"),
        ({"data_timeout_s": -1}, "data_timeout_s"),
    ],
)
def test_wrong_argument_is_an_error(arguments: dict[str, Any], words: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=words):
        DataService(str(SCRIPT), **arguments)

"""The head of a Ray cluster that is lost."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.errors import ExitCode
from hetero.ray.head import HeadWatch
from tests.support.ray.driver import CHAIN, Driver
from tests.support.ray.harness import SCRIPT, batches_in, check_batches, check_ended, wait_until
from tests.support.ray.harness import processes_of as processes_of_service


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0
        return self.now_s


def test_head_that_answers_is_not_lost() -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = HeadWatch(f"127.0.0.1:{server.getsockname()[1]}", log_line=lines.append, clock=Clock())
        assert [watch.loss() for _ in range(100)] == [""] * 100
    assert lines == []


def test_head_that_does_not_answer_is_waited_for_then_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "40")
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    watch = HeadWatch(address, log_line=lines.append, clock=Clock())
    found = [watch.loss() for _ in range(20)]
    first = next(loss for loss in found if loss)
    assert first.startswith(f"the head of the Ray cluster at {address} has not answered for 30 s: ")
    assert len(lines) == 1
    assert "waiting for it" in lines[0]


def test_head_that_comes_back_is_not_lost() -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    watch = HeadWatch(f"127.0.0.1:{address[1]}", log_line=lines.append, clock=Clock())
    assert not any(watch.loss() for _ in range(12))
    with socket.create_server(address):
        assert not any(watch.loss() for _ in range(40))
    assert [line.rpartition(" ")[2] for line in lines] == ["it", "again"]


@pytest.fixture
def own_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a cluster whose head may be killed. Ray gives a lost head up after 8 s instead of a minute."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "8")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()  # Ray notes the address of the cluster there
    common = {"object_store_memory": 100 << 20}
    with contextlib.ExitStack() as stack:
        # The names of sockets may have 107 characters.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True))
        head = {"num_cpus": 0, "node_ip_address": "127.0.0.31", "include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args={**head, **common})
        stack.callback(cluster.shutdown)
        cluster.add_node(num_cpus=1, num_gpus=1, node_ip_address="127.0.0.32", **common)
        cluster.add_node(num_cpus=1, node_ip_address="127.0.0.33", **common)
        yield cluster


def processes_of(node: Any) -> list[psutil.Process]:
    """Return the processes of a node of Ray. Some of them live on if their parent is killed."""
    roots = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
    return [process for root in roots for process in [root, *root.children(recursive=True)]]


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.fault("F45")
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_lost_head_ends_the_job_with_its_cause_and_leaves_nothing(own_cluster: Any, tmp_path: Path) -> None:
    # The script takes longer to stop than Ray takes to end a process that the head does not answer.
    args = ["--output", str(tmp_path / "out"), "--num-samples", "100000", "--step-s", "0.05", "--save-s", "12"]
    groups = ["--group", "trainer=GPU:1:1", "--group", "data=CPU:1:1..2"]  # the driver asks for estimates
    driver = Driver(own_cluster.address, tmp_path, *groups, script=CHAIN, args=args)
    driver.wait_for("step 3")
    of_others = [process for node in own_cluster.worker_nodes for process in processes_of(node)]
    kill(processes_of(own_cluster.head_node))
    try:
        assert driver.wait() == ExitCode.ORPHANED, driver.output
        assert f"error HET-32: the head of the Ray cluster at {own_cluster.address} has not answered" in driver.output
        driver.check_nothing_is_left(tmp_path)
        assert (tmp_path / "out" / "stopped-0").is_file()  # the stop callback has run
        actors = [process for process in of_others if "JobHost" in name_of(process)]
        wait_until(lambda: not any(process.is_running() for process in actors), "actors are left", timeout_s=300.0)
    finally:
        kill(of_others)


TRAINING = """
import json, sys
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from hetero.ray import DataService
address, script, folder = sys.argv[1:4]
sys.path.insert(0, script.rpartition("/")[0])
import ray_chain
ray.cloudpickle.register_pickle_by_value(ray_chain)
ray.init(address=address, log_to_driver=False)
with DataService(script) as service:
    service.wait_serving()
    print(json.dumps(service.call("admission")), flush=True)
    config = {"service": service, "folder": folder, **json.loads(sys.argv[4])}
    TorchTrainer(ray_chain.train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=1)).fit()
"""


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_lost_head_ends_the_driver_of_ray_train_and_the_data_service(own_cluster: Any, tmp_path: Path) -> None:
    config = {"num_samples": 80_000, "step_s": 0.05}
    words = [sys.executable, "-c", TRAINING, own_cluster.address, str(SCRIPT), str(tmp_path), json.dumps(config)]
    driver = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    of_others = [process for node in own_cluster.worker_nodes for process in processes_of(node)]
    try:
        processes = processes_of_service(json.loads(next(line for line in driver.stdout if line.startswith("{"))))
        wait_until(lambda: len(batches_in(tmp_path, 0)) >= 10, "10 batches")
        of_others = [process for node in own_cluster.worker_nodes for process in processes_of(node)]
        kill(processes_of(own_cluster.head_node))
        assert driver.wait(300) != 0
        check_ended(processes)
        check_batches(tmp_path, config, world_size=1)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
        kill(of_others)

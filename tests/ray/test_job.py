"""Whole jobs on a Ray cluster, started by one command. Each node has an address of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hetero.errors import ConfigError, ExitCode
from hetero.ray.job import parse_group

CHAIN = Path(__file__).parents[1] / "integration" / "scripts" / "chain.py"
OPTIONS = ["--endpoints-per-host", "1", "--trainer-endpoints", "0", "--nproc-per-node", "1"]
TWO = ["--group", "trainer=GPU:1:1", "--group", "data=CPU:1:1"]

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a cluster of a node with a GPU, as Ray counts it, and three others. Return its address."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    # Ray takes 127.0.0.1 for the address of the machine.
    head = {"num_cpus": 1, "num_gpus": 1, "node_ip_address": "127.0.0.21", "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": 100 << 20})
    try:
        for number in (22, 23, 24):
            started.add_node(num_cpus=1, node_ip_address=f"127.0.0.{number}", object_store_memory=100 << 20)
        yield started.address
    finally:
        started.shutdown()


class Driver:
    """The command, running."""

    def __init__(self, address: str, folder: Path, *words: str, args: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "out").mkdir(exist_ok=True)
        environ = {
            **os.environ,
            "RAY_ADDRESS": address,
            "HETERO_TIME_SCALE": "0.2",
            "HETERO_PROGRESS_SECONDS": "1",
            "PYTHONPATH": str(CHAIN.parents[3]),
        }
        command = [sys.executable, "-m", "hetero.cli", "launch", "--platform", "ray", *words, *OPTIONS]
        command += ["--output-dir", str(folder / "report"), str(CHAIN), "--", "--output", str(folder / "out"), *args]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        try:
            return self.process.wait(150)
        finally:
            self.process.kill()

    def wait_for(self, text: str, timeout_s: float = 100.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < deadline_s, self.output[-5000:]
            assert self.process.poll() is None, self.output[-5000:]
            time.sleep(0.1)

    def check_nothing_is_left(self) -> None:
        deadline_s = time.monotonic() + 20
        while (left := self._launchers()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not left

    def _launchers(self) -> list[list[str]]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if str(self.folder / "out") in words and process.pid != self.process.pid:
                    found.append(words)
        return found


def chain_alone(folder: Path, *args: str) -> str:
    """Return the chain of the same script in one process without a launcher."""
    (folder / "alone").mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HETERO_")}
    command = [sys.executable, str(CHAIN), "--output", str(folder / "alone"), *args]
    subprocess.run(command, check=True, env=environ | {"PYTHONPATH": str(CHAIN.parents[3])}, capture_output=True)
    return chain(folder / "alone")


def chain(folder: Path) -> str:
    found: str = json.loads((folder / "rank-0.json").read_text())["chain"]
    return found


def test_job_is_fed_as_one_process_alone_and_its_report_comes_home(address: str, tmp_path: Path) -> None:
    driver = Driver(address, tmp_path, *TWO)
    assert driver.wait() == ExitCode.OK, driver.output[-5000:]
    assert chain(tmp_path / "out") == chain_alone(tmp_path)
    report = json.loads((tmp_path / "report" / "report.json").read_text())["run"]
    assert {group["name"]: (group["instance_type"], group["count"]) for group in report["groups"]} == {
        "trainer": ("GPU:1", 1),
        "data": ("CPU:1", 1),
    }
    assert report["placement"] == "heterogeneous"
    driver.check_nothing_is_left()


def test_script_that_fails_gives_the_command_its_exit_code(address: str, tmp_path: Path) -> None:
    driver = Driver(address, tmp_path, *TWO, args=("--fail-at", "3"))
    assert driver.wait() == ExitCode.SCRIPT_FAILED, driver.output[-5000:]
    assert "training fails on purpose" in driver.output
    driver.check_nothing_is_left()


def test_request_to_stop_ends_every_launcher_in_order(address: str, tmp_path: Path) -> None:
    driver = Driver(address, tmp_path, *TWO, args=("--num-samples", "100000", "--step-s", "0.05"))
    driver.wait_for("step 3")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 128 + signal.SIGTERM, driver.output[-5000:]
    assert (tmp_path / "out" / "stopped-0").is_file()  # the stop callback has run
    driver.check_nothing_is_left()


def test_number_of_data_hosts_follows_the_demand(address: str, tmp_path: Path) -> None:
    # A batch of 8 samples takes 160 ms on one endpoint, and a step 10 ms.
    slow = ("--num-samples", "2400", "--epochs", "1", "--step-s", "0.01", "--faults", "sleep_s=0.02")
    driver = Driver(address, tmp_path, "--group", "trainer=GPU:1:1", "--group", "data=CPU:1:1..3", args=slow)
    driver.wait_for("asking Ray for data-1")
    driver.wait_for("data host data-1 has joined the job, in group data")
    assert driver.wait() == ExitCode.OK, driver.output[-5000:]
    report = json.loads((tmp_path / "report" / "report.json").read_text())["run"]
    assert {joined["host"] for joined in report["joined_hosts"]} >= {"data-1"}
    assert len(report["joined_hosts"]) <= 2
    assert chain(tmp_path / "out") == chain_alone(tmp_path, *slow[:4])
    driver.check_nothing_is_left()


def test_job_that_ray_cannot_place_says_what_is_needed_and_found(address: str, tmp_path: Path) -> None:
    driver = Driver(address, tmp_path, "--group", "trainer=GPU:8:1", "--group", "data=CPU:1:1", "--start-timeout", "3")
    assert driver.wait() == ExitCode.CAPACITY, driver.output[-5000:]
    assert "needed: 2 nodes, with trainer=GPU:8:1, data=CPU:1:1" in driver.output
    assert "found: 4 nodes (" in driver.output
    assert "CPU:1 GPU:1" in driver.output


@pytest.mark.parametrize(
    ("text", "name", "resources", "count", "most"),
    [
        ("data=CPU:16:2..8", "data", "CPU:16", 2, 8),
        ("data=CPU:16:2", "data", "CPU:16", 2, 2),
        ("trainer=GPU:8:1", "trainer", "GPU:8", 1, 1),
        ("data=CPU:4:3..3", "data", "CPU:4", 3, 3),
    ],
)
def test_group_states_resources_and_bounds(text: str, name: str, resources: str, count: int, most: int) -> None:
    group = parse_group(text)
    assert (group.stated.name, group.stated.instance_type, group.stated.count) == (name, resources, count)
    assert group.max_hosts == most


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=CPU:16", "expected NAME=TYPE:COUNT|found 16 hosts|Ray does not know"),
        ("data=ml.c5.xlarge:2", "Ray does not know the type 'ml.c5.xlarge'"),
        ("data=CPU:16:8..2", r"found 8\.\.2; expected the smaller number first"),
        ("data=CPU:16:0..2", "found 0 hosts"),
        ("CPU:16:2", "expected NAME=TYPE:COUNT"),
    ],
)
def test_group_that_says_nothing_useful_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_group(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--platform", "ray"], "--platform ray needs the groups of the job"),
        (["--group", "data=CPU:1:1"], "only --platform ray uses them"),
        (["--platform", "ray", "--group", "trainer=GPU:1:1..2"], "only a data group can have MIN..MAX hosts"),
    ],
)
def test_command_line_that_cannot_work_is_refused(words: list[str], message: str) -> None:
    command = [sys.executable, "-m", "hetero.cli", "launch", *words, str(CHAIN)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.USAGE
    assert message in done.stderr

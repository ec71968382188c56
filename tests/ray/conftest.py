"""A Ray cluster of several nodes on this machine, and training runs on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.ray import DataService
from tests.support.ray.harness import DATA, SCRIPT, Training

_QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # `ray start --head` of Ray 2.60 demands a token if there is one. Older versions ignore these variables.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "7e57" * 16,
    "RAY_prestart_worker_first_driver": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    # Ray's 15 leaves its workers 3 % of a core on which another test computes. They have stood still for minutes.
    "RAY_worker_niceness": "0",
    "HETERO_PROGRESS_SECONDS": "0.5",
    "HETERO_TIME_SCALE": "0.5",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and "address" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # Ray's own
            item.add_marker(pytest.mark.timeout(1500))  # a training run starts dozens of processes


@contextlib.contextmanager
def _environment(**more: str) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_QUIET, **more}.items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    """Set the environment, and make the scripts importable."""
    with _environment() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield


@pytest.fixture(scope="session")
def host_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Temporary folder of the processes on the nodes."""
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="session")
def address(host_folders: Path) -> Iterator[str]:
    """Start a cluster of a node with a GPU, as Ray counts it, and two others. Return its address.

    The nodes have different addresses, because all launchers of a job use the same port. The other nodes have the
    label ``role=data``.
    """
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray._raylet import Config
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 3, "object_store_memory": 100 << 20}
    # Ray takes 127.0.0.1 for the address of the machine.
    head = {"num_gpus": 1, "node_ip_address": "127.0.0.21", "include_dashboard": False}
    with contextlib.ExitStack() as stack:
        with _environment(TMPDIR=str(host_folders)):
            Config.initialize("")  # Ray has read the variables when it was imported
            started = Cluster(initialize_head=True, head_node_args={**head, **common})
            stack.callback(started.shutdown)
            for number in (22, 23):
                started.add_node(node_ip_address=f"127.0.0.{number}", labels=DATA, **common)
        yield started.address


@pytest.fixture(scope="session")
def cluster(address: str) -> Iterator[Any]:
    """Connect this process to the cluster. Return the module ``ray``."""
    with _environment():
        pytest.importorskip("ray.train", reason="ray[train] is not installed")
        import ray

        ray.init(address=address, log_to_driver=True, logging_level="warning")
    try:
        yield ray
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def service(cluster: Any) -> Iterator[DataService]:
    """Two data hosts for the tests that do not change them."""
    with DataService(str(SCRIPT), num_hosts=2, label_selector=DATA) as service:
        service.wait_serving()
        yield service


@pytest.fixture
def train(cluster: Any, tmp_path: Path) -> Callable[..., Training]:
    """Return a function that starts a training run with a service."""
    count = iter(range(100))
    return lambda service, config=None, **options: Training(
        tmp_path / f"run-{next(count)}", service, config or {}, **options
    )

"""A Ray cluster of several nodes on this machine, and training runs on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_harness import SCRIPT, Training

_QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    "HETERO_PROGRESS_SECONDS": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # Ray's own
            item.add_marker(pytest.mark.timeout(300))  # Ray starts dozens of processes, and other tests run beside


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a cluster of two nodes. The second one has the label ``role=data``."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    started = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "include_dashboard": False, "object_store_memory": 100 << 20},
    )
    try:
        started.add_node(num_cpus=4, object_store_memory=100 << 20, labels={"role": "data"})
        ray.init(address=started.address, log_to_driver=True, logging_level="warning")
        yield ray
    finally:
        ray.shutdown()
        started.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@pytest.fixture
def train(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Training]:
    """Return a function that starts a training run with a service."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    count = iter(range(100))
    return lambda service, config=None, **options: Training(
        tmp_path / f"run-{next(count)}", service, config or {}, **options
    )

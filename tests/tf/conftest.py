"""Data sets without torch, served to this process as a rank, by endpoints or by tf.data.service."""

from __future__ import annotations

import collections
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.control.rank import session as control
from hetero.loaders import pipeline
from tests.support.tf import service_jobs
from tests.support.torch.endpoints import ServedJob, imported_script

SCRIPT = """
    import random
    import time

    import numpy as np

    import hetero

    class Drawn:
        def __init__(self, num_samples, kind):
            self.num_samples = num_samples
            self.kind = kind

        def __len__(self):
            return self.num_samples

        def __getitem__(self, index):
            if self.kind == "broken" and index == 11:
                raise KeyError("no such file")
            if self.kind == "slow" and index == 11:
                time.sleep(0.5)
            noise = np.random.rand(3).astype(np.float32) + np.float32(random.random())
            image = np.full((4, 4, 3), index, np.uint8)
            if self.kind == "longer":
                return np.zeros(3 + index // 12, np.int64)
            if self.kind == "pair":
                return image.astype(np.float32), noise[:1]
            if self.kind == "none":
                return index, None
            return {"index": index, "image": image, "noise": noise, "name": f"sample {index}"}

    def collate(samples):
        if samples[0] is None or (isinstance(samples[0], tuple) and samples[0][1] is None):
            return {"index": [index for index, _ in samples], "mask": None}
        return hetero.collate_arrays(samples)

    @hetero.dataset(collate_fn=collate)
    def tf_test_drawn(num_samples=23, kind="plain"):
        return Drawn(num_samples, kind)

    @hetero.dataset(collate_fn=collate)
    def tf_test_sources():
        return hetero.Sources(a=Drawn(30, "plain"), b=Drawn(10, "plain"))
"""


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The script's data sets, in this process too."""
    with imported_script(tmp_path_factory.mktemp("script"), "tf_test_script", SCRIPT) as module:
        yield module


class StoppingJob(ServedJob):
    """A job that may be asked to stop. It ends before the step ``stop_at``, counted from 1, or never if that is 0."""

    stop_at = 0
    num_steps = 0
    is_wait_over = False
    hidden_error: Exception | None = None

    def check_stop(self, timer: object) -> None:
        self.num_steps += 1
        if self.num_steps == self.stop_at:
            raise SystemExit(143)

    def must_end_wait(self, is_starved: bool) -> bool:
        return self.is_wait_over

    def end(self) -> None:
        raise SystemExit(143)


@pytest.fixture(scope="module")
def num_endpoints() -> int:
    """How many serve a module's tests."""
    return 2


@pytest.fixture(scope="module")
def served(script: Any, num_endpoints: int) -> Iterator[StoppingJob]:
    """Endpoints, for all tests of a module."""
    path = Path(script.__file__)
    job = StoppingJob(path.parent, path)
    try:
        job.start(num_endpoints)
        yield job
    finally:
        job.stop()


@pytest.fixture
def job(served: StoppingJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoppingJob]:
    """This process is the only rank of a job with endpoints."""
    monkeypatch.setattr(control, "_session", served)
    monkeypatch.setattr(pipeline, "_num_verified", {})
    monkeypatch.setattr(served, "rank", 0)
    monkeypatch.setattr(served, "world_size", 1)
    served.timers.clear()
    served.stop_at = served.num_steps = 0
    served.is_wait_over, served.hidden_error = False, None
    yield served
    hetero.spec.set_describer(None)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the dispatcher of tf.data.service listens, for all tests of a module."""
    script = Path(__file__).with_name("tf_servers.py")
    servers = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert servers.stdout is not None
        yield servers.stdout.readline().strip()
    finally:
        servers.kill()
        servers.communicate()


@pytest.fixture
def service_job(
    address: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[service_jobs.Job]:
    """This process is a rank of a job with ``--data-service tf``. Each test is another job."""
    made = service_jobs.Job("tf")
    made.job_id = request.node.name
    made.tf_servers.replace([service_jobs.dispatcher_record(address)])
    monkeypatch.setattr(control, "_session", made)
    monkeypatch.setattr("hetero.tf.served._num_named", collections.Counter())
    yield made
    gc.collect()  # iterators of a test end before the servers do


@pytest.fixture(params=["no launcher", "homogeneous"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> service_jobs.Job | None:
    """A job without data hosts, and a script without a job."""
    made = None if request.param == "no launcher" else service_jobs.Job("")
    monkeypatch.setattr(control, "_session", made)
    return made

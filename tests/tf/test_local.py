"""Jobs without endpoints: processes of this one's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hetero.control.rank import session as control
from hetero.control.rank.stopping import StopError
from hetero.errors import ConfigError
from hetero.loaders import local_endpoints
from hetero.loaders.pipeline import LoaderOptions
from hetero.tf.feed import Feed
from tests.support.tf import expected
from tests.support.torch.endpoints import ServedJob

pytestmark = pytest.mark.integration


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def endpoints(script: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[local_endpoints.LocalEndpoints]:
    """Two of them. Afterwards none is left."""
    monkeypatch.setattr(local_endpoints, "script_path", lambda: str(Path(script.__file__)))
    monkeypatch.setattr(local_endpoints, "_started", {})
    monkeypatch.setattr(local_endpoints, "LOG_INTERVAL_S", 0.0)
    made = local_endpoints.local_endpoints(2)
    pids = made._pool.pids
    assert len(pids) == 2
    yield made
    made.close()
    made.close()
    assert not any(map(lives, pids))


def make(script: Any) -> Feed:
    options = LoaderOptions(batch_size=4, shuffle=True, seed=5)
    return Feed(script.tf_test_drawn(num_samples=200), options, num_workers=2, prefetch_factor=None)


def test_own_processes_yield_the_same_batches_also_if_one_is_killed(
    script: Any, endpoints: local_endpoints.LocalEndpoints, caplog: pytest.LogCaptureFixture
) -> None:
    feed = make(script)
    said = [record.getMessage() for record in caplog.get_records("setup")]
    assert any("waiting for 2 processes that import" in line for line in said)
    assert local_endpoints.local_endpoints(2) is endpoints
    found, killed = [], 0
    for number, batch in enumerate(feed.produce()):
        found.append(batch)
        if number == 10:
            killed = endpoints._pool.pids[0]
            os.kill(killed, signal.SIGKILL)
    wanted = expected.batches(feed.subject, epoch=0, batch_size=4, seed=5, shuffle=True)
    assert len(found) == len(wanted) == 50
    for one, other in zip(found, wanted, strict=True):
        assert one["name"] == other["name"]
        np.testing.assert_array_equal(one["noise"], other["noise"])
    left = feed.produce()
    next(left)
    with endpoints.fleet.lock:  # in whose midst the collector drops an iterator, and TensorFlow ends its pass elsewhere
        ending = threading.Thread(target=left.close, daemon=True)
        ending.start()
        ending.join(100.0)
        assert not ending.is_alive()
    deadline_s = time.monotonic() + 30.0
    while killed in endpoints._pool.pids or len(endpoints._pool.pids) < 2:  # it is started again, for the next pass
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_job_that_is_to_stop_ends_a_wait_for_its_own_processes(
    script: Any, endpoints: local_endpoints.LocalEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras would not come back from such a wait, and the launcher would kill the rank."""
    job = ServedJob(Path(script.__file__).parent, Path(script.__file__))
    monkeypatch.setattr(job, "remote", False)
    monkeypatch.setattr(job, "must_end_wait", lambda is_starved: True, raising=False)
    monkeypatch.setattr(control, "_session", job)
    options = LoaderOptions(batch_size=4, shuffle=False)
    feed = Feed(script.tf_test_drawn(kind="slow"), options, num_workers=2, prefetch_factor=None)
    with pytest.raises(StopError, match="asked to stop"):
        list(feed.produce())


def test_script_that_registers_nothing_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("import hetero\n")
    monkeypatch.setattr(local_endpoints, "script_path", lambda: str(script))
    with pytest.raises(ConfigError, match="registers no data set"):
        local_endpoints.LocalEndpoints(1)


def test_script_that_is_run_as_a_module_is_known_by_its_name(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    text = """
from hetero.loaders.local_endpoints import _module_name, script_path

path = script_path()
print(_module_name(path), path)
"""
    for name in ("train", "__main__"):
        (package / f"{name}.py").write_text(text)
    words = (["package/train.py"], ["-m", "package.train"], ["-m", "package"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    commands = [[sys.executable, *each] for each in words]
    found = [subprocess.check_output(each, cwd=tmp_path, env=environment, text=True).split() for each in commands]
    files = [str(package / name) for name in ("train.py", "train.py", "__main__.py")]
    assert found == [["None", files[0]], ["package.train", files[1]], ["package", files[2]]]


def test_session_without_a_script_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("__main__.__file__")
    with pytest.raises(ConfigError, match="this process does not run a script"):
        local_endpoints.script_path()

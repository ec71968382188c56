"""A wall clock that jumps by an hour, back and forth, in every process of a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.integration.harness import StartJob, chains, chains_alone

# Python imports it by itself at its start. libfaketime may be missing, so native code sees no jump: gRPC, which
# takes the time in Python and has native code make a deadline of it, must see none either.
JUMPING = """
import os, random, sys, time
_chance = random.Random(os.getpid())
_read, _read_ns = time.time, time.time_ns
_state = {"offset_s": 0}

def _offset_s():
    if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc"):
        return 0
    if not _state["offset_s"]:
        open(os.path.join(os.environ["JUMPS"], str(os.getpid())), "w").close()
    if not _state["offset_s"] or _chance.random() < 0.2:
        _state["offset_s"] = _chance.choice((-3600, 3600))
    return _state["offset_s"]

time.time = lambda: _read() + _offset_s()
time.time_ns = lambda: _read_ns() + _offset_s() * 10**9
"""


def durations(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the durations of a report, with where they stand."""
    if isinstance(value, dict):
        for name, part in value.items():
            is_duration = name.endswith("_s") and not name.endswith(("_per_s", "_monotonic_s"))
            if is_duration and isinstance(part, int | float):
                yield f"{path}.{name}", part
            yield from durations(part, f"{path}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from durations(part, f"{path}[{number}]")


@pytest.mark.fault("F25")
def test_wall_clock_that_jumps_changes_nothing(start_job: StartJob, tmp_path: Path) -> None:
    jumps, hook = tmp_path / "jumps", tmp_path / "hook"
    jumps.mkdir()
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(JUMPING)
    groups = ["data_group=ml.c5.9xlarge:1", "dnn_group=ml.p3.2xlarge:1"]
    flags = ["--nproc-per-node", "1", "--endpoints-per-host", "1"]
    samples = ["--epochs", "1", "--num-samples", "400"]
    args = [*samples, "--step-s", "0.05"]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(hook), *sys.path]),
        "JUMPS": str(jumps),
        "HETERO_TIME_SCALE": "0.2",
    }

    begin_s = time.monotonic()
    job = start_job(groups, *flags, args=args, environment=environment)
    assert job.wait() == 0, job.output
    elapsed_s = time.monotonic() - begin_s
    assert chains(job.directory, 1) == chains_alone(*samples)
    # At the least simulate, launchers, agent and rank. Endpoints are forked from a process that has seen it.
    assert len(list(jumps.iterdir())) >= 5
    found = dict(durations(job.report()))
    assert len(found) > 5
    assert {path: seconds for path, seconds in found.items() if not 0.0 <= seconds <= elapsed_s + 300.0} == {}
    assert 0.0 < found[".run.wall_s"] <= elapsed_s
    assert all(begin_s <= host["began_monotonic_s"] <= begin_s + elapsed_s for host in job.report()["run"]["hosts"])
    assert "fell silent" not in job.output
    assert "stood still" not in job.output

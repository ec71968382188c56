"""Endpoints that are alive and stuck, and endpoints that are only suspended: real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hetero.batches.request import BatchRequest
from hetero.reader.reader import Reader
from hetero.system.process import is_suspended

HANGS = '''
import ctypes
import pathlib
import threading

def hold_interpreter():
    """Lock a mutex twice, in native code that keeps the interpreter: nothing but SIGKILL ends that."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def hold_lock():
    """Take the lock of the service that runs this, and wait for ever."""
    import gc
    from hetero.endpoint.service import DataServicer
    (service,) = [found for found in gc.get_objects() if isinstance(found, DataServicer)]
    service._lock.acquire()
    threading.Event().wait()

class Hanging:
    def __init__(self, how, once):
        self.how, self.once = how, pathlib.Path(once)

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if not self.once.exists():
            self.once.touch()
            {"interpreter": hold_interpreter, "lock": hold_lock}[self.how]()
        return {"index": np.int64(index)}

@hetero.dataset(collate_fn=together, fingerprint="hanging")
def hanging(how, once):
    return Hanging(how, once)
'''


@pytest.mark.fault("F6")
@pytest.mark.parametrize("how", ["interpreter", "lock"])
def test_stuck_endpoint_shows_its_stacks_and_is_replaced(job: Any, tools: Any, tmp_path: Path, how: str) -> None:
    job.script.write_text(job.script.read_text() + HANGS)
    pool = job.pool(stuck_s=3.0)
    once = tmp_path / "once"
    wanted: list[BatchRequest] = tools.requests(tools.spec("hanging", how=how, once=str(once)), num_batches=4)
    # A describing probe may be what hangs: either way the batches come in the end.
    with Reader(job.fleet(), iter(wanted)) as reader:
        found = list(reader)
    assert [batch["index"].tolist() for batch in found] == [request.work.indices.tolist() for request in wanted]
    assert pool.num_restarts == pool.num_stuck == 1
    assert any(f"hold_{how}" in line for line in job.lines), job.lines


@pytest.mark.fault("F5")
def test_suspended_endpoint_is_left_alone_and_works_on(job: Any, tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    pool = job.pool(stuck_s=3.0)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        tools.wait_for(lambda: is_suspended(pid))
        tools.wait_for(lambda: "is suspended" in caplog.text)
    finally:
        os.kill(pid, signal.SIGCONT)
    wanted = tools.requests(tools.spec())
    with Reader(job.fleet(), iter(wanted)) as reader:
        assert len(list(reader)) == len(wanted)
    assert pool.pids == (pid,)
    assert pool.num_restarts == 0

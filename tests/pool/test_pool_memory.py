"""A process with a pool of endpoints may be the trainer. Its threads use freed memory again."""

from __future__ import annotations

import pytest

from tests.support.freed_memory import LIVE_THREADS, MAX_FAULTS_IF_REUSED, needs_glibc, page_faults_of_threads

POOL = """
from hetero.endpoint.options import EndpointOptions
from hetero.pool.pool import EndpointPool, PoolOptions
options = EndpointOptions(host="algo-1", address="127.0.0.1", script="none.py", num_endpoints=1, job_id="j")
pool = EndpointPool(PoolOptions(endpoint=options, num_at_start=0), lambda records: None)
pool.start()
"""


@needs_glibc
@pytest.mark.parametrize("before", ["", LIVE_THREADS], ids=["a new process", "a process with threads"])
def test_threads_use_freed_memory_again_although_the_pool_has_a_thread(before: str) -> None:
    assert page_faults_of_threads(before + POOL) < MAX_FAULTS_IF_REUSED

"""A process with a pool of endpoints may be the trainer. Its threads use freed memory again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ARRAYS_IN_THREADS = """
import resource
import threading
import numpy as np
from hetero.dataplane.endpoint.options import EndpointOptions
from hetero.dataplane.pool.pool import EndpointPool, PoolOptions
options = EndpointOptions(host="algo-1", address="127.0.0.1", script="none.py", num_endpoints=1, job_id="j")
pool = EndpointPool(PoolOptions(endpoint=options, num_at_start=0), lambda records: None)
pool.start()
def allocate():
    [np.ones(2**20, np.uint8) for _ in range(100)]  # more than one of the 64 MiB pieces of a thread's own memory
def page_faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin
page_faults()
print(page_faults())
pool.stop(0.0)
"""


@pytest.mark.skipif("glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="only glibc has mallopt")
def test_threads_use_freed_memory_again_although_the_pool_has_a_thread() -> None:
    output = subprocess.check_output([sys.executable, "-c", ARRAYS_IN_THREADS], text=True)
    assert int(output) < 2500  # fresh memory for each array takes 128,000

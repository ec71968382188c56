"""A process that receives batches from an endpoint over loopback, as a rank does, and measures its own CPU time.

`hetero.sample_costs.measuring` runs it as ``python -m hetero.sample_costs.receiving FD``.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.control.members.directory import Directory
from hetero.control.security import Token, token_memfd
from hetero.endpoint.endpoint import configure_process
from hetero.endpoint.options import EndpointOptions
from hetero.errors import EndpointUnavailableError, HeteroError
from hetero.pool.pool import EndpointPool, PoolOptions
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader
from hetero.sample_costs.options import Channel
from hetero.sample_costs.ready_batches import hetero_profile_batch
from hetero.system.memory import keep_freed_memory
from hetero.system.process import die_with_parent
from hetero.system.waits import CALL_TIMEOUT_S

__all__ = ["main", "receive"]

_READY_S = 20.0
_NUM_FIRST = 3
"""Number of first batches that are not measured."""


def receive(leaf_bytes: Sequence[int], *, seconds: float) -> float:
    """Return the CPU seconds of this process per 10^9 bytes received. Blocks for a few seconds.

    Args:
        leaf_bytes: Bytes of each leaf of a batch.
        seconds: Duration of the measurement.

    Raises:
        HeteroError: If the endpoint cannot be started or does not answer.
    """
    # Start one endpoint in the way of a launcher. The pool puts the endpoint into the directory, where the fleet finds
    # it.
    token = Token.generate()
    descriptor, token_path = token_memfd(token)
    directory = Directory()
    job_id = f"profile-{os.getpid()}"
    options = PoolOptions(
        endpoint=EndpointOptions(
            script="hetero.sample_costs.ready_batches",
            is_module=True,
            host="local",
            address="127.0.0.1",
            num_endpoints=1,
            job_id=job_id,
            log_level="WARNING",
        ),
        token_path=token_path,
        # The endpoint must be in the process group of the profile run, to be killed with it.
        in_own_session=False,
    )
    spec = hetero_profile_batch(leaf_bytes=list(leaf_bytes))

    def requests() -> Iterator[BatchRequest]:
        # Each sample is already a whole batch. So send it as it is, without collation and conversion to tensors.
        for number in itertools.count():
            work = IndexedWork(np.array([number]))
            yield BatchRequest(spec=spec, work=work, seed=0, epoch=0, position=number, collate=False, as_is=True)

    pool = EndpointPool(options, directory.replace, _show)
    pool.start()
    try:
        if not pool.wait_ready(_READY_S):
            raise EndpointUnavailableError(f"the endpoint for the measurement was not ready within {_READY_S:.0f} s")
        with Fleet(directory, token, job_id=job_id) as fleet, Reader(fleet, requests()) as reader:
            # The first batches are not measured, because they open connections and fill caches.
            for _ in range(_NUM_FIRST):
                next(reader)
            num_batches = 0
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            while time.perf_counter() - begin_s < seconds:
                next(reader)
                num_batches += 1
            return (time.process_time() - begin_cpu_s) / (num_batches * sum(leaf_bytes) / 1e9)
    finally:
        pool.stop(grace_s=0.0)
        os.close(descriptor)


def _show(_name: str, line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> None:
    """Measure the CPU time of receiving once, and send the result to the measuring process."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), "the process that measures")
    facts = channel.receive(CALL_TIMEOUT_S)
    die_with_parent(facts["parent_pid"])
    configure_process("WARNING")
    keep_freed_memory()
    try:
        channel.send({"cpu_s_per_gb": receive(facts["leaf_bytes"], seconds=facts["seconds"])})
    except HeteroError as error:
        channel.send_error(error)


if __name__ == "__main__":
    main()

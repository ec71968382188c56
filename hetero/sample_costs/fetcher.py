"""A process that fetches samples like an endpoint, on commands of `hetero.sample_costs.measuring`.

The process is forked from the process that has imported the script. If forking is not safe, it is a new process that
imports the script itself: ``python -m hetero.sample_costs.fetcher FD``.
"""

from __future__ import annotations

import itertools
import logging
import socket
import sys
import time
from typing import Any

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import fetch
from hetero.datasets import build
from hetero.documents.records import decode, encode
from hetero.endpoint.endpoint import configure_process, exit_process
from hetero.endpoint.script import load_script
from hetero.errors import DatasetError, ExitCode, HeteroError
from hetero.sample_costs.contents import measure_contents
from hetero.sample_costs.options import Channel, CostOptions
from hetero.sample_costs.samples import measure_samples, requests_of, split
from hetero.system.memory import keep_freed_memory, process_memory
from hetero.system.process import die_with_parent, limit_threads
from hetero.system.waits import CALL_TIMEOUT_S
from hetero.wire.framing import EncodedBatch

__all__ = ["Fetcher", "main"]

logger = logging.getLogger(__name__)


class Fetcher:
    """Executes commands until the channel is closed.

    Args:
        channel: Commands and answers.
        options: What to measure.
        index: Number of this process, from 0.
    """

    def __init__(self, channel: Channel, options: CostOptions, index: int) -> None:
        assert options.work is not None
        self._channel = channel
        self._options = options
        # If samples wait for storage, there may be more processes than CPUs. Then several share a worker number.
        self._index = index % options.num_processes
        self._work = options.work
        self._requests = requests_of(options.work)
        self._built: BuiltDataset | None = None

    def serve(self) -> None:
        """Execute commands until the channel is closed. Blocks.

        The field ``do`` of a command names a method of this class. The other fields are the arguments of the method.
        """
        # An endpoint does the same, and the figures are for endpoints.
        limit_threads()
        while True:
            try:
                command = self._channel.receive(timeout_s=None)
            except HeteroError:  # the channel is closed
                return
            try:
                self._channel.send(getattr(self, f"do_{command.pop('do')}")(**command))
            except HeteroError as error:
                self._channel.send_error(error)

    def do_build(self) -> dict[str, Any]:
        """Build the data set. Answer with the seconds that this took."""
        begin_s = time.perf_counter()
        self._built = build(
            self._requests[0].spec,
            host=self._options.host,
            worker_index=self._index,
            num_workers=self._options.num_processes,
        )
        limit_threads()  # the factory may have imported torch or OpenCV just now
        return {"seconds": time.perf_counter() - begin_s}

    def do_measure(self, seconds: float) -> dict[str, Any]:
        """Measure samples and the contents of batches."""
        assert self._built is not None
        times = measure_samples(self._built, self._requests, seconds=seconds)
        contents = measure_contents(times.batches, batch_samples=self._work.batch_samples)
        return {
            "supply": encode(times.supply()),
            "contents": encode(contents),
            "read_bytes_per_sample": times.read_bytes_per_sample,
            "cold_wait_s": times.cold_wait_s,
        }

    def do_burst(self, seconds: float, chunk: int) -> dict[str, Any]:
        """Fetch and encode samples for some seconds, ``chunk`` samples at a time.

        Answer with the number of samples, the wall time and the CPU time in seconds.
        """
        assert self._built is not None
        parts = list(split(self._requests, chunk))
        # Each process begins at another part, because processes of a job fetch different samples.
        begin = self._index * len(parts) // self._options.num_processes
        num_samples, num_failures = 0, 0
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for request in itertools.cycle([*parts[begin:], *parts[:begin]]):
            if time.perf_counter() - begin_s >= seconds:
                break
            try:
                batch = fetch(self._built, request)
            except DatasetError:
                # With more failures than parts, probably all parts raise, and there is nothing to measure.
                num_failures += 1
                if num_failures > len(parts):
                    raise
                continue
            # An endpoint encodes each batch, so encoding is a part of what a batch costs.
            EncodedBatch(batch, copy=not self._built.makes_new_memory(collate=request.collate))
            num_samples += request.work.num_samples
        return {
            "num_samples": num_samples,
            "wall_s": time.perf_counter() - begin_s,
            "cpu_s": time.process_time() - begin_cpu_s,
        }

    def do_memory(self) -> dict[str, Any]:
        """Answer with the private and shared bytes of this process. None if the system does not report a number."""
        found = process_memory()
        if found is None:
            return {"private": None, "shared": None}
        return {"private": found.private_bytes, "shared": found.shared_bytes}


def main() -> None:
    """Import the script in a new process, and serve as a fetcher. Used if the measuring process must not be forked."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), "the process that measures")
    facts = channel.receive(CALL_TIMEOUT_S)
    die_with_parent(facts["parent_pid"])
    configure_process("WARNING")
    # An endpoint does the same, and the figures are for endpoints.
    keep_freed_memory()
    options = decode(CostOptions, facts["options"])
    try:
        load_script(options.script, options.script_args, host=options.host, is_module=options.is_module)
        # Configure the process again, because the script may have set up logging or signals.
        configure_process("WARNING")
        channel.send({"loaded": True})
        Fetcher(channel, options, facts["index"]).serve()
    except HeteroError as error:
        channel.send_error(error)
    # Nobody reads the status. The parent has the error, or notices that the channel is closed.
    exit_process(int(ExitCode.OK))


if __name__ == "__main__":
    main()

"""tf.data service for benchmarks: a dispatcher and workers, each in a server process of the harness."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import harness


class Service:
    """A dispatcher and its workers. They are ready when it is made. Needs `serve` among the servers, as ``tf-data``.

    Args:
        num_workers: Processes beside the dispatcher's.
        threads: Threads of each process. None: as TensorFlow decides.
        heartbeat_interval_ms: Interval of the workers. None: as TensorFlow decides.
    """

    def __init__(
        self, num_workers: int, *, threads: int | None = None, heartbeat_interval_ms: int | None = None
    ) -> None:
        dispatcher = harness.server("tf-data", {"threads": threads})
        self.url: str = dispatcher.ask()["url"]
        worker = {"dispatcher_address": self.url.split("://")[1], "heartbeat_interval_ms": heartbeat_interval_ms}
        workers = [harness.server("tf-data", {"threads": threads, "worker": worker}) for _ in range(num_workers)]
        self._processes = [*workers, dispatcher]
        for process in workers:
            process.ask()

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.stop(2.0)


@contextlib.contextmanager
def serve(config: Mapping[str, Any]) -> Iterator[Any]:
    """Run a worker if ``config`` names its dispatcher, otherwise run a dispatcher."""
    threads = config["threads"]
    if threads is not None:
        os.environ.update(dict.fromkeys(("TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"), str(threads)))
    import tensorflow as tf

    if threads is not None:
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    service = tf.data.experimental.service
    if "worker" in config:
        server: Any = service.WorkerServer(service.WorkerConfig(**config["worker"]))
        yield {}
    else:
        server = service.DispatchServer()
        yield {"url": server.target}
    server.stop()

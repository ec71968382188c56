"""Servers of tf.data.service in a process of their own: a dispatcher, two workers of data hosts, one of a trainer host.

Not in the process of the tests. TensorFlow would read from such workers without a network. And `WorkerServer.stop`
waits for threads of its autotuner, which sleep for up to a minute: here the process just ends.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # no Keras here: the import takes half as long without

import tensorflow as tf
from tensorflow.core.protobuf import service_config_pb2

TRAINER_TAGS = ["COLOCATED"]
"""What TensorFlow calls workers beside trainers. Its WorkerConfig of Python lacks a field for it."""


def worker_config(dispatcher: str, *, tags: list[str]) -> Any:
    return service_config_pb2.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address="localhost:%port%",
        data_transfer_address="localhost:%dts_port%",
        protocol="grpc",
        heartbeat_interval_ms=100,
        worker_tags=tags,
    )


def main() -> None:
    """Serve until the other end of standard input is closed. The dispatcher's address is the only line of output."""
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(worker_addresses=["localhost"] * 3))
    address = dispatcher.target.partition("://")[2]
    _workers = [service.WorkerServer(worker_config(address, tags=tags)) for tags in ([], [], TRAINER_TAGS)]
    print(address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()

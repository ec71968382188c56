"""One server of tf.data.service in a separate process: a dispatcher or a worker.

`hetero.pool.tf_pool` runs this module as ``python -m hetero.pool.tf_server FD``. FD is the descriptor of a packet
socket. The first packet is the configuration. The server then sends an event with its port or its error, and after that
a liveness event every second. If the pool closes the socket, or if the pool ends (parent-death signal), the server
ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from hetero.errors import ConfigError, ExitCode
from hetero.pool.packets import MAX_PACKET_BYTES
from hetero.system.process import die_with_parent

__all__ = ["main"]

_LIVENESS_PERIOD_S = 1.0
"""Seconds between liveness events."""
_HEARTBEAT_MS = 2000
"""Milliseconds between a worker's heartbeats to the dispatcher.

With TensorFlow's own 30 s, a restarted dispatcher would have no workers for 30 s.
"""


def main() -> None:
    """Run the server that the pool describes in its first packet, until the pool closes the socket."""
    pool = socket.socket(fileno=int(sys.argv[1]))
    configuration = json.loads(pool.recv(MAX_PACKET_BYTES))
    die_with_parent(configuration["parent_pid"])
    # Ignore Ctrl-C. It also reaches the launcher, which stops everything in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pool sends SIGUSR1 to a stuck server before it kills the server. The stacks then show where it was stuck.
    faulthandler.register(signal.SIGUSR1)
    names = {name: configuration[name] for name in ("index", "incarnation")}
    try:
        server = _start(configuration)
    except ConfigError as error:
        # The pool expects `child` in this event. It is None, because no child process has failed.
        _send(pool, event="failed", child=None, kind=type(error).__name__, message=str(error))
        os._exit(error.exit_code)
    _send(pool, event="ready", pid=os.getpid(), port=_port(server), **names)
    # The statistics are a sign of life, which the pool expects in each period.
    while not _closes_within_period(pool):
        _send(pool, event="statistics", **names)
    sys.stderr.flush()
    # Do not call the server's own stop. It blocks the interpreter while it waits for TensorFlow's autotuner, which
    # sleeps for up to a minute. Ranks that have not ended would lose their connection in either case.
    os._exit(ExitCode.OK)


def _start(configuration: dict[str, Any]) -> Any:
    """Start the server that the configuration describes. Without a dispatcher's address it is a dispatcher.

    Raises:
        ConfigError: TensorFlow is not installed.
    """
    # A server does not need Keras, but TensorFlow imports it, and Keras imports Matplotlib and scikit-learn if they are
    # installed. With this variable, TensorFlow imports tf_keras instead of Keras. If tf_keras is not installed, it
    # imports neither, and the import takes 2.8 s of CPU instead of 5.0.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    try:
        import tensorflow as tf
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ConfigError(
            "--data-service tf needs TensorFlow on data hosts, but this host does not have it; "
            "pip install 'tensorflow>=2.16'"
        ) from None
    service = tf.data.experimental.service
    dispatcher, port = configuration["dispatcher"], configuration["port"]
    if not dispatcher:
        return service.DispatchServer(
            service.DispatcherConfig(
                port=port,
                protocol="grpc",
                work_dir=configuration["work_dir"],
                fault_tolerant_mode=configuration["work_dir"] is not None,
                worker_timeout_ms=int(configuration["worker_timeout_s"] * 1000),
                # The address of a host appears once for each of its workers.
                worker_addresses=[
                    address for address, number in configuration["worker_addresses"] for _ in range(number)
                ],
            )
        )
    # Use the protobuf message, because the WorkerConfig of the public API has no field for tags.
    from tensorflow.core.protobuf.service_config_pb2 import WorkerConfig

    return service.WorkerServer(
        WorkerConfig(
            dispatcher_address=dispatcher,
            worker_address=configuration["worker_address"],
            port=port,
            protocol="grpc",
            heartbeat_interval_ms=_HEARTBEAT_MS,
            worker_tags=configuration["worker_tags"],
        )
    )


def _port(server: Any) -> int:
    # TensorFlow has no public way to get a worker's port.
    return int(server._address.rpartition(":")[2])


def _closes_within_period(pool: socket.socket) -> bool:
    """Wait for one liveness period at most. Return whether the pool has closed the socket."""
    readable, _, _ = select.select([pool], [], [], _LIVENESS_PERIOD_S)
    return bool(readable) and not pool.recv(MAX_PACKET_BYTES)


def _send(pool: socket.socket, **event: object) -> None:
    # If the pool is gone, ignore the error, because `_closes_within_period` will report this.
    with contextlib.suppress(OSError):
        pool.send(json.dumps(event).encode())


if __name__ == "__main__":
    main()

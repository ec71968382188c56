"""One preprocessing process: one gRPC server and one delivery on ports of their own, one compute thread.

Started by `hetero.dataplane.endpoint.fork_server`: forked from a process that has imported the
script, or, where forking is not safe, as a fresh process that imports it here.
Ends on SIGTERM: stops accepting, finishes what is in flight within the grace.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.control.health import HEALTH_POLICIES, Health
from hetero.control.security import ServerInterceptor, token_from_environment
from hetero.dataplane.endpoint.compute import Compute
from hetero.dataplane.endpoint.faulty import faulty_calls
from hetero.dataplane.endpoint.script import load_script
from hetero.dataplane.endpoint.service import DATA_POLICIES, DataService
from hetero.dataplane.statistics import EndpointStatistics
from hetero.errors import ChildFailure, ExitCode, HeteroError
from hetero.system.memory import keep_freed_memory
from hetero.system.process import SignalWaiter, allow_descriptors, die_with_parent, limit_threads
from hetero.wire import channels
from hetero.wire.limits import Limits
from hetero.wire.tls import Tls

import grpc  # isort: skip

__all__ = ["EndpointOptions", "main", "run_endpoint"]

_REPORT_INTERVAL_S = 1.0
_EVENT_TIMEOUT_S = 5.0
_MAX_CALLS = 1024
"""Each holds a thread, that of a rank which attends for as long as it does."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """What an endpoint is told at its start."""

    host: str
    index: int
    """Among the endpoints of its host."""
    num_endpoints: int
    """Of its host."""
    address: str
    """This host's numeric address."""
    incarnation: str
    job_id: str
    tls_dir: str | None = None
    """Folder with this host's certificate; None: plaintext."""
    num_slots: int = 1
    sample_time_s: float = 0.0
    max_batch_bytes: int = Limits().max_batch_bytes
    grace_s: float = 5.0
    """For calls in flight when it is told to end."""
    script: str = ""
    is_module: bool = False
    script_args: tuple[str, ...] = ()
    log_level: str = "INFO"

    @property
    def name(self) -> str:
        """Id in the directory: ``algo-1/0``."""
        return f"{self.host}/{self.index}"


class Endpoint:
    """The server and what it needs; a context manager.

    Args:
        options: See `EndpointOptions`.
        on_build: Called when the building of a data set begins (False), and has ended (True).

    Raises:
        AuthenticationError: The token file or the certificate cannot be used.
        PortError: The address cannot be bound.
    """

    def __init__(self, options: EndpointOptions, on_build: Callable[[bool], None] = lambda has_ended: None) -> None:
        token = token_from_environment(os.environ)
        tls = None if options.tls_dir is None else Tls(Path(options.tls_dir), options.host)
        # Each request in work holds a batch. All ranks together have about two per slot on their way; beyond this bound
        # they are told to come back, instead of queueing unseen.
        max_requests = 64 + 4 * options.num_slots
        self._options = options
        self._compute = Compute(options.num_slots)
        self._service = DataService(
            self._compute,
            address=options.address,
            max_requests=max_requests,
            name=options.name,
            worker_index=options.index,
            num_workers=options.num_endpoints,
            sample_time_s=options.sample_time_s,
            limits=Limits(max_batch_bytes=options.max_batch_bytes),
            on_build=on_build,
            tls=tls,
        )
        self._health = Health(["hetero.data"])
        self._access = ServerInterceptor(
            token,
            job_id=options.job_id,
            policies={**DATA_POLICIES, **HEALTH_POLICIES},
            incarnation=options.incarnation,
        )
        self._server = grpc.server(
            ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="call"),
            handlers=[self._service.handler(), self._health.handler()],
            interceptors=[self._access, *faulty_calls()],
            options=channels.server_options(max_streams=_MAX_CALLS),
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        self.port = channels.bind(self._server, options.address, tls=tls)

    def __enter__(self) -> Endpoint:
        self._service.delivery.start()
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)

    def stop(self, grace_s: float) -> None:
        """Take no new requests, give those in progress ``grace_s`` seconds, end; idempotent."""
        self._health.set_serving(False)
        self._service.delivery.stop(grace_s)
        self._server.stop(0.0).wait(1.0)
        self._compute.close()

    def statistics(self) -> EndpointStatistics:
        """Return the counters; blocks if the service is stuck, so that an answer is a sign of life."""
        self._service.show_life()
        return EndpointStatistics(
            num_batches=self._service.delivery.num_batches,
            num_overruns=self._compute.num_overruns,
            auth_failures=self._access.auth_failures + self._service.delivery.num_turned_out,
        )


def run_endpoint(options: EndpointOptions, reports: socket.socket) -> int:
    """Serve until SIGTERM; blocks the main thread.

    Args:
        options: See `EndpointOptions`; the script has been imported.
        reports: To the pool: ``ready``, ``statistics`` and ``failed`` events.

    Returns:
        The exit status.
    """
    limit_threads()
    allow_descriptors()
    with SignalWaiter((signal.SIGTERM,)) as signals:

        def report(event: str, facts: dict[str, Any]) -> None:
            send_event(reports, event, index=options.index, incarnation=options.incarnation, **facts)

        def report_build(has_ended: bool) -> None:
            report("build", {"has_ended": has_ended})

        try:
            endpoint = Endpoint(options, report_build)
        except HeteroError as error:
            report_failure(reports, error)
            return int(error.exit_code)
        with endpoint:
            report("ready", {"pid": os.getpid(), "port": endpoint.port})
            while signal.SIGTERM not in signals.wait(_REPORT_INTERVAL_S):
                report("statistics", dataclasses.asdict(endpoint.statistics()))  # and a beat, see `beats`
            endpoint.stop(options.grace_s)
            report("statistics", dataclasses.asdict(endpoint.statistics()))
    return int(ExitCode.OK)


def send_event(reports: socket.socket, event: str, **facts: object) -> None:
    """Send one event to the pool; a pool that is gone or does not read is no reason to stop serving."""
    message = json.dumps({"event": event, **facts}).encode()
    deadline_s = time.monotonic() + _EVENT_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            reports.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            if event == "statistics":
                return  # the next one says more
            select.select([], [reports], [], _EVENT_TIMEOUT_S)
        except OSError:
            return


def report_failure(reports: socket.socket, error: HeteroError) -> None:
    """Tell the pool why this process cannot go on."""
    child = dataclasses.asdict(error.record) if isinstance(error.record, ChildFailure) else None
    send_event(reports, "failed", kind=type(error).__name__, message=str(error)[:32_768], child=child)


def configure_process(level: str) -> None:
    """Set up logging to stderr, stack dumps on SIGUSR1, and no reaction to the terminal's Ctrl-C."""
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", force=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # The launcher decides what Ctrl-C means; it reaches the whole foreground group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def exit_process(status: int, *, flush: Callable[[], None] = logging.shutdown) -> None:
    """End this process without the parent's exit handlers and without waiting for threads."""
    flush()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)


def main() -> None:
    """Run as a fresh process: options as JSON on stdin, the pool's socket as the descriptor in ``argv[1]``."""
    given = json.load(sys.stdin)
    die_with_parent(given.pop("parent_pid"))
    options = EndpointOptions(**{**given, "script_args": tuple(given["script_args"])})
    configure_process(options.log_level)
    keep_freed_memory()
    reports = socket.socket(fileno=int(sys.argv[1]))
    try:
        load_script(options.script, options.script_args, host=options.name, is_module=options.is_module)
        status = run_endpoint(options, reports)
    except HeteroError as error:
        report_failure(reports, error)
        status = int(error.exit_code)
    exit_process(status)


if __name__ == "__main__":
    main()

"""One endpoint process: a gRPC server and a `Delivery`, each on its own port, and compute threads.

`hetero.pool.fork_server` imports the script and forks this process. If forking is not safe, the fork server starts a
fresh process instead, which imports the script itself. On the end signal (`hetero.system.stop_signals`) the endpoint
refuses new requests, finishes the requests in progress within the grace period, and ends.
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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from hetero.batches.request import Helper
from hetero.cache.loads import COUNTS
from hetero.cache.tiers import close_tiers
from hetero.control.members.directory import EndpointRecord
from hetero.control.security import ServerInterceptor, call_metadata, token_from_environment
from hetero.endpoint.compute import Compute
from hetero.endpoint.link import EndpointLink
from hetero.endpoint.options import EndpointOptions
from hetero.endpoint.prebuilt import Prebuilt
from hetero.endpoint.script import load_script
from hetero.endpoint.service import DATA_POLICIES, DataServicer
from hetero.errors import ChildFailure, ExitCode, HeteroError
from hetero.metrics.reading import SHARD, SHARD_WAITS_S, slowest_shards
from hetero.spec import DatasetSpec
from hetero.system.memory import ProcessMemory, be_killed_first, keep_freed_memory, process_memory
from hetero.system.process import SignalWaiter, allow_descriptors, die_with_parent, limit_threads
from hetero.system.stop_signals import end_signal, survive_first_sigterm
from hetero.system.waits import CALL_TIMEOUT_S, LOG_INTERVAL_S
from hetero.wire import channels
from hetero.wire.limits import Limits
from hetero.wire.tls import Tls
from hetero.wire.transports import choose_transport

import grpc  # isort: skip
import grpc._server  # isort: skip - each endpoint would import these two itself, into its private memory
import grpc._utilities  # isort: skip

__all__ = ["Endpoint", "main", "run_endpoint", "run_to_end"]

_REPORT_INTERVAL_S = 1.0
# With a limit of 68 calls, jobs of many ranks and few endpoints reached the limit.
_MAX_CALLS = 1024
"""Largest number of concurrent gRPC calls. Each needs a thread. A rank's call of Attend lasts while the rank reads."""

logger = logging.getLogger(__name__)


class Endpoint:
    """The servers and compute threads of an endpoint. Context manager.

    Args:
        options: The endpoint's settings.
        on_build: Called with False when the build of a data set begins, and with True when it has ended.
        prebuilt: Data sets that the main thread built before this process was forked. If there are any, the main thread
            has to call `compute`, because some objects may be used only by the thread that made them.
        announce: See `hetero.endpoint.service.DataServicer`.

    Raises:
        AuthenticationError: The token file or the certificate cannot be used.
        PortError: The address cannot be bound.
    """

    def __init__(
        self,
        options: EndpointOptions,
        on_build: Callable[[bool], None] = lambda has_ended: None,
        *,
        prebuilt: Mapping[DatasetSpec, Prebuilt] | None = None,
        announce: Callable[[Sequence[DatasetSpec]], object] | None = None,
    ) -> None:
        token = token_from_environment(os.environ)
        tls = None if options.tls_dir is None else Tls(Path(options.tls_dir), options.host)
        # The number of requests is bounded, because each request in progress holds a batch in memory. All ranks
        # together have about two requests per slot in flight, and four are allowed. With a cache, each other host may
        # send two requests for parts, so 96 further requests are enough for 48 hosts. More requests are refused as
        # `Fault.BUSY` and not queued, because readers would not see that they wait in a queue. If a request for a part
        # is refused, the asking endpoint computes the part.
        max_requests = 96 + 4 * options.num_slots
        self._options = options
        self._token = token
        self._tls = tls
        # The main thread computes if it has built the data sets. `run_endpoint` gives the reason.
        self._compute = Compute(options.num_slots, is_served_by_caller=bool(prebuilt))
        self._service = DataServicer(
            self._compute,
            options,
            max_requests=max_requests,
            transport=choose_transport(tls),
            on_build=on_build,
            prebuilt=prebuilt or {},
            announce=announce,
            # Endpoints that emulate vCPUs (a sample time, or several slots) keep an answer until the emulated time is
            # over. Their parts would come too late, so they get no ``connect``. They then tell readers that they keep
            # no samples, and readers let no other endpoint ask them for parts.
            connect=None if options.sample_time_s or options.num_slots > 1 else self._connect,
        )
        self._memory: ProcessMemory | None = None
        self._memory_due_s = time.monotonic() + _REPORT_INTERVAL_S
        self._access = ServerInterceptor(
            token,
            job_id=options.job_id,
            policies=DATA_POLICIES,
            incarnation=options.incarnation,
        )
        self._server = grpc.server(
            ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="call"),
            handlers=[self._service.handler()],
            interceptors=[self._access],
            options=channels.server_options(max_streams=_MAX_CALLS),
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        self.port = channels.bind(self._server, options.address, tls=tls)

    def _connect(self, helper: Helper) -> EndpointLink:
        """Return a link to an endpoint that keeps samples of a batch."""
        record = EndpointRecord(**dataclasses.asdict(helper))
        metadata = call_metadata(self._token, self._options.job_id, incarnation=helper.incarnation)
        return EndpointLink(record, metadata, Limits(max_batch_bytes=self._options.max_batch_bytes), self._tls)

    def __enter__(self) -> Endpoint:
        self._service.delivery.start()
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)

    def compute(self) -> None:
        """Run the user's code on the calling thread until this stops."""
        self._compute.serve()

    def stop(self, grace_s: float) -> None:
        """Accept no new requests, give those in progress ``grace_s`` seconds, and end. Idempotent."""
        # Stop the delivery of batches first, and wait for the grace period. The gRPC server has to serve until then,
        # because the end of an Attend call closes its reader's connections.
        self._service.delivery.stop(grace_s)
        # The grace period is over, so end the remaining calls at once.
        self._server.stop(0.0).wait(1.0)
        self._compute.close()

    def statistics(self, *, reads_memory: bool = False) -> dict[str, float]:
        """Return the counters of this process and its load, which the pool gets.

        This needs the service's locks, and blocks while another thread holds one for ever. So each result also shows
        the pool that the service is not stuck.

        Args:
            reads_memory: Whether to read the memory use now. Otherwise the numbers of bytes may be up to 10 s old.
        """
        now_s = time.monotonic()
        if reads_memory or now_s >= self._memory_due_s:
            # The memory is read seldom, because the kernel counts all pages for it: milliseconds per gigabyte.
            self._memory, self._memory_due_s = process_memory(), now_s + LOG_INTERVAL_S
        return {
            "num_batches": self._service.delivery.num_batches,
            # Requests in progress now.
            "num_requests": self._service.delivery.num_busy,
            # Parts of batches that were computed for other endpoints.
            "num_parts": self._service.num_parts,
            # Emulated batches whose real work took longer than the emulated time.
            "num_overruns": self._compute.num_overruns,
            # Seconds while at least one slot was occupied for longer than emulated.
            "late_s": self._compute.late_s,
            # Seconds spent on batches, over all slots.
            "busy_s": self._compute.busy_s,
            # Seconds of these that the user's code waited, mostly for storage.
            "wait_s": self._compute.wait_s,
            "auth_failures": self._access.auth_failures + self._service.delivery.greeter.num_rejected,
            # Memory that no other process shares, at the latest reading. 0 if the system does not say.
            "private_bytes": 0 if self._memory is None else self._memory.private_bytes,
            "shared_bytes": 0 if self._memory is None else self._memory.shared_bytes,
            # For data sets with a cache: samples from the cache, samples loaded by the user's code, and damaged
            # entries.
            **COUNTS,
            # A copy, because the compute thread adds shards.
            **{SHARD + name: wait_s for name, wait_s in slowest_shards(SHARD_WAITS_S.copy()).items()},
        }


def run_endpoint(
    options: EndpointOptions,
    reports: socket.socket,
    *,
    prebuilt: Mapping[DatasetSpec, Prebuilt] | None = None,
    announce: Callable[[Sequence[DatasetSpec]], object] | None = None,
) -> int:
    """Serve until the end signal. Blocks the main thread, which calls this.

    Args:
        options: The endpoint's settings. This process has imported the script already.
        reports: Socket to the pool for ``ready``, ``build``, ``statistics`` and ``failed`` events.
        prebuilt: Data sets that were built before this process was forked.
        announce: See `hetero.endpoint.service.DataServicer`.

    Returns:
        The exit status.
    """
    limit_threads()
    # The usual soft limit of descriptors is lower than the number of connections that are admitted.
    allow_descriptors()
    # If memory runs out, the kernel kills the process with the highest score. When all had the same score, an endpoint
    # leaked memory in a control group of 900 MB, and the fork server and the launcher were killed too within 0.6 s.
    be_killed_first()
    # The platform may send SIGTERM to every process of the job. Only the launcher acts on it, and ends the endpoints
    # after the ranks.
    survive_first_sigterm()
    with SignalWaiter((end_signal(),)) as signals:

        def report(event: str, facts: dict[str, Any]) -> None:
            send_event(reports, event, index=options.index, incarnation=options.incarnation, **facts)

        def report_build(has_ended: bool) -> None:
            report("build", {"has_ended": has_ended})

        try:
            endpoint = Endpoint(options, report_build, prebuilt=prebuilt, announce=announce)
        except HeteroError as error:
            report_failure(reports, error)
            return int(error.exit_code)

        def serve() -> int:
            """Report statistics until the end signal, then stop the endpoint. Return the exit status."""
            while end_signal() not in signals.wait(_REPORT_INTERVAL_S):
                # The pool takes each report as a sign of life.
                report("statistics", endpoint.statistics())
            endpoint.stop(options.grace_s)
            # Close the cache, because no exit handler does: `exit_process` skips them.
            close_tiers()
            report("statistics", endpoint.statistics(reads_memory=True))
            return int(ExitCode.OK)

        with endpoint:
            report("ready", {"pid": os.getpid(), "port": endpoint.port})
            if not prebuilt:
                return serve()
            # Some objects may be used only by the thread that made them. So the main thread, which has built the data
            # sets, also computes the batches, and another thread serves. The main thread may not come back from the
            # user's code, so the other thread ends the process.
            serving = threading.Thread(target=run_to_end, args=(serve,), name="serve")
            serving.start()
            endpoint.compute()
            serving.join()
            raise AssertionError("unreachable")


def send_event(reports: socket.socket, event: str, **facts: object) -> None:
    """Send one event to the pool. Drop it if the pool is gone or does not read, because the endpoint still serves."""
    message = json.dumps({"event": event, **facts}).encode()
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            # MSG_NOSIGNAL is needed, because a script may have restored SIGPIPE's default action, which ends the
            # process.
            reports.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            if event == "statistics":
                # Statistics may be dropped, because newer ones follow.
                return
            # Wait until the pool has read.
            select.select([], [reports], [], CALL_TIMEOUT_S)
        except OSError:
            return


def report_failure(reports: socket.socket, error: HeteroError) -> None:
    """Report to the pool why this process cannot go on."""
    child = dataclasses.asdict(error.record) if isinstance(error.record, ChildFailure) else None
    send_event(reports, "failed", kind=type(error).__name__, message=str(error)[:32_768], child=child)


def configure_process(level: str) -> None:
    """Set up logging to stderr and stack dumps on SIGUSR1, and ignore the terminal's Ctrl-C."""
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", force=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # Ctrl-C signals the whole foreground process group, but only the launcher reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def exit_process(status: int) -> None:
    """End this process at once, after the text that it has logged and printed is written.

    Python's exit handlers are not called, because a forked process has inherited those of its parent. Threads are not
    waited for.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)


def run_to_end(run: Callable[[], int]) -> NoReturn:
    """Call ``run``, and end this process with the exit status that it returns."""
    status = int(ExitCode.INTERNAL)
    try:
        status = run()
    except BaseException:
        logger.exception("a process of the data host failed")
    finally:
        exit_process(status)
    raise AssertionError("unreachable")


def main() -> None:
    """Run an endpoint in a fresh process. Stdin has the options as JSON. ``argv[1]`` is the pool's descriptor."""
    options, parent_pid = EndpointOptions.from_json(sys.stdin.buffer.read())
    die_with_parent(parent_pid)
    configure_process(options.log_level)
    # Call this before the first thread starts. A thread that has allocated memory keeps its own arena of malloc, and
    # a process with one arena needs the least memory.
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

"""The fork server: one process per data host that imports the script once and forks endpoints.

Forked endpoints share the memory of the script and its libraries, and start in milliseconds. The fork server itself
makes no gRPC channel, CUDA context or TensorFlow runtime. If the script's import started threads, imported TensorFlow
or initialised CUDA, endpoints start as fresh processes instead.

`hetero.pool.pool` runs the fork server as ``python -m hetero.pool.fork_server FD``. FD is the descriptor of a packet
socket. The first packet is the configuration. All other packets are commands. The fork server and the endpoints send
events back.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero.endpoint.endpoint import (
    configure_process,
    exit_process,
    report_failure,
    run_endpoint,
    send_event,
)
from hetero.endpoint.options import EndpointOptions
from hetero.endpoint.prebuilt import Prebuilt, announce
from hetero.endpoint.script import load_script
from hetero.errors import ExitCode, HeteroError
from hetero.pool.builder import Builder, build_all, receive_starts
from hetero.pool.packets import MAX_PACKET_BYTES, make_channel, receive_packet
from hetero.pool.processes import EndpointProcess, exit_status, run_forked, why_not_fork
from hetero.spec import DatasetSpec
from hetero.system.memory import keep_freed_memory, prepare_to_fork
from hetero.system.open_files import open_files
from hetero.system.process import SignalWaiter, describe_exit_status, die_with_parent
from hetero.system.stop_signals import end_signal, sigterm_blocked_in_children, survive_first_sigterm
from hetero.system.waits import POLL_S

__all__ = ["main"]

logger = logging.getLogger(__name__)

# Contract of the fork server. If this does not hold, it is a bug.
#
# Who forks whom
#   1. The pool starts the fork server. It imports the script, and forks endpoints without a data set. So the
#      host is ready before a rank asks for anything, and readers can connect.
#   2. An endpoint that is asked for its first data set announces all data sets that its reader has named, and waits.
#   3. At the first announcement, the fork server forks one builder. The builder builds these data sets, one after the
#      other.
#   4. If a process with one of them must not be forked, the builder ends. Another one builds the others. If none is
#      left, the fork server closes the socket of announcements for good, and each endpoint builds its own.
#   5. If all are built, the builder takes over: the fork server kills its endpoints, and reads no more commands. The
#      builder forks their successors. From then on the builder alone executes the commands of the pool.
#
# What holds at any time
#   - One process reads the pool's commands: the fork server, or the builder that has taken over.
#   - An endpoint that can announce is without a data set, and builds none before the socket of announcements is closed.
#     So it can be killed without loss. Its readers wait for a data set, and then ask its successor.
#   - A successor has the same incarnation and another port, which the pool publishes. The fork server reaps its
#     endpoints before it hands over, so two processes never have one incarnation at the same time.
#   - A data set that is first named after the first announcement is built by each endpoint that is asked for it.
#
# What a fork must not carry
#   - The fork server and the builder have one thread each, no gRPC, CUDA or TensorFlow, and no file or connection that
#     the script or a factory has opened (`why_not_fork`).
#   - A forked process closes the sockets and outputs that it inherits and does not use. Otherwise others would not see
#     their end.
#
# Who reaps and who ends whom
#   - Each process is reaped by the process that has forked or started it.
#   - The pool asks the process that reads its commands to end. That process ends its endpoints first, or its builder,
#     and then itself. After a builder, the fork server ends.
#   - Each process dies with its parent (parent-death signal), so none outlives the pool.
#
# What happens when a process dies
#   - An endpoint: the pool gets its exit status, and starts it again. The new process is forked with the data sets.
#   - The builder while it builds: each endpoint builds its own.
#   - The builder that has taken over: its endpoints die with it, and the fork server ends. The pool starts all again,
#     which counts as one restart.
#   - The fork server: the builder and all endpoints die with it. The pool starts all again.


@dataclass
class _ForkServer:
    """Executes the commands of the pool."""

    pool: socket.socket
    """The socket to the pool."""
    base: EndpointOptions
    """The settings of endpoints."""
    signals: SignalWaiter
    """Waits for the end signal and for the end of children."""
    why_not_fork: str = ""
    """Why this process must not fork endpoints. Empty if it may."""
    prebuilt: Mapping[DatasetSpec, Prebuilt] = field(default_factory=dict)
    """The data sets that this process has built, if it is the builder."""

    def __post_init__(self) -> None:
        self._children: list[EndpointProcess] = []
        self._builder: Builder | None = None
        # Endpoints announce data sets to a process that may fork a builder. A process with `prebuilt` is the builder,
        # and has built them already. A single endpoint has nothing to share.
        may_announce = not self.why_not_fork and not self.prebuilt and self.base.num_endpoints > 1
        self._announcements = make_channel() if may_announce else None
        """The two ends of the socket of announcements: for this process, and for its endpoints. None if closed."""

    def start(self, index: int, incarnation: str, output: int) -> None:
        """Start an endpoint.

        Args:
            index: Number of the endpoint on this host.
            incarnation: Id of the process in the directory.
            output: Descriptor of the endpoint's output. This method closes it.
        """
        options = dataclasses.replace(self.base, index=index, incarnation=incarnation)
        try:
            start = self._start_fresh if self.why_not_fork else self._fork
            self._children.append(start(options, output))
        except OSError as error:
            # Report this like a process that has ended. Then the pool tries again after a back-off.
            self._tell_exit(index, incarnation, int(ExitCode.RESOURCES))
            logger.error("cannot start endpoint %s: %s", options.name, error)
        finally:
            os.close(output)

    def serve(self) -> int:
        """Execute commands until this is stopped, the pool is gone, or a builder has taken over and ended.

        Returns:
            The exit status.
        """
        while True:
            arrived = self.signals.wait(POLL_S, descriptors=self._descriptors())
            self._reap()
            if end_signal() in arrived:
                return self._stop(self.base.grace_s)
            self._follow_builds()
            if self._builder is not None and self._builder.has_built:
                return self._hand_over(self._builder)
            packet = receive_packet(self.pool)
            if packet is None:
                continue
            facts, descriptors = packet
            command = facts.get("command")
            if command == "start":
                self.start(facts["index"], facts["incarnation"], descriptors[0])
            elif command == "end":
                self._end(facts["incarnation"])
            elif command == "stop":
                return self._stop(facts["grace_s"])
            else:
                # `receive_packet` returns an event without a command if the pool is gone. Then kill the endpoints.
                return self._stop(0.0)

    def _descriptors(self) -> tuple[int, ...]:
        """Return the descriptors to wait for: of the pool, of announcements, and of the builder."""
        of_announcements = () if self._announcements is None else (self._announcements[0].fileno(),)
        of_builder = () if self._builder is None else (self._builder.channel.fileno(),)
        return (self.pool.fileno(), *of_announcements, *of_builder)

    # Endpoints

    def _fork(self, options: EndpointOptions, output: int) -> EndpointProcess:
        """Fork an endpoint. In the child, run the endpoint to its end."""
        server_pid = os.getpid()
        # If a builder may replace this endpoint, keep the output open, because the new process prints to the same pipe.
        kept_output = None if self._announcements is None else os.dup(output)
        # A SIGTERM of the platform waits until the child can survive it.
        with sigterm_blocked_in_children():
            pid = os.fork()
        endpoint = EndpointProcess(options.index, options.incarnation, pid, output=kept_output)
        if pid:  # this is the parent
            return endpoint

        def run() -> int:
            """Run the endpoint in the child. Return its exit status."""
            # The child prints to the pipe of the endpoint: standard output and standard error.
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.close(output)
            endpoint.close()  # closes `kept_output`, which only the parent needs
            announcements = self._keep_only_announcements()
            return run_endpoint(
                options,
                self.pool,
                prebuilt=self.prebuilt,
                announce=None if announcements is None else functools.partial(announce, announcements),
            )

        run_forked(run, server_pid, self.signals)
        raise AssertionError("unreachable")

    def _keep_only_announcements(self) -> socket.socket | None:
        """Close the inherited descriptors, except the endpoints' end of the socket of announcements. Return this end.

        Return None if the socket is closed, because each endpoint then builds its own data sets.
        """
        for child in self._children:
            child.close()
        if self._builder is not None:
            self._builder.channel.close()
        if self._announcements is None:
            return None
        own, theirs = self._announcements
        own.close()
        return theirs

    def _start_fresh(self, options: EndpointOptions, output: int) -> EndpointProcess:
        """Start an endpoint as a new process, because this process must not be forked."""
        # A SIGTERM of the platform waits until the child can survive it.
        with sigterm_blocked_in_children():
            process = subprocess.Popen(
                [sys.executable, "-m", "hetero.endpoint.endpoint", str(self.pool.fileno())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(self.pool.fileno(),),
            )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(options.to_json())
        return EndpointProcess(options.index, options.incarnation, process.pid, fresh=process)

    def _end(self, incarnation: str) -> None:
        """Ask one endpoint to end. The endpoint itself gives its requests in progress a grace period."""
        for child in self._children:
            if child.incarnation == incarnation:
                child.was_asked_to_end = True
                child.signal(end_signal())

    def _reap(self) -> None:
        """Reap the endpoints that have ended, and report their ends to the pool."""
        for child in list(self._children):
            status = child.poll()
            if status is not None:
                self._children.remove(child)
                child.close()
                self._tell_exit(child.index, child.incarnation, status)

    def _tell_exit(self, index: int, incarnation: str, status: int) -> None:
        send_event(self.pool, "exited", index=index, incarnation=incarnation, status=status)

    # Data sets that are built once

    def _follow_builds(self) -> None:
        """Start a builder at the first announcement, and act on what the builder reports."""
        if self._announcements is None:
            return
        packet = receive_packet(self._announcements[0])
        # Start only one builder. Endpoints that announce data sets while it builds wait for it too.
        if packet is not None and self._builder is None:
            announcement, _ = packet
            self._build([DatasetSpec(name, arguments) for name, arguments in announcement["datasets"]])
        builder = self._builder
        if builder is None or builder.has_built:
            return
        builder.follow()
        if builder.refused:
            for spec in builder.refused:
                self._log_refusal(spec, builder.why)
            self._build([spec for spec in builder.specs if spec not in builder.refused])

    def _build(self, specs: Sequence[DatasetSpec]) -> None:
        """Fork a builder for these data sets. If there are none, let each endpoint build its own."""
        try:
            self._builder = self._fork_builder(specs) if specs else None
        except OSError as error:
            self._builder = None
            for spec in specs:
                self._log_refusal(spec, f"the process that builds it cannot be started: {error}")
        if self._builder is None:
            self._leave_to_endpoints()

    def _fork_builder(self, specs: Sequence[DatasetSpec]) -> Builder:
        """Fork the builder. In the child, build the data sets and take over from this process."""
        server_pid = os.getpid()
        ours, theirs = make_channel()
        # A SIGTERM of the platform waits until the child can survive it.
        with sigterm_blocked_in_children():
            pid = os.fork()
        if pid:  # this is the parent
            theirs.close()
            return Builder(pid, ours, specs)

        def run() -> int:
            """Run the builder in the child. Return its exit status."""
            ours.close()
            announcements = self._keep_only_announcements()
            if announcements is not None:
                announcements.close()
            return _run_builder(self.base, self.pool, theirs, specs)

        run_forked(run, server_pid, self.signals)
        raise AssertionError("unreachable")

    def _leave_to_endpoints(self) -> None:
        """Let each endpoint build its own data sets, from now on."""
        # An endpoint waits until this process has closed its end of the socket. Then it builds its own.
        for end in self._announcements or ():
            end.close()
        self._announcements = None
        # No builder will replace the endpoints now, so their outputs need not stay open here.
        for child in self._children:
            child.close()

    def _log_refusal(self, spec: DatasetSpec, why: str) -> None:
        """Log why a data set is not built once for all endpoints."""
        logger.info(
            "each endpoint builds its own data set %s, because %s. To skip the attempt to build it once, write "
            "@hetero.dataset(fork_built=False)",
            spec,
            why,
        )

    def _hand_over(self, builder: Builder) -> int:
        """Let the builder take over, and wait until it ends. Return the exit status."""
        for child in self._children:
            # Nothing is lost, because these endpoints have no data set. Signal all of them before waiting for one.
            child.signal(signal.SIGKILL)
        starts = []
        for child in self._children:
            # Wait for the endpoint before the builder starts its successor, because two processes must never have the
            # same incarnation at the same time.
            status = child.wait()
            # `_fork` keeps the output of each endpoint that a builder may replace.
            assert child.output is not None
            # An endpoint that the pool has asked to end gets no successor.
            if child.was_asked_to_end:
                self._tell_exit(child.index, child.incarnation, status)
            else:
                starts.append((child.index, child.incarnation, child.output))
        builder.hand_over(starts)
        # This closes the outputs, because the builder has copies of them. It also closes the socket of announcements,
        # because nobody needs it now.
        self._leave_to_endpoints()
        self._children.clear()
        while (ended := exit_status(builder.pid)) is None:
            if end_signal() in self.signals.wait(POLL_S):
                os.kill(builder.pid, end_signal())
        if ended < 0:
            logger.warning("the process that has built data sets for all endpoints %s", describe_exit_status(ended))
            return int(ExitCode.INTERNAL)
        return ended

    # The end

    def _stop(self, grace_s: float) -> int:
        """Ask every endpoint to end, and kill it after ``grace_s`` seconds. If ``grace_s`` is 0, kill it at once."""
        if self._builder is not None:
            self._builder.end()
        for child in self._children:
            child.signal(end_signal() if grace_s > 0 else signal.SIGKILL)
        deadline_s = time.monotonic() + grace_s
        while self._children and time.monotonic() < deadline_s:
            self.signals.wait(min(POLL_S, max(0.0, deadline_s - time.monotonic())))
            self._reap()
        for child in self._children:
            child.signal(signal.SIGKILL)
        # The wait ends at once when a child ends, because that sends SIGCHLD.
        while self._children:
            self.signals.wait(0.1)
            self._reap()
        return int(ExitCode.OK)


def _run_builder(
    base: EndpointOptions, pool: socket.socket, server: socket.socket, specs: Sequence[DatasetSpec]
) -> int:
    """Build data sets, and then take over from the fork server. Runs in the builder.

    Args:
        base: The settings of endpoints.
        pool: The socket to the pool.
        server: The socket to the fork server.
        specs: The data sets.

    Returns:
        The exit status.
    """
    # A forked process does not inherit the protection from the first SIGTERM that `main` sets up.
    survive_first_sigterm()
    prebuilt = build_all(specs, server, host=base.host)
    # `build_all` has reported that a data set was refused. Another builder builds the others.
    if prebuilt is None:
        return int(ExitCode.OK)
    with SignalWaiter((end_signal(), signal.SIGCHLD)) as signals:
        process = _ForkServer(pool, base, signals, prebuilt=prebuilt)
        for index, incarnation, output in receive_starts(server):
            process.start(index, incarnation, output)
        return process.serve()


def main() -> None:
    """Run the fork server: import the script, and start endpoints as the pool commands."""
    pool = socket.socket(fileno=int(sys.argv[1]))
    base, parent_pid = EndpointOptions.from_json(pool.recv(MAX_PACKET_BYTES))
    die_with_parent(parent_pid)
    configure_process(base.log_level)
    # The platform may send SIGTERM to every process of the job. Only the launcher acts on it.
    survive_first_sigterm()
    # Forked endpoints inherit this setting of malloc. They free and allocate the memory of batches again and again.
    keep_freed_memory()
    files_before = open_files()
    try:
        load_script(base.script, base.script_args, host=base.host, is_module=base.is_module)
        # Configure the process again, because the script may have set up logging or signals.
        configure_process(base.log_level)
        # Forked endpoints would share files that the script has opened, and would lack threads that it has started.
        reason = why_not_fork(files_before)
        if reason:
            logger.info("endpoints start as fresh processes: %s", reason)
        else:
            prepare_to_fork()
        with SignalWaiter((end_signal(), signal.SIGCHLD)) as signals:
            send_event(pool, "loaded", mode="fresh" if reason else "fork")
            status = _ForkServer(pool, base, signals, why_not_fork=reason).serve()
    except HeteroError as error:
        report_failure(pool, error)
        status = int(error.exit_code)
    exit_process(status)


if __name__ == "__main__":
    main()

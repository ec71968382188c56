"""The connection over which this host's hub sends heartbeats to one other host, its peer."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hetero.wire import channels  # before grpc, because channels sets grpc's environment

import grpc  # isort: skip

from hetero.control import security
from hetero.control.members.membership import Membership
from hetero.control.status import Cause, HostStatus, status_from_proto, status_to_proto
from hetero.errors import ExitCode, HeteroError, ProtocolError
from hetero.system.logs import LoggedErrors
from hetero.system.waits import POLL_S
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.tls import Tls, diagnose

__all__ = ["ConnectionOptions", "PeerConnection"]

logger = logging.getLogger(__name__)

_OTHER_PORT = "give each job that runs there another --port"
_LOOK_UP_S = 0.1
"""Time that a heartbeat waits for a lookup if an old address is known. Resolvers that are down block for 5 to 20 s."""
_RANDOM = random.SystemRandom()
"""Generator for jitter. A seeded global generator, as in training scripts, would make all hosts send at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Options that all connections of a hub share."""

    resolve: Callable[[str], str]
    """Maps a host name to the ``address:port`` of its launcher. It may block and may raise `HeteroError`."""
    news: Callable[[int, float], tuple[int, HostStatus]]
    """Takes a version and a time limit. Waits for a newer status of this host. Returns the new version and status."""
    membership: Callable[[], AbstractContextManager[Membership]]
    reporter: str
    """The host that writes the job's report. Only heartbeats to it carry the values that ranks have logged."""
    stopping: threading.Event
    token: security.Token | None
    job_id: str
    heartbeat_s: float
    tls: Tls | None
    fault: Callable[[], object] | None
    """Injected fault. If it returns anything but None, the heartbeat is not sent."""


class _LookUp:
    """One lookup of a peer's address, on a separate thread because it may block for longer than a lease."""

    def __init__(self, resolve: Callable[[str], str], host: str) -> None:
        self.target = ""
        """The address that was found. Empty if none was found."""
        self.error = ""
        """Why no address was found. Empty if one was found."""
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(resolve, host), name=f"name-{host}", daemon=True).start()

    def _run(self, resolve: Callable[[str], str], host: str) -> None:
        """Look up the address, and record it or the error. Runs on a separate thread."""
        try:
            self.target = resolve(host)
        except HeteroError as error:
            self.error = str(error)
        except Exception as error:
            logger.exception("could not look up the address of %s", host)
            self.error = f"name resolution (DNS) of host {host!r} failed: {error!r}"
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds. Return whether the lookup has ended."""
        return self._done.wait(timeout_s)


class PeerConnection:
    """The thread that sends this host's status to one peer.

    The thread looks up the peer's address until it finds one, and again after each failed heartbeat, because the peer
    may have restarted with another address. While heartbeats succeed, it looks up nothing. An outage of the name
    service then does not end the job.

    Args:
        host: The peer.
        options: The options that all connections of the hub share.
    """

    def __init__(self, host: str, options: ConnectionOptions) -> None:
        self._host = host
        self._options = options
        self._target = ""
        self._channel: grpc.Channel | None = None
        self._look_up: _LookUp | None = None
        """The lookup of the peer's address that is in progress. None without one."""
        self._name_error = ""
        """Why the last lookup found no address. Empty if it found one."""
        self._is_heard = False
        """Whether the last heartbeat was answered."""
        self._was_heard = False
        """Whether any heartbeat was ever answered."""
        self._is_over = threading.Event()
        """Set when the connection ends, although the hub goes on."""
        self._thread = threading.Thread(target=self._run, name=f"peer-{host}", daemon=True)

    def start(self) -> None:
        """Start the thread. Does not block."""
        self._thread.start()

    def stop(self) -> None:
        """End the connection because the peer has left the job. Does not block."""
        self._is_over.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread after `ConnectionOptions.stopping` was set."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """Send heartbeats until the hub stops or the peer leaves the job."""
        options = self._options
        errors = LoggedErrors()
        # No version is this low, so the first status is sent at once.
        sent_version = -1
        try:
            while not (options.stopping.is_set() or self._is_over.is_set()):
                interval_s = options.heartbeat_s * _RANDOM.uniform(0.9, 1.1)
                # `_send` returns a pause, except after an unexpected error. Then this pause stays.
                pause_s = min(interval_s, POLL_S)
                # Log an unexpected error and continue. Such an error once ended this thread, and much later the job
                # ended because this host had been silent.
                with errors.during(f"sending this host's status to {self._host}"):
                    sent_version, own = options.news(sent_version, interval_s)
                    if options.stopping.is_set():
                        return
                    pause_s = self._send(own, interval_s)
                options.stopping.wait(pause_s)
        finally:
            if self._channel is not None:
                self._channel.close()

    def _send(self, own: HostStatus, interval_s: float) -> float:
        """Send a heartbeat if the address is known. Return the least time to wait before the next one, in seconds."""
        self._find(interval_s)
        if self._channel is None:
            self._unreachable(self._name_error)
            return min(interval_s, 1.0)
        is_heard = self._heartbeat(self._channel, own)
        # Pause briefly even after an answer, so that one message carries a burst of changes.
        return 0.02 if is_heard else min(interval_s, POLL_S)

    def _find(self, patience_s: float) -> None:
        """Open a channel to the peer's current address, unless the last heartbeat succeeded."""
        if self._is_heard:
            return
        if self._look_up is None:
            self._look_up = _LookUp(self._options.resolve, self._host)
        # With a channel to the last address, the next heartbeat can be sent without the lookup.
        if not self._look_up.wait(patience_s if self._channel is None else _LOOK_UP_S):
            self._name_error = f"name resolution (DNS) of host {self._host!r} has not answered yet"
            return
        found, self._look_up = self._look_up, None
        self._name_error = found.error
        if found.target and found.target != self._target:
            # Open the new channel before the old one is closed. If this fails, the next turn still has a channel.
            channel = channels.open_channel(found.target, name=self._host, tls=self._options.tls)
            if self._channel is not None:
                self._channel.close()
            self._target, self._channel = found.target, channel

    def _heartbeat(self, channel: grpc.Channel, own: HostStatus) -> bool:
        """Send one heartbeat and process the answer. Return whether the peer answered."""
        self._is_heard = False
        options = self._options
        if options.fault is not None and options.fault() is not None:
            self._unreachable("no heartbeat was sent, because of an injected fault")
            return False
        call = channel.unary_unary(
            "/hetero.v1.Control/Heartbeat",
            request_serializer=pb.HostStatus.SerializeToString,
            response_deserializer=pb.HostStatus.FromString,
        )
        try:
            reply: pb.HostStatus = call(
                status_to_proto(own, has_metrics=self._host == options.reporter),
                timeout=max(1.0, 1.5 * options.heartbeat_s),
                metadata=security.call_metadata(options.token, options.job_id),
            )
        except grpc.RpcError as error:
            self._refused(error)
            return False
        # Check the name first. If another host has answered, its answer must not end the job.
        if reply.host != self._host:
            self._unreachable(f"{self._target} is {reply.host}, not {self._host}: is its address right?")
            return False
        try:
            status = status_from_proto(reply)
        except ProtocolError as error:
            # Most likely the peer speaks another protocol. End the job here and not in the handler of heartbeats,
            # because only here is the sender known. A heartbeat of another protocol could be from any host.
            self._fail(ExitCode.DISAGREEMENT, str(error))
            return False
        self._is_heard = self._was_heard = True
        self._name_error = ""
        with options.membership() as membership:
            membership.observe(status)
            membership.delivered(self._host, own)
        return True

    def _refused(self, error: grpc.RpcError) -> None:
        """Handle an error of a heartbeat. Record why the peer cannot be reached, or fail the job because of it."""
        code, options = error.code(), self._options
        where = f"{self._host} ({self._target})"
        if code is grpc.StatusCode.UNAUTHENTICATED and security.is_of_other_job(error, options.job_id):
            summary = f"{where}: a launcher of another job has this port; {_OTHER_PORT}"
            self._fail(ExitCode.PORT, summary, decides_alone=True)
        elif code is grpc.StatusCode.UNAUTHENTICATED:
            summary = f"{where} refuses this host's token; give every host of the job the same token"
            self._fail(ExitCode.AUTHENTICATION, summary, decides_alone=True)
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            self._unreachable(
                f"{self._target} answers but is not a hetero launcher: does another program use the port?"
            )
        elif code is grpc.StatusCode.FAILED_PRECONDITION:
            why = f"{self._target}: {channels.short_details(error)}, this host belongs to job {options.job_id}"
            self._unreachable(f"{why}; {_OTHER_PORT}")
        elif code is grpc.StatusCode.NOT_FOUND:
            why = "the job has removed it after a long silence, or the description on that host does not list it"
            self._unreachable(f"{self._target}: {channels.short_details(error)}; {why}")
        else:
            self._unreachable(f"{self._target}: {code.name.lower()}, {channels.short_details(error)}")
            found = diagnose(error.details() or "")
            if found is not None and found.is_certificate and not self._was_heard:
                # At the start, a bad certificate fails the job at once. Later, the peer only counts as silent.
                self._fail(ExitCode.AUTHENTICATION, f"{where}: TLS: {found.text}", decides_alone=True)

    def _unreachable(self, why: str) -> None:
        """Record why the peer cannot be reached, with the error of the last lookup."""
        # The address may be out of date if the lookup has failed.
        if self._name_error and self._name_error != why:
            why = f"{self._name_error}; at its last address, {why}"
        with self._options.membership() as membership:
            membership.unreachable(self._host, why)

    def _fail(self, exit_code: ExitCode, summary: str, *, decides_alone: bool = False) -> None:
        """Fail the job because of this peer, unless the job can continue without it.

        Args:
            exit_code: Exit code of the job.
            summary: Why the job fails.
            decides_alone: Whether this host ends without a decision of the arbiter. Other hosts reject this host, so
                the decision would not arrive.
        """
        with self._options.membership() as membership:
            if membership.do_without(self._host, summary):
                return
            cause = Cause(host=membership.own.host, summary=summary, exit_code=exit_code)
            membership.fail(cause)
            if decides_alone and membership.own.decided is None:
                membership.update(decided=cause)

"""Connects the launchers that mpirun or torchrun started on one host: one leads, the others follow.

The *local leader* does all the work of a launcher. The *followers* connect to it, start a rank of the training script
when the leader requests it (see `mpi_ranks.py`), and end with the leader's exit code.

The launcher with local rank 0 leads. Under mpirun this launcher follows too, and a child of this launcher leads. The
reason is that mpirun waits a quarter of a second after one of its processes failed, and then kills all processes that
it started itself. mpirun did not start the child, so the child lives long enough to report what happened.

Followers connect through a Unix socket in the abstract namespace. The kernel closes the socket when the leader ends.
Followers therefore notice at once that a leader was killed, and the socket does not disturb a later run. Both sides
check that the other process belongs to the same user.

Messages are JSON objects, one per line. The leader sends ``{"start": VARIABLES}``, ``{"kill": true}`` and, at the end,
``{"exit": CODE}``. A follower first sends ``{"local_rank": N, "rank": N}``. Later it sends ``{"stop": true}`` if it was
asked to stop, and ``{"ended": STATUS}`` when its rank has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hetero.errors import PortError
from hetero.launch.ranks.parent_launcher import ParentLauncher
from hetero.system.process import PARENT_VARIABLE, adopt_descendants, end_descendants, start_child, wait_gone
from hetero.system.waits import END_TIMEOUT_S, SHORT_POLL_S

__all__ = ["Follower", "LocalLeader", "kill_rank", "meeting_name", "start_rank"]

logger = logging.getLogger(__name__)

_LEADER_S = 120.0
"""Seconds that a follower tries to connect. Usually a few seconds are enough, because all launchers of a host start
together."""
_MAX_LINE_BYTES = 2**20
_CREDENTIALS = struct.Struct("3i")


def meeting_name(parent: ParentLauncher, *, job_id: str, host: str, base_dir: Path) -> str:
    """Return the socket name for the launchers of one run on one host.

    The first byte is zero, so the name is in the abstract namespace. Several users, containers and simulated hosts of a
    machine may share this namespace. So the name depends on the run, the job, the host and the user.
    """
    text = json.dumps([parent.name, parent.run, job_id, host, str(base_dir), os.geteuid()])
    return f"\0hetero-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


class LocalLeader:
    """The leader's connections to its followers, as a context manager. Not thread-safe.

    Args:
        parent: What mpirun or torchrun set for this process.
        name: Socket name from `meeting_name`.

    Raises:
        PortError: If another process leads already.
    """

    def __init__(self, parent: ParentLauncher, name: str) -> None:
        self.parent = parent
        # Under torchrun, the process with local rank 0 leads and does not follow. Under mpirun, its child leads, and
        # the process itself follows and connects.
        self.ranks: dict[int, int] = {} if parent.gives_ranks else {parent.local_rank: parent.rank}
        """Ranks of this host by local rank: those of the followers that have connected and, under torchrun, the rank of
        the leader itself."""
        self.ended: dict[int, int] = {}
        """Exit statuses of the ranks that have ended, by local rank, in order of time."""
        self.lost: set[int] = set()
        """Local ranks of followers that disconnected before they reported the end of their ranks. Their exit status in
        ``ended`` is SIGTERM, because mpirun and torchrun end their processes with this signal."""
        self._ignores_stops = False
        """Whether requests of followers to stop are ignored, because one was passed on or this process ends."""
        self._connections: dict[int, _Connection] = {}
        """The connections of the followers that were accepted, by local rank."""
        self._new: list[_Connection] = []
        """Connections whose first message has not arrived."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(name)
        except OSError as error:
            self._socket.close()
            raise PortError(
                f"another launcher already leads this host in this run of {parent.name} ({error.strerror}); "
                "end it, or wait until it has ended"
            ) from error
        self._socket.listen(parent.num_local)

    def __enter__(self) -> LocalLeader:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for connection in (*self._connections.values(), *self._new):
            connection.close()

    @property
    def is_complete(self) -> bool:
        """Whether every follower has connected."""
        return len(self.ranks) == self.parent.num_local

    def poll(self) -> None:
        """Accept new connections and read the messages of followers. Does not wait."""
        # Accept connections until none is left. The socket then raises, because it does not block.
        with contextlib.suppress(BlockingIOError):
            while True:
                self._new.append(_Connection(self._socket.accept()[0]))
        # The first message of a connection says which follower it belongs to.
        unidentified, self._new = self._new, []
        for connection in unidentified:
            if messages := connection.read():
                self._welcome(connection, messages)
            elif connection.is_closed:
                connection.close()
            else:
                self._new.append(connection)
        for local_rank, connection in self._connections.items():
            self._handle(local_rank, connection.read())
            # The follower's process was probably ended by mpirun or torchrun, which send SIGTERM.
            if connection.is_closed and local_rank not in self.ended:
                self.lost.add(local_rank)
                self.ended[local_rank] = -signal.SIGTERM

    def start(self, variables_of: Callable[[int], Mapping[str, str]]) -> None:
        """Ask every follower to start its rank.

        Args:
            variables_of: Returns the variables to add to a rank's environment, from its local rank.
        """
        for local_rank, connection in self._connections.items():
            connection.write({"start": dict(variables_of(local_rank))})

    def kill(self) -> None:
        """Ask every follower to kill its rank. Does not wait."""
        for connection in self._connections.values():
            connection.write({"kill": True})

    def finish(self, code: int) -> None:
        """Ask every follower to end with an exit code. First wait up to five seconds until all have connected."""
        # A later request to stop must not signal this process, because its signal handlers are no longer installed.
        self._ignores_stops = True
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while not self.is_complete and time.monotonic() < deadline_s:
            self.poll()
            select.select([self._socket], [], [], SHORT_POLL_S)
        # Accept also a follower that has connected during the last wait.
        self.poll()
        for connection in self._connections.values():
            connection.write({"exit": code})

    def _welcome(self, connection: _Connection, messages: Sequence[Mapping[str, Any]]) -> None:
        """Accept a follower that has sent its local rank and rank. Reject it if these are in use or out of range."""
        # The first read of a connection may return more than the first message.
        hello, *later_messages = messages
        local_rank, rank = hello.get("local_rank"), hello.get("rank")
        free_local_ranks = set(range(self.parent.num_local)) - self.ranks.keys()
        if local_rank in free_local_ranks and isinstance(rank, int) and 0 <= rank < self.parent.world_size:
            self.ranks[local_rank] = rank
            self._connections[local_rank] = connection
            self._handle(local_rank, later_messages)
            return
        logger.warning(
            "rejected a follower with local rank %r and rank %r, because they are in use or out of range",
            local_rank,
            rank,
        )
        connection.close()

    def _handle(self, local_rank: int, messages: Sequence[Mapping[str, Any]]) -> None:
        """Handle messages of a follower: the follower's rank has ended, or the follower was asked to stop."""
        for message in messages:
            if isinstance(message.get("ended"), int):
                self.ended.setdefault(local_rank, message["ended"])
            elif "stop" in message and not self._ignores_stops:
                # All followers are asked to stop together. Pass on only the first request, because a second signal
                # would abort the job.
                self._ignores_stops = True
                os.kill(os.getpid(), signal.SIGTERM)


class Follower:
    """A launcher that follows the local leader.

    Args:
        parent: What mpirun or torchrun set for this process.
        name: Socket name from `meeting_name`.
        command: The command that starts a rank of the training script.
        variables: Variables that mpirun or torchrun set for this process alone, for the rank's environment.
        stopped_code: Exit code if this launcher is asked to stop before it has connected to its leader.
        leader_pid: Process id of the leader, if the leader is a child of this process.
    """

    def __init__(
        self,
        parent: ParentLauncher,
        name: str,
        *,
        command: Sequence[str],
        variables: Mapping[str, str],
        stopped_code: int = 128 + signal.SIGTERM,
        leader_pid: int | None = None,
    ) -> None:
        self._parent = parent
        self._name = name
        self._command = command
        self._variables = variables
        self._stopped_code = stopped_code
        self._leader_pid = leader_pid
        self._rank: subprocess.Popen[bytes] | None = None
        """The process of the rank. None before the leader requests it."""
        self._has_reported_end = False
        """Whether the leader knows that the rank has ended."""
        self._num_signals = 0
        """Number of requests to stop that this launcher has got."""
        self._num_reported_signals = 0
        """Value of ``_num_signals`` when this launcher last passed a request on to the leader."""

    def run(self) -> int | None:
        """Execute the leader's requests. Return the leader's exit code, or None if the leader was lost or not found."""
        with contextlib.ExitStack() as stack:
            # `signal.signal` returns the previous handler, which the stack restores at the end.
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            adopt_descendants()
            stack.callback(end_descendants)
            # Register this after `end_descendants`, because the stack then calls it first. Otherwise a leader that is a
            # child of this process would be killed before it has written its last log lines.
            stack.callback(self._let_leader_end)
            connection = self._connect()
            if connection is None:
                return self._stopped_code if self._num_signals else None
            stack.callback(connection.close)
            connection.write({"local_rank": self._parent.local_rank, "rank": self._parent.rank})
            while True:
                connection.wait(SHORT_POLL_S)
                for message in connection.read():
                    if isinstance(message.get("exit"), int):
                        return int(message["exit"])
                    self._obey(message)
                if connection.is_closed:
                    return None
                self._report(connection)

    def _connect(self) -> _Connection | None:
        """Connect to the leader. Return None if the leader is not found in time, or this launcher is asked to stop."""
        deadline_s = time.monotonic() + _LEADER_S
        while time.monotonic() < deadline_s and not self._num_signals:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            # Without this time limit, `connect` would block while the leader's queue is full.
            sock.settimeout(SHORT_POLL_S)
            try:
                sock.connect(self._name)
            except OSError:
                sock.close()
                time.sleep(SHORT_POLL_S)
                continue
            return _Connection(sock)
        return None

    def _obey(self, message: Mapping[str, Any]) -> None:
        """Start or kill the rank of this launcher, as a message of the leader asks."""
        if self._rank is None and isinstance(message.get("start"), dict):
            self._rank = start_rank(self._command, {**self._variables, **message["start"]})
        elif "kill" in message and self._rank is not None:
            kill_rank(self._rank)

    def _report(self, connection: _Connection) -> None:
        """Tell the leader that this launcher was asked to stop, or that its rank has ended."""
        if self._num_signals > self._num_reported_signals:
            self._num_reported_signals = self._num_signals
            # Only pass the request on, because the leader ends all ranks together.
            connection.write({"stop": True})
        if self._rank is not None and not self._has_reported_end and self._rank.poll() is not None:
            connection.write({"ended": self._rank.returncode})
            self._has_reported_end = True

    def _let_leader_end(self) -> None:
        """If the leader is a child of this process, wait up to five seconds until it ends, before it is killed."""
        if self._leader_pid is not None and not wait_gone([self._leader_pid], timeout_s=END_TIMEOUT_S):
            logger.warning(
                "the local leader (process %d) has not ended within %.1f s of its last message and is killed now. Its "
                "last log lines may be missing. Look above for the cause, such as a full disk or a stuck device",
                self._leader_pid,
                END_TIMEOUT_S,
            )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1


def start_rank(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank as a child of this process. Call it on the main thread.

    The kernel kills the rank when the thread that started it ends.

    MPI identifies a process by environment variables. The child gets the variables that mpirun set for this process, so
    MPI treats the child as the process that mpirun started.

    Args:
        command: The command of the rank.
        variables: Variables that are added to this process's environment.
    """
    return start_child(
        command,
        # Without PYTHONUNBUFFERED, the last lines of a killed rank would stay in its buffer.
        env={**os.environ, **variables, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        # `kill_rank` then kills the rank's children too.
        start_new_session=True,
    )


def kill_rank(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank and its process group. Does not wait."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Connection:
    """Messages over a Unix socket. Writing never waits. If the peer does not read, messages to it are lost.

    Args:
        sock: The connected socket. If the peer belongs to another user, `is_closed` is set from the start.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._rest = b""
        """The beginning of a message whose end has not arrived."""
        # An abstract socket has no file mode that protects it. The kernel knows which user the peer belongs to.
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _pid, peer_uid, _gid = _CREDENTIALS.unpack(credentials)
        self.is_closed = peer_uid != os.geteuid()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.is_closed = True
        self._socket.close()

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until there is something to read."""
        if not self.is_closed:
            select.select([self._socket], [], [], timeout_s)

    def write(self, message: Mapping[str, object]) -> None:
        """Send a message."""
        data = json.dumps(message).encode() + b"\n"
        try:
            if not self.is_closed and self._socket.send(data) < len(data):
                # The peer cannot read part of a message.
                self.close()
        except (BrokenPipeError, ConnectionResetError):
            # `read` returns the peer's last messages, and then finds the connection closed.
            pass
        except OSError:
            self.close()

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. Set `is_closed` if no more can follow."""
        if self.is_closed:
            return []
        # Read what has arrived, but not much more than the longest allowed line, because a line may never end. If the
        # peer has closed the connection, `recv` returns no bytes. If nothing more has arrived, `recv` raises
        # BlockingIOError.
        try:
            while not self.is_closed and len(self._rest) <= _MAX_LINE_BYTES:
                data = self._socket.recv(65536)
                self._rest += data
                self.is_closed = not data
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        # The part after the last line break is the beginning of the next message.
        *lines, self._rest = self._rest.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            # Close the connection of a peer that does not follow the protocol.
            if isinstance(message, dict):
                messages.append(message)
            else:
                self.is_closed = True
        self.is_closed = self.is_closed or len(self._rest) > _MAX_LINE_BYTES
        return messages

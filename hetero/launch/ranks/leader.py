"""The copies of a launcher that another launcher started on one host: one works, the others wait for it.

One *leads*: it does all that a launcher does. The others *follow*: they connect to it, start a rank of the training
script where it says so (see `mpi_ranks.py`), and end with its exit code. The copy with local rank 0 leads;
under mpirun, which kills all that it has started a quarter of a second after one of them failed, that copy follows
too, and a child of it leads, which lives long enough to say what happened.

They meet at a Unix socket in the abstract namespace, which goes with the process that holds it: a leader that is killed
is noticed at once, and no run finds what an earlier one has left. Both sides check that the other is of the same user.

Messages are JSON objects, one a line. The leader says ``{"start": VARIABLES}``, ``{"kill": true}`` and, last,
``{"exit": CODE}``; a follower says ``{"local_rank": N, "rank": N}`` first, ``{"stop": true}`` if it was asked to, and
``{"ended": STATUS}`` of its rank.
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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hetero.errors import PortError
from hetero.launch.ranks.parent_launcher import Outer
from hetero.launch.ranks.torchrun_agent import PARENT_VARIABLE
from hetero.system.process import adopt_descendants, end_descendants, start_child, wait_gone

__all__ = ["Copies", "Follower", "kill_rank", "meeting_name", "rank_command", "start_rank"]

logger = logging.getLogger(__name__)

_LEADER_S = 120.0
"""How long a follower looks for its leader: both are started at once, and import as much."""
_LATE_S = 5.0
"""How long a leader that is done waits for a copy that has not come yet."""
_POLL_S = 0.1
_MAX_LINE_BYTES = 2**20
_CREDENTIALS = struct.Struct("3i")


def meeting_name(outer: Outer, *, job_id: str, host: str, base_dir: Path) -> str:
    """Return where the copies of one run on one host meet: simulated hosts share a machine."""
    text = json.dumps([outer.name, outer.run, job_id, host, str(base_dir), os.geteuid()])
    return f"\0hetero-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


class Copies:
    """The followers as their leader sees them; a context manager. Not thread-safe.

    Args:
        outer: What made the copies.
        name: From `meeting_name`.

    Raises:
        PortError: If another process leads already.
    """

    def __init__(self, outer: Outer, name: str) -> None:
        self.outer = outer
        self.ranks: dict[int, int] = {} if outer.gives_ranks else {outer.local_rank: outer.rank}
        """Of the copies that are there: local rank -> rank."""
        self.ended: dict[int, int] = {}
        """Exit statuses of their ranks by local rank, in order of time."""
        self.lost: set[int] = set()
        """Local ranks of those that went without a word, their ranks with them; in ``ended`` by SIGTERM, as supervisors
        end what they have started."""
        self._was_stopped = False
        self._lines: dict[int, _Lines] = {}
        self._new: list[_Lines] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(name)
        except OSError as error:
            self._socket.close()
            raise PortError(
                f"another launcher works for this host and this run of {outer.name} already ({error.strerror}); "
                "end it, or wait until it has ended"
            ) from error
        self._socket.listen(outer.num_local)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for lines in (*self._lines.values(), *self._new):
            lines.close()

    @property
    def are_there(self) -> bool:
        """Whether every copy has come."""
        return len(self.ranks) == self.outer.num_local

    def poll(self) -> None:
        """Take note of what followers have said. Does not wait."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._new.append(_Lines(self._socket.accept()[0]))
        arrived, self._new = self._new, []
        for lines in arrived:
            if messages := lines.read():
                self._welcome(lines, messages[0], messages[1:])
            elif lines.is_closed:
                lines.close()
            else:
                self._new.append(lines)
        for local_rank, lines in self._lines.items():
            self._take(local_rank, lines.read())
            if lines.is_closed and local_rank not in self.ended:
                self.lost.add(local_rank)
                self.ended[local_rank] = -signal.SIGTERM

    def start(self, variables_of: Callable[[int], Mapping[str, str]]) -> None:
        """Have every follower start its rank.

        Args:
            variables_of: What is added to the environment of the rank with a local rank.
        """
        for local_rank, lines in self._lines.items():
            lines.write({"start": dict(variables_of(local_rank))})

    def kill(self) -> None:
        """Have every follower kill its rank. Does not wait."""
        for lines in self._lines.values():
            lines.write({"kill": True})

    def finish(self, code: int) -> None:
        """Have every follower end with an exit code; waits a moment for one that has not come yet."""
        self._was_stopped = True  # a request comes too late, and nobody handles the signal any more
        deadline_s = time.monotonic() + _LATE_S
        while not self.are_there and time.monotonic() < deadline_s:
            self.poll()
            select.select([self._socket], [], [], _POLL_S)
        self.poll()
        for lines in self._lines.values():
            lines.write({"exit": code})

    def _welcome(self, lines: _Lines, hello: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> None:
        local_rank, rank = hello.get("local_rank"), hello.get("rank")
        free = set(range(self.outer.num_local)) - self.ranks.keys()
        if local_rank in free and isinstance(rank, int) and 0 <= rank < self.outer.world_size:
            self.ranks[local_rank] = rank
            self._lines[local_rank] = lines
            self._take(local_rank, messages)  # it may have said more meanwhile
            return
        logger.warning("refused another copy of this launcher that says local rank %r and rank %r", local_rank, rank)
        lines.close()

    def _take(self, local_rank: int, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            if isinstance(message.get("ended"), int):
                self.ended.setdefault(local_rank, message["ended"])
            elif "stop" in message and not self._was_stopped:
                self._was_stopped = True
                os.kill(os.getpid(), signal.SIGTERM)  # once: all copies are asked at the same time


class Follower:
    """A copy that waits for the one that leads.

    Args:
        outer: What made the copies.
        name: From `meeting_name`.
        command: What it starts where it is told to: a rank of the training script.
        variables: What the outer launcher said to this process alone; its rank gets it.
        stopped_code: Exit code if it is asked to stop before it has met its leader.
        leader_pid: Process id of the leader if that is a child of this process.
    """

    def __init__(
        self,
        outer: Outer,
        name: str,
        *,
        command: Sequence[str],
        variables: Mapping[str, str],
        stopped_code: int = 128 + signal.SIGTERM,
        leader_pid: int | None = None,
    ) -> None:
        self._outer = outer
        self._name = name
        self._command = command
        self._variables = variables
        self._stopped_code = stopped_code
        self._leader_pid = leader_pid
        self._rank: subprocess.Popen[bytes] | None = None
        self._has_told = False
        self._num_signals = 0
        self._num_told_signals = 0

    def run(self) -> int | None:
        """Do what the leader says until it ends; return its exit code, or None if it was lost or did not come."""
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            adopt_descendants()
            stack.callback(end_descendants)
            stack.callback(self._let_leader_end)
            lines = self._connect()
            if lines is None:
                return self._stopped_code if self._num_signals else None
            stack.callback(lines.close)
            lines.write({"local_rank": self._outer.local_rank, "rank": self._outer.rank})
            while True:
                lines.wait(_POLL_S)
                for message in lines.read():
                    if isinstance(message.get("exit"), int):
                        return int(message["exit"])
                    self._obey(message)
                if lines.is_closed:
                    return None
                self._tell(lines)

    def _connect(self) -> _Lines | None:
        deadline_s = time.monotonic() + _LEADER_S
        while time.monotonic() < deadline_s and not self._num_signals:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection.settimeout(_POLL_S)  # where others stand in the queue it would wait without end
            try:
                connection.connect(self._name)
            except OSError:
                connection.close()
                time.sleep(_POLL_S)
                continue
            return _Lines(connection)
        return None

    def _obey(self, message: Mapping[str, Any]) -> None:
        if self._rank is None and isinstance(message.get("start"), dict):
            self._rank = start_rank(self._command, {**self._variables, **message["start"]})
        elif "kill" in message and self._rank is not None:
            kill_rank(self._rank)

    def _tell(self, lines: _Lines) -> None:
        if self._num_signals > self._num_told_signals:
            self._num_told_signals = self._num_signals
            lines.write({"stop": True})  # the leader has all ranks end together
        if self._rank is not None and not self._has_told and self._rank.poll() is not None:
            lines.write({"ended": self._rank.returncode})
            self._has_told = True

    def _let_leader_end(self) -> None:
        """Wait a moment for a leader that is this process's child: it has said its exit code, and takes its leave."""
        if self._leader_pid is not None:
            wait_gone([self._leader_pid], timeout_s=_LATE_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1


def rank_command(script: Sequence[str]) -> list[str]:
    """Return the command of a rank, see `start_rank`, for a script and its arguments."""
    return [sys.executable, "-m", "hetero.launch.ranks.rank", *script]


def start_rank(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank in the place of this process, whose environment says which one; call it on the main thread."""
    return start_child(
        command,
        env={**os.environ, **variables, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so that it is killed with what it has started
    )


def kill_rank(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank and its process group. Does not wait."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Lines:
    """Messages over a connection, of which none waits: a peer that does not read or is gone loses what it is sent.

    Args:
        connection: Of a Unix socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._rest = b""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.is_closed = _CREDENTIALS.unpack(credentials)[1] != os.geteuid()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self.is_closed = True
        self._connection.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to read, at most ``timeout_s`` seconds."""
        if not self.is_closed:
            select.select([self._connection], [], [], timeout_s)

    def write(self, message: Mapping[str, object]) -> None:
        """Send a message."""
        data = json.dumps(message).encode() + b"\n"
        try:
            if not self.is_closed and self._connection.send(data) < len(data):
                self.close()  # half of a message is none
        except (BrokenPipeError, ConnectionResetError):
            pass  # `read` finds what the peer said last, and that it is gone
        except OSError:
            self.close()

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that are there; `is_closed` if none can follow."""
        if self.is_closed:
            return []
        try:
            while not self.is_closed and len(self._rest) <= _MAX_LINE_BYTES:
                data = self._connection.recv(65536)
                self._rest += data
                self.is_closed = not data
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        *lines, self._rest = self._rest.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if isinstance(message, dict):
                messages.append(message)
            else:
                self.is_closed = True
        self.is_closed = self.is_closed or len(self._rest) > _MAX_LINE_BYTES
        return messages

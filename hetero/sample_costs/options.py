"""The launcher's options for measuring, and the messages between the processes that measure. Imports nothing heavy."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any

from hetero.documents.records import limits
from hetero.errors import ChildFailedError, ChildFailure, ConfigError, HeteroError
from hetero.metrics.profile.parts import SampledWork
from hetero.pool.packets import MAX_PACKET_BYTES, make_channel

__all__ = ["Channel", "CostOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """What to measure on this host."""

    host: str
    """Name of this host."""
    instance_type: str
    """Type of this host, or empty if unknown."""
    script: str = field(metadata=limits(max_length=65_536))
    """Path of the user's script, or the name of a module."""
    is_module: bool
    script_args: tuple[str, ...] = field(metadata=limits(max_length=65_536))
    work: SampledWork | None
    """Samples to fetch. With None, only ``batch_bytes`` is used."""
    batch_bytes: tuple[int, ...] = ()
    """Bytes of each leaf of a batch, if a rank measured the samples. Leaves of this size are sent to measure the CPU
    time of a receiver."""
    num_processes: int = field(metadata=limits(minimum=1, maximum=4096))
    """Largest number of processes at the same time: the CPUs of this host."""
    vcpus: int = field(metadata=limits(minimum=1, maximum=4096))
    """CPUs of this host, or the CPUs that it emulates."""
    emulated_sample_s: float | None = None
    """Seconds that a sample costs on an emulated vCPU. None if samples are measured."""
    parent_pid: int
    """Process id of the launcher."""
    single_s: float = 4.0
    """Seconds that one process alone measures samples."""
    burst_s: float = 1.5
    """Seconds of one burst, and of receiving. On a host of many CPUs, each burst is shorter."""
    receives: bool = True
    """Whether to measure the CPU time of a receiver. Only trainer hosts receive."""


class Channel:
    """Sends and receives JSON messages over a packet socket. For one thread.

    Args:
        sock: One end of a socket pair.
        name: Name of the process at the other end, for errors.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._socket = sock
        self._name = name

    @classmethod
    def pair(cls, name: str) -> tuple[Channel, socket.socket]:
        """Return a channel and the socket of the process at its other end."""
        own, theirs = make_channel()
        return cls(own, name), theirs

    def fileno(self) -> int:
        """Return the descriptor to select for messages."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send a message. If the other process has ended, drop the message, because `receive` reports the end."""
        try:
            # Without a time limit, a process that does not read would block this process for ever.
            self._socket.settimeout(5.0)
            self._socket.send(json.dumps(message).encode())
        except OSError:
            pass

    def receive(self, timeout_s: float | None) -> Any:
        """Return the next message. Block until it has arrived.

        Args:
            timeout_s: Time limit in seconds. None waits without a limit.

        Raises:
            ChildFailedError: If the other process has ended, or does not answer.
            ConfigError: If the other process has sent an error with `send_error`.
        """
        self._socket.settimeout(timeout_s)
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except TimeoutError:
            raise self._failed(f"did not answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise self._failed(f"cannot be reached: {error}") from error
        if not packet:
            raise self._failed("has ended")
        message = json.loads(packet)
        if isinstance(message, dict) and "error" in message:
            raise ConfigError(message["error"])
        return message

    def send_error(self, error: HeteroError) -> None:
        """Send an error. In the other process, `receive` raises it."""
        self.send({"error": str(error)[:2000]})

    def close(self) -> None:
        """Close the channel, which ends the process at the other end. Idempotent."""
        self._socket.close()

    def _failed(self, explanation: str) -> ChildFailedError:
        return ChildFailedError(ChildFailure(name=self._name, exit_status=1, explanation=explanation, last_lines=()))

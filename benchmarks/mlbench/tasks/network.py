"""Workers of one machine behind network interfaces of a stated bandwidth.

Each worker gets a network namespace with one interface, whose sending side is a token bucket (``tc tbf``). A switch in
another namespace connects the interfaces. Only the connections between the workers, through which gradients go,
are made in these namespaces. All other connections of the job stay as they are. Nothing else on the machine changes.

Rank 0 makes the namespaces and deletes them. A killed rank 0 leaves them, and the next run deletes those. Needs root
and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LimitedNetwork", "inside", "remove_leftovers", "sent_bytes", "why_not"]

_PREFIX = "mlb"
_RUN = Path("/run/netns")
_INTERFACE = "eth0"
_BUCKET_BYTES = 16 * 1024
"""What may pass at once. The bucket splits larger packets, which a virtual interface sends."""
_BUCKET_S = 0.004
"""What may pass at once, in seconds at the full rate, if that is more. It is the interval of the kernel's timer."""
_QUEUE_MS = 50
_MAX_WORKERS = 250
_CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_S = 30


class LimitedNetwork:
    """Namespaces for workers, as a context manager.

    Args:
        num_workers: 2 to 250.
        rate_mbit: 10^6 bits per second that each interface sends at most, headers included, > 0.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: On entering, if a command failed. The message names the command.
    """

    def __init__(self, num_workers: int, rate_mbit: float) -> None:
        if not 2 <= num_workers <= _MAX_WORKERS or not rate_mbit > 0:
            raise ValueError(
                f"{num_workers} workers at {rate_mbit:g} Mbit/s; expected 2 to {_MAX_WORKERS} at more than 0"
            )
        self._rate_mbit = rate_mbit
        self._switch = f"{_PREFIX}{os.getpid()}-switch"
        self.names = [f"{_PREFIX}{os.getpid()}-{index}" for index in range(num_workers)]
        """Name of each worker's namespace."""

    def __enter__(self) -> LimitedNetwork:
        remove_leftovers()
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "switch", "up")
            for index, name in enumerate(self.names):
                self._connect(index, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self._switch):  # interfaces go with their namespace
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "delete", name)

    def _connect(self, index: int, name: str) -> None:
        port = f"port{index}"
        _run("ip", "netns", "add", name)
        peer = ["peer", "name", port, "netns", self._switch]
        _run("ip", "-n", name, "link", "add", _INTERFACE, "type", "veth", *peer)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "switch", "up")
        # RFC 2544 keeps 198.18.0.0/15 for benchmarks.
        _run("ip", "-n", name, "address", "add", f"198.18.0.{index + 1}/24", "dev", _INTERFACE)
        _run("ip", "-n", name, "link", "set", _INTERFACE, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        burst = max(_BUCKET_BYTES, int(self._rate_mbit * 1e6 / 8 * _BUCKET_S))
        limit = ["rate", f"{round(self._rate_mbit * 1e6)}bit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
        _run("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limit)


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Let this thread open its connections in a namespace, and let gloo use the interface there.

    Connections that were open before keep working, and those made in the namespace keep working afterwards.

    Args:
        name: Name of the namespace.

    Raises:
        RuntimeError: If the namespace does not exist on this machine, or cannot be entered.
    """
    path = _RUN / name
    if not path.exists():
        raise RuntimeError(
            f"{path} does not exist; expected all workers on the machine of rank 0 if the network is limited"
        )
    own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    variable = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(variable)
    try:
        target = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_namespace(target)
        finally:
            os.close(target)
        os.environ[variable] = _INTERFACE
        try:
            yield
        finally:
            _set_namespace(own)
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before
    finally:
        os.close(own)


def sent_bytes(name: str) -> int:
    """Return the bytes that a worker's interface has sent through its token bucket, headers included.

    Raises:
        RuntimeError: If the namespace does not exist.
    """
    (found,) = json.loads(_run("tc", "-n", name, "-s", "-j", "qdisc", "show", "dev", _INTERFACE))
    return int(found["bytes"])


def why_not() -> str:
    """Return why this process cannot make a limited network. Empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2)"
    try:
        with LimitedNetwork(2, 100):
            return ""
    except RuntimeError as error:
        return f"no network namespace with a token bucket: {error}"


def remove_leftovers() -> None:
    """Delete the namespaces of processes that were killed."""
    for path in _RUN.glob(f"{_PREFIX}[0-9]*-*") if _RUN.is_dir() else ():
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "delete", path.name)


def _set_namespace(descriptor: int) -> None:
    """Put this thread into the network namespace of a descriptor. Python has ``os.setns`` only from 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _CLONE_NEWNET):
        raise RuntimeError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout

"""A network of a stated bandwidth on this machine: a namespace, a pair of virtual interfaces, and a token bucket.

Endpoints that run in the namespace bind the address at its end. All bytes that they send pass the bucket, on every
port and connection that they open. Needs root and iproute2. It does not affect the rest of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

_PREFIX = "hb"
_RUN = Path("/run/netns")
_BUCKET_S = 0.004
"""What may pass at once, in seconds at the full rate. It is the interval of the kernel's timer."""
_MIN_BUCKET_BYTES = 128 * 1024
_QUEUE_MS = 50


class LimitedLink:
    """The path from endpoints to a trainer. Use it as a context manager.

    Args:
        rate_mb_s: 10^6 bytes per second from the namespace to here, headers included. None for no limit.

    Raises:
        RuntimeError: On entering, if a command failed. The message names the command.
    """

    def __init__(self, rate_mb_s: float | None) -> None:
        self._rate_mb_s = rate_mb_s
        self.name = f"{_PREFIX}{os.getpid()}"
        # One of the 2^15 networks of four addresses in 198.18.0.0/15, which RFC 2544 keeps for benchmarks.
        base = (198 << 24) + (18 << 16) + 4 * (os.getpid() % (1 << 15))
        self._near_address, self.address = (
            ".".join(str((base + offset) >> shift & 255) for shift in (24, 16, 8, 0)) for offset in (1, 2)
        )
        """``address`` is where endpoints bind."""

    @property
    def prefix(self) -> list[str]:
        """Return the command that runs another in the namespace."""
        return ["nsenter", f"--net={_RUN / self.name}"]

    @property
    def received_bytes(self) -> int:
        """Return what has come through, headers included."""
        return int(Path(f"/sys/class/net/{self.name}a/statistics/rx_bytes").read_text(encoding="ascii"))

    def __enter__(self) -> LimitedLink:
        near, far = f"{self.name}a", f"{self.name}b"
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
            _ip("address", "add", f"{self._near_address}/30", "dev", near)
            _ip("link", "set", near, "up")
            for arguments in (
                ["address", "add", f"{self.address}/30", "dev", far],
                ["link", "set", far, "up"],
                ["link", "set", "lo", "up"],
            ):
                _ip("-n", self.name, *arguments)
            if self._rate_mb_s is not None:
                bucket = max(_MIN_BUCKET_BYTES, int(self._rate_mb_s * 1e6 * _BUCKET_S))
                limit = ["rate", f"{round(self._rate_mb_s * 8e6)}bit", "burst", str(bucket)]
                limit += ["latency", f"{_QUEUE_MS}ms"]
                _run(["tc", "-n", self.name, "qdisc", "add", "dev", far, "root", "tbf", *limit])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):
            _ip("netns", "delete", self.name)  # its interface goes with it, and so does the other end


def why_not() -> str:
    """Return why this machine cannot make a limited link. Empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for a network namespace"
    missing = [command for command in ("ip", "tc", "nsenter") if shutil.which(command) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        with LimitedLink(100):
            return ""
    except RuntimeError as error:
        return f"no network namespace with a token bucket: {error}"


def remove_leftovers() -> None:
    """Delete the namespaces of processes that were killed."""
    for path in _RUN.glob(f"{_PREFIX}[0-9]*") if _RUN.is_dir() else ():
        if not Path("/proc", path.name.removeprefix(_PREFIX)).exists():
            with contextlib.suppress(RuntimeError):
                _ip("netns", "delete", path.name)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")

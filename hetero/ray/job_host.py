"""One host of a job that Ray places: an actor whose child process is a launcher.

The driver calls the methods `run` and `guard` once each. `run` returns when the launcher has ended. The other methods
run at the same time, on other threads of the actor.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hetero.control.security import Token
from hetero.errors import ClusterError, ExitCode
from hetero.launch.ranks.ranks import free_port
from hetero.metrics.lines import METRIC_MARK
from hetero.ray.child import Child
from hetero.ray.head import CHECK_S, RECONNECT_VARIABLE
from hetero.system.logs import write_line
from hetero.system.waits import END_TIMEOUT_S

__all__ = ["ACTOR_VARIABLES", "LEDGERS", "RESULTS", "Demand", "JobHost", "JobHostOrder", "Results"]

_GRACE_S = 60.0
"""Longest time that a launcher may take to stop when Ray has ended on its node."""
ACTOR_VARIABLES = {RECONNECT_VARIABLE: "600"}
"""Environment variables of the actor's process. Without them, Ray ends an actor and the methods that it runs after a
minute without an answer from the head. The launcher may need longer to stop."""
_MAX_FILE_BYTES = 64 << 20
LEDGERS = ("ledger-rank-*.jsonl",)
"""Patterns of the files that every trainer writes with ``--audit``."""
RESULTS = ("report.json", "report.md", "metrics.json", "profile.json", "profile.md", *LEDGERS)
"""Patterns of the files that the first trainer writes."""
_WANTED = re.compile(rf"{METRIC_MARK} (wanted_data_hosts_(?:low|high))=([0-9]+)")
_LAST_FIGURE = "wanted_data_hosts_high"
"""The launcher logs this figure of an estimate last."""
JobHostOrder = dict[str, Any]
"""What a host gets from the driver: its ``name``, ``arguments`` of `hetero launch`, the words of the ``script`` that
follow them, ``cluster``, ``hosts`` by name, ``token``, ``variables``. Plain values, as Ray sends it."""


class Demand(NamedTuple):
    """An estimate of the number of data hosts that the job could use."""

    number: int
    """1 for the first estimate of the job, 2 for the second."""
    low: int
    high: int


class Results(NamedTuple):
    """Files that a launcher has written."""

    files: dict[str, bytes]
    """Content by name."""
    too_large: list[str]
    """Paths of files that are too large to be sent."""


class JobHost:
    """Runs the launcher of one host. The driver makes it a Ray actor with several threads."""

    def __init__(self) -> None:
        self._node_pid = os.getppid()
        """Process id of Ray on this node. If that process ends, Ray does not interrupt a method that runs. Therefore
        methods that wait compare this value with their parent process."""
        self._folder: Path | None = None
        """Folder with the files of the launcher. None before `run`."""
        self._child: Child | None = None
        """The launcher. None before `run`."""
        self._changed = threading.Condition()
        """Lock of the other attributes, which several threads use. Notified after each new estimate."""
        self._was_asked_to_stop = False
        self._is_closed = threading.Event()
        self._figures: dict[str, int] = {}
        """The figures of the latest estimate that the launcher has logged, by name."""
        self._num_estimates = 0
        """Number of estimates that the launcher has logged."""

    def address(self) -> str:
        """Return the address of this node."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())  # type: ignore[no-untyped-call]

    def run(self, order: JobHostOrder) -> int:
        """Run the launcher and return its exit code, which is negative if a signal ended it.

        Raises:
            PortError: If all ports of this node are taken.
        """
        with self._changed:
            if self._was_asked_to_stop:
                return -signal.SIGTERM
            self._child = child = self._start(order)
        child.wait(timeout_s=None)
        # The launcher has no exit code if it was stopped before its process started.
        return -signal.SIGTERM if child.exit_code is None else child.exit_code

    def _start(self, order: JobHostOrder) -> Child:
        """Write the files that the launcher reads, and start the launcher."""
        self._folder = folder = Path(tempfile.mkdtemp(prefix="hetero-ray-"))
        (folder / "cluster.json").write_text(json.dumps(order["cluster"]), encoding="utf-8")
        addresses = {**order["hosts"], order["name"]: self.address()}
        hosts = folder / "hosts"
        hosts.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()), encoding="utf-8")
        # Only this node knows its folder and a free port. A host that joins needs a free port, because another host may
        # use the default port on the same node. The arguments of the script stay as they are.
        port = str(free_port())
        options = [text.replace("{folder}", str(folder)).replace("{port}", port) for text in order["arguments"]]
        return Child(
            ["-m", "hetero.cli", *options, *order["script"]],
            token=Token(order["token"]),
            folder=str(Path.cwd()),
            variables={**order["variables"], "HETERO_HOSTS_FILE": str(hosts)},
            on_line=self._read,
            on_error_line=self._read,
            on_end=lambda _: None,
        )

    def guard(self) -> None:
        """Stop the launcher, remove the files of this host and end this process if Ray ends on its node.

        When Ray ends on a node, Ray ends this process only after the running methods have returned. If the head was
        lost, Ray would first wait for an answer from the head.
        """
        while not self._is_closed.wait(CHECK_S):
            if os.getppid() != self._node_pid:
                write_line("hetero: Ray's process on this node has ended, so the launcher is asked to stop")
                self.stop()
                self.close(_GRACE_S)
                # Let the driver get the exit code of `run` first. The driver checks more often than this.
                time.sleep(CHECK_S)
                os._exit(ExitCode.ORPHANED)

    def stop(self) -> None:
        """Ask the launcher to stop. Does not wait. Idempotent."""
        with self._changed:
            self._was_asked_to_stop = True
            if self._child is not None:
                self._child.stop()

    def demand(self, after: int) -> Demand:
        """Wait for an estimate that is newer than number ``after``, and return the latest one.

        Raises:
            ClusterError: If the launcher or Ray has ended on this node.
        """
        with self._changed:
            # Wait for short times only, because this method must not outlive Ray on its node.
            while not self._changed.wait_for(lambda: self._num_estimates > after, CHECK_S):
                has_ended = self._child is not None and self._child.wait(timeout_s=0)
                if has_ended or os.getppid() != self._node_pid:
                    raise ClusterError("the launcher of this host has ended, or Ray on its node")
            # An estimate is counted when its last figure arrives, so both figures are known. The last figure is the
            # upper end of the interval.
            low, high = self._figures["wanted_data_hosts_low"], self._figures[_LAST_FIGURE]
            return Demand(self._num_estimates, low, high)

    def results(self, patterns: Sequence[str]) -> Results:
        """Return the files that the launcher has written and that match a pattern."""
        found = Results(files={}, too_large=[])
        # The launcher was stopped before it started.
        if self._folder is None:
            return found
        for pattern in patterns:
            for path in sorted((self._folder / "output").glob(pattern)):
                if path.stat().st_size <= _MAX_FILE_BYTES:
                    found.files[path.name] = path.read_bytes()
                else:
                    found.too_large.append(str(path))
        return found

    def close(self, grace_s: float) -> None:
        """Give the launcher ``grace_s`` seconds to end, then kill it if it runs. Remove the files of this host."""
        with self._changed:
            # A launcher that has not started must not start now.
            self._was_asked_to_stop = True
            child = self._child
        if child is not None and not child.wait(grace_s):
            child.stop(signal.SIGKILL)
            child.wait(END_TIMEOUT_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._is_closed.set()

    def _read(self, line: str) -> None:
        """Print a line of the launcher, which Ray sends to the driver, and read its figures."""
        if match := _WANTED.search(line):
            with self._changed:
                self._figures[match[1]] = int(match[2])
                # The launcher logs each figure of an estimate in a separate line. With the last one, the estimate is
                # complete.
                if match[1] == _LAST_FIGURE:
                    self._num_estimates += 1
                    self._changed.notify_all()
        write_line(line)

"""One host of a job that Ray places: an actor whose child process is a launcher."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.control.security import Token
from hetero.errors import ExitCode
from hetero.launch.ranks.ranks import free_port
from hetero.metrics.lines import METRIC_MARK
from hetero.ray.child import Child
from hetero.system.logs import write_line

__all__ = ["JobHost", "JobHostOrder"]

_MAX_FILE_BYTES = 64 << 20
_POLL_S = 0.1
_RESULTS = ("report.json", "report.md", "metrics.json", "profile.json")
_WANTED = re.compile(rf"{METRIC_MARK} (wanted_data_hosts(?:_low|_high)?)=([0-9]+)")
JobHostOrder = dict[str, Any]
"""What a host gets from the driver: its ``name``, ``arguments`` of `hetero launch`, ``options``, ``cluster``, ``hosts``
by name, ``token`` and ``variables``. Ray sends it, so it has plain values only."""


class JobHost:
    """Runs the launcher of one host. The driver makes it a Ray actor with several threads."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hetero-ray-"))
        self._child: Child | None = None
        self._wanted: dict[str, int] = {}

    def address(self) -> str:
        """Return the address of this node."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())  # type: ignore[no-untyped-call]

    def start(self, order: JobHostOrder) -> None:
        """Start the launcher."""
        files: Mapping[str, object] = {"options.json": order["options"], "cluster.json": order["cluster"]}
        for name, content in files.items():
            (self._folder / name).write_text(json.dumps(content), encoding="utf-8")
        addresses = {**order["hosts"], order["name"]: self.address()}
        hosts = self._folder / "hosts"
        hosts.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()), encoding="utf-8")
        # A host that joins may be on the node of another one, so it needs a port of its own.
        values = {"{folder}": str(self._folder), "{port}": str(free_port())}
        arguments: Sequence[str] = [_filled(text, values) for text in order["arguments"]]
        self._child = Child(
            ["-m", "hetero.cli", *arguments],
            token=Token(order["token"]),
            folder=str(Path.cwd()),
            variables={**order["variables"], "HETERO_HOSTS_FILE": str(hosts)},
            on_line=self._read,
            on_error_line=self._read,
            on_end=lambda _: None,
        )

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code of the launcher, or None if it still runs after this time."""
        deadline_s = time.monotonic() + timeout_s
        while (child := self._child) is None:  # another thread of this actor is about to start it
            if time.monotonic() > deadline_s:
                return None
            time.sleep(_POLL_S)
        if not child.wait(max(0.0, deadline_s - time.monotonic())):
            return None
        return int(ExitCode.RESOURCES) if child.exit_code is None else child.exit_code

    def stop(self) -> None:
        """Ask the launcher to stop. Does not wait."""
        if self._child is not None:
            self._child.stop()

    def wanted(self) -> dict[str, int]:
        """Return the number of data hosts that the job could use, with its interval. Empty if it is not known."""
        return dict(self._wanted)

    def results(self) -> dict[str, bytes]:
        """Return the files that the launcher has written, without those that are too large."""
        found = {}
        for name in _RESULTS:
            path = self._folder / "output" / name
            if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
                found[name] = path.read_bytes()
        return found

    def clean_up(self) -> None:
        """Remove the files of this host."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, line: str) -> None:
        """Print a line of the launcher, which Ray sends to the driver, and read its figures."""
        match = _WANTED.search(line)
        if match:
            self._wanted[match[1]] = int(match[2])
        write_line(line)


def _filled(text: str, values: Mapping[str, str]) -> str:
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text

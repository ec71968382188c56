"""The hosts of one job on a network that can be hurt: the real launcher on each, started, killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.chaos import leftovers
from tests.support.chaos.networks import PORT, Network

MARKER = "HETERO_TEST_RUN"
HOST = "HETERO_TEST_HOST"
TRAINER = "algo-9"
SCRIPT = Path(__file__).parents[2] / "chaos" / "soak_script.py"
TIME_SCALE = 0.2
LEASE_S = 3.0


def host_names(num_data: int) -> list[str]:
    """Return the names of data hosts, and of the trainer host after them."""
    return [f"algo-{number}" for number in range(1, num_data + 1)] + [TRAINER]


class Hosts:
    """Every host of one job, as a context manager that kills what is left.

    Args:
        network: Theirs.
        folder: Receives logs, results and trees. New for every job.
        args: Of the script.
        flags: Of every launcher.
    """

    def __init__(self, network: Network, folder: Path, *, args: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
        self.network = network
        self.folder = folder
        self.data_hosts = [host for host in network.hosts if host != TRAINER]
        self.marker = uuid.uuid4().hex
        self._args, self._flags = list(args), list(flags)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("tmp", "work", "out", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        groups = [
            {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": self.data_hosts},
            {"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": [TRAINER]},
        ]
        self._cluster_file = folder / "cluster.json"
        self._cluster_file.write_text(json.dumps({"instance_groups": groups}))
        self._token_file = folder / "token"
        self._token_file.touch(mode=0o600)
        self._token_file.write_text(uuid.uuid4().hex)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        left = self.processes()
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=300.0)

    # Launchers

    def start(self, *hosts: str) -> None:
        """Start the launchers of hosts, by default of all. Call it on the main thread, because they end with it."""
        for host in hosts or self.network.hosts:
            flags = ["--cluster-file", str(self._cluster_file), "--host", host, "--port", str(PORT)]
            flags += ["--allow-faults", *self._flags]  # one kind of network needs a fault to find the others
            command = [*self.network.command(host), sys.executable, "-m", "hetero.cli", "launch", *flags, str(SCRIPT)]
            environment = {
                **os.environ,
                **self.network.environment(host, self.folder),
                MARKER: self.marker,
                HOST: host,
                "HETERO_PARENT_PID": str(os.getpid()),
                "TMPDIR": str(self.folder / "tmp"),
                "HETERO_WORK_DIR": str(self.folder / "work"),
                "HETERO_TOKEN_FILE": str(self._token_file),
                "HETERO_TIME_SCALE": str(TIME_SCALE),
                "SAGEMAKER_BASE_DIR": str(self.folder / "ml" / host),
            }
            with self.log_file(host).open("ab") as log:
                self._processes[host] = subprocess.Popen(
                    [*command, "--", "--output", str(self.folder / "out"), *self._args],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def launcher(self, host: str) -> subprocess.Popen[bytes]:
        """Return a host's last launcher."""
        return self._processes[host]

    def kill(self, host: str) -> None:
        """SIGKILL a host's launcher. Its processes die with it."""
        self._processes[host].kill()
        self._processes[host].wait()

    def log_file(self, host: str) -> Path:
        """Return where everything that a host prints goes."""
        return self.folder / "logs" / f"{host}.txt"

    def log(self, host: str) -> str:
        """Return what a host has printed."""
        with contextlib.suppress(FileNotFoundError):
            return self.log_file(host).read_text(errors="replace")
        return ""

    def results(self) -> dict[int, dict[str, Any]]:
        """Return what the script wrote, by rank."""
        files = sorted((self.folder / "out").glob("rank-*.json"))
        return {int(file.stem.partition("-")[2]): json.loads(file.read_text()) for file in files}

    def checkpoint(self, rank: int = 0) -> dict[str, Any]:
        """Return what a rank has saved after its last step. Empty before the first one."""
        with contextlib.suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads((self.folder / "out" / f"checkpoint-{rank}.json").read_text())
            return found
        return {}

    def step(self, rank: int = 0) -> int:
        """Return the last step that a rank has saved."""
        return int(self.checkpoint(rank).get("step", 0))

    # Processes

    def processes(self) -> list[psutil.Process]:
        """Return every living process of this job, found by its environment."""
        return list(self._living())

    def endpoints(self, host: str | None = None) -> list[psutil.Process]:
        """Return the endpoint processes, those of one host or all: what fork servers have forked."""
        return [
            process
            for process, parent in self._children(host)
            if _is_endpoint(process) or (_is_fork_server(process) and _is_fork_server(parent))
        ]

    def fork_servers(self, host: str | None = None) -> list[psutil.Process]:
        """Return the processes that import the script and fork endpoints."""
        return [
            process
            for process, parent in self._children(host)
            if _is_fork_server(process) and not _is_fork_server(parent)
        ]

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes."""
        found = []
        for process, parent in self._children(TRAINER):
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "hetero.launch.ranks.rank" in line and parent is not None:
                    found.append(process)
        return found

    def _children(self, host: str | None) -> Iterator[tuple[psutil.Process, psutil.Process | None]]:
        for process in self._living():
            with contextlib.suppress(psutil.Error):
                if host is None or process.environ().get(HOST) == host:
                    yield process, process.parent()

    def _living(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARKER) == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    # Waiting and sweeping

    def wait_for(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Poll until a condition holds.

        Raises:
            AssertionError: It did not, with the end of the logs.
        """
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{self.tails()}")
            time.sleep(0.02)

    def wait_line(self, host: str, text: str, timeout_s: float = 300.0) -> None:
        """Wait until a host has printed something."""
        self.wait_for(lambda: text in self.log(host), timeout_s, f"{host} prints {text!r}")

    def tails(self, num_lines: int = 30) -> str:
        """Return the end of every log."""
        return "\n".join(
            f"--- {host}\n" + "\n".join(self.log(host).splitlines()[-num_lines:]) for host in self.network.hosts
        )

    def leftovers(self, shared_before: set[Path], timeout_s: float = 15.0) -> list[str]:
        """Return what the job has left once its launchers have ended: processes, ports, shared memory, files."""
        deadline_s = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline_s:
            psutil.wait_procs(left, timeout=0.2)
        found = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                found.append(f"process {process.pid} {' '.join(process.cmdline())[:120]}")
        found += [f"port {place}" for place in sorted(self.network.listening())]
        found += [f"shared memory {path}" for path in leftovers.new_shared_memory(shared_before)]
        # A killed process cannot remove what Python's multiprocessing made for it (pymp-*).
        found += [f"file {path}" for path in sorted((self.folder / "tmp").iterdir()) if "pymp-" not in path.name]
        return found


def _is_fork_server(process: psutil.Process | None) -> bool:
    with contextlib.suppress(psutil.Error):
        return process is not None and "hetero.pool.fork_server" in process.cmdline()
    return False


def _is_endpoint(process: psutil.Process) -> bool:
    """Tell whether it is one that was not forked."""
    with contextlib.suppress(psutil.Error):
        return "hetero.endpoint.endpoint" in process.cmdline()
    return False


def signal_safely(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal to a process that may have ended meanwhile. Return True if it had not."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
        return True
    return False

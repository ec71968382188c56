"""The actors of a data service. Each has a child process that does the work.

A launcher is stopped by signals and says by its exit code why it ended. Ray needs the signals and the exit code of an
actor's process for itself, so the launcher, or the hub, has a process of its own.

`Coordinator` runs the hub (`hetero.ray.coordinator`), and owns the actors of the data hosts. If the coordinator is
lost, Ray ends them too. `DataHost` runs a launcher that joins the job. If that process ends unexpectedly, the actor's
process ends too, and Ray starts the actor again, perhaps on another node.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hetero.control.security import Token
from hetero.errors import ConfigError, ExitCode
from hetero.launch.ranks.ranks import free_port
from hetero.ray.child import Child
from hetero.ray.head import CHECK_S
from hetero.ray.scaling import Bounds, Scaler
from hetero.system.logs import write_line
from hetero.system.process import describe_exit_status
from hetero.system.scripts import find_script, script_words
from hetero.wire.channels import join_address

__all__ = ["START_S", "Admission", "Coordinator", "DataHost", "ServiceOrder", "node_address", "script_folder"]

logger = logging.getLogger(__name__)

_GROUP = "data"
START_S = 120.0
"""Longest time until the hub listens. A node that is busy may import Python's modules for seconds."""
_END_S = 20.0
"""Longest time for a data host to drain and end after SIGTERM."""
_INFO = "] INFO "
"""Mark of lines that do not explain why a process has ended."""
_FINAL = (ExitCode.USAGE, ExitCode.DISAGREEMENT, ExitCode.AUTHENTICATION, ExitCode.SCRIPT_FAILED, ExitCode.INTERNAL)
"""Exit codes of a launcher that would fail again in the same way if it was started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOrder:
    """What the driver asks for. Ray sends it to the actors and workers."""

    script: str
    script_args: tuple[str, ...]
    is_module: bool
    flags: tuple[str, ...]
    """Flags of `hetero launch` that are the same on every host."""
    driver_folder: str
    """Current folder of the driver. Used on a node if it exists there and has the script."""
    num_hosts: int
    """Data hosts at the start."""
    num_reserved: int
    """How many of these hosts have a bundle of the placement group. Ray keeps the CPUs of a bundle reserved to the
    end."""
    cpus_per_host: float
    label_selector: dict[str, str] | None
    bounds: Bounds | None
    """Bounds of the number of data hosts. None if the number is fixed."""


class Admission(TypedDict):
    """What a worker or data host needs to know about its job. Ray sends it only to the processes that ask."""

    launcher: str
    """``address:port`` of the hub, for data hosts."""
    rank_launcher: str
    """``address:port`` of the hub, for workers."""
    job_id: str
    token: str
    host: str
    """Name of a data host. Empty for a worker."""


class Coordinator:
    """The actor that runs the hub and owns the data hosts. Several threads call it.

    Args:
        order: What the driver asks for.
        placement: Placement group of the data hosts that never leave.
    """

    def __init__(self, order: ServiceOrder, placement: Any) -> None:
        self._order = order
        self._placement = placement
        self._token = Token.generate()
        self._job_id = f"ray-{secrets.token_hex(4)}"
        self._address = node_address()
        self._changed = threading.Condition()
        """Lock of the next attributes, which several threads use. Notified after each change."""
        self._port = self._rank_port = 0
        """Ports of the hub for data hosts and for ranks. 0 until the hub listens."""
        self._failure = ""
        """Why the service has failed. Empty before."""
        self._serving: list[str] = []
        """Names of the data hosts that serve."""
        self._wanted: dict[str, int] | None = None
        """The latest estimate of how many data hosts the job could use. None if `_scale` has handled it."""
        self._is_closing = False
        self._hosts: dict[int, Any] = {}
        """The actors of the data hosts, by number."""
        self._num_made = 0
        """Number of data hosts that Ray was asked for, without repeated starts."""
        self._num_starts: dict[int, int] = {}
        """Number of times that each data host was started, by the number of the host."""
        self._child: Child | None = None
        try:
            folder = script_folder(order)
        except ConfigError as error:
            # `start` returns this text to the driver.
            self._failure = str(error)
            return
        command = ["-m", "hetero.ray.coordinator", self._address, self._job_id, *order.flags]
        self._child = Child(
            [*command, *script_words(order.script, is_module=order.is_module), "--", *order.script_args],
            token=self._token,
            folder=folder,
            variables={},
            on_line=self._on_line,
            on_end=self._on_end,
        )

    def start(self) -> str:
        """Wait for the hub, then start the data hosts. Return why the hub did not start, or an empty text."""
        with self._changed:
            self._changed.wait_for(lambda: self._port or self._failure, START_S)
            # The port is not known before the hub listens.
            if not self._port:
                return self._failure or f"the hub did not start within {START_S:.0f} s"
        for _ in range(self._order.num_hosts):
            self._add()
        threading.Thread(target=self._scale, name="scale", daemon=True).start()
        return ""

    def admission(self) -> Admission:
        """Return what a worker needs to connect."""
        return {
            "launcher": join_address(self._address, self._port),
            "rank_launcher": join_address(self._address, self._rank_port),
            "job_id": self._job_id,
            "token": self._token.reveal(),
            "host": "",
        }

    def host_admission(self, number: int) -> Admission:
        """Return what a data host needs to join.

        Each start has a new name, because the hub may still count the host of the start before as a living host.

        Args:
            number: Number of the data host.
        """
        with self._changed:
            num_starts = self._num_starts[number] = self._num_starts.get(number, 0) + 1
        name = f"data-{number}" if num_starts == 1 else f"data-{number}-start{num_starts}"
        return {**self.admission(), "host": name}

    def fail(self, reason: str) -> None:
        """Record and print the first failure of the service, unless the service is ending.

        A data host calls this method if it has failed and would fail again after a restart.

        Args:
            reason: Why the service fails, with the last lines of the process that has failed.
        """
        with self._changed:
            if self._failure or self._is_closing:
                return
            self._failure = reason
            self._changed.notify_all()
        write_line(f"the data service has failed: {reason}")

    def failure(self) -> str:
        """Return why the service has failed. Empty if it has not."""
        return self._failure

    def serving(self) -> list[str]:
        """Return the names of the data hosts that serve now."""
        return list(self._serving)

    def shutdown(self) -> None:
        """Let the hub and the data hosts end, and wait for them. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._end_all()

    def _on_line(self, line: str) -> None:
        """Read what the hub's process has written, see `hetero.ray.coordinator`."""
        try:
            fact = json.loads(line)
        except ValueError:
            fact = None
        # `hetero.ray.coordinator` writes objects only. Perhaps a library has printed this line.
        if not isinstance(fact, dict):
            write_line(line)
            return
        with self._changed:
            self._port = fact.get("port", self._port)
            self._rank_port = fact.get("rank_port", self._rank_port)
            self._serving = fact.get("hosts", self._serving)
            self._wanted = fact.get("wanted", self._wanted)
            self._changed.notify_all()

    def _on_end(self, child: Child) -> None:
        """Fail the service if the hub's process has ended without a request."""
        if not child.was_asked_to_stop:
            self.fail(_explained("the coordinator of the data service", child))

    def _add(self) -> None:
        """Ask Ray for another data host. Does not wait for it."""
        order, number = self._order, self._num_made
        self._num_made += 1
        # With -1, Ray starts the actor again whenever it is lost.
        options: dict[str, Any] = {"num_cpus": order.cpus_per_host, "max_restarts": -1}
        # The first data hosts have bundles of the placement group. Ray places the other ones anywhere.
        if number < order.num_reserved:
            where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=number)
            options["scheduling_strategy"] = where
        else:
            options["scheduling_strategy"] = "SPREAD"
            if order.label_selector is not None:
                options["label_selector"] = order.label_selector
        coordinator = ray.get_runtime_context().current_actor
        self._hosts[number] = ray.remote(DataHost).options(**options).remote(order, coordinator, number)

    def _end_all(self) -> None:
        """End the data hosts and the hub, in this order."""
        if self._child is not None:
            # After SIGTERM the hub tells the data hosts that the job is done, and still answers them. SIGINT ends it.
            self._child.stop(signal.SIGTERM)
        self._end(list(self._hosts))
        if self._child is not None:
            self._child.stop(signal.SIGINT)
            self._child.wait(_END_S)

    def _end(self, numbers: list[int]) -> None:
        """Ask data hosts to drain, wait for them together, and remove their actors."""
        hosts = [self._hosts.pop(number) for number in numbers]
        answers = [host.stop.remote() for host in hosts]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_END_S)
        for host in hosts:
            ray.kill(host)

    def _scale(self) -> None:
        """Follow the number of data hosts that the job could use, and end all data hosts if the service fails."""
        scaler = None if self._order.bounds is None else Scaler(self._order.bounds)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._failure or self._is_closing)
                estimate, self._wanted = self._wanted, None
                has_failed, is_closing = bool(self._failure), self._is_closing
            if is_closing:
                return
            if has_failed:
                self._end_all()
                return
            if scaler is None or estimate is None:
                continue
            target = scaler.target(low=estimate["low"], high=estimate["high"], present=len(self._hosts))
            if target != len(self._hosts):
                write_line(
                    f"the job could use {estimate['hosts']} data hosts ({estimate['low']} to {estimate['high']}); "
                    f"changing their number from {len(self._hosts)} to {target}"
                )
            while len(self._hosts) < target:
                self._add()
            if len(self._hosts) > target:
                # End the newest host. The first hosts have bundles, and Ray keeps the CPUs of a bundle reserved even
                # without a host.
                self._end([max(self._hosts)])


class DataHost:
    """The actor of a data host.

    Args:
        order: What the driver asks for.
        coordinator: The coordinator's actor.
        number: Number of this data host.
    """

    def __init__(self, order: ServiceOrder, coordinator: Any, number: int) -> None:
        self._coordinator = coordinator
        self._child: Child | None = None
        try:
            folder = script_folder(order)
        except ConfigError as error:
            coordinator.fail.remote(str(error))
            return
        admission: Admission = ray.get(coordinator.host_admission.remote(number))
        self._name = admission["host"]
        flags_of_host = [f"--join={admission['launcher']}", f"--host={self._name}", f"--join-group={_GROUP}"]
        # Several data hosts may share a node, so each launcher has a free port.
        command = ["-m", "hetero.cli", "launch", *order.flags, *flags_of_host, f"--port={free_port()}"]
        self._child = Child(
            [*command, *script_words(order.script, is_module=order.is_module), "--", *order.script_args],
            token=Token(admission["token"]),
            folder=folder,
            variables={"HETERO_JOB_ID": admission["job_id"]},
            on_end=self._on_end,
        )

    def stop(self) -> None:
        """Ask the launcher to stop, and wait until it has drained and ended."""
        if self._child is not None:
            self._child.stop()
            self._child.wait(_END_S)

    def _on_end(self, child: Child) -> None:
        """Handle the end of the launcher: report a failure that would repeat, or let Ray start this actor again."""
        # A launcher ends with 0 when its job is done, so the service was shut down.
        if child.was_asked_to_stop or child.exit_code == ExitCode.OK:
            return
        reason = _explained(f"data host {self._name}", child)
        # The next start would end in the same way.
        if child.exit_code in _FINAL:
            self._coordinator.fail.remote(reason)
            return
        write_line(f"{reason}\nstarting it again")
        # Ray starts the actor again at once. A launcher that always fails must not keep the node busy.
        time.sleep(CHECK_S)
        os._exit(1)


def node_address() -> str:
    """Return the address of this node."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def script_folder(order: ServiceOrder) -> str:
    """Return the folder of the script on this node: the current folder, or else the driver's folder.

    Raises:
        ConfigError: If neither folder has the script.
    """
    own, driver = Path.cwd(), Path(order.driver_folder)
    package, _, _ = order.script.partition(".")
    for folder in (own, driver):
        has_script = _has_module(folder, package) if order.is_module else (folder / order.script).is_file()
        if has_script:
            return str(folder)
    if order.is_module:
        # The module must be installed then. If it is not, `find_script` raises. Python finds an installed module from
        # any folder.
        find_script(order.script, is_module=True)
        return str(own)
    raise ConfigError(
        f"the script {order.script!r} is not on node {node_address()}\n"
        f"  found: neither {own / order.script} nor {driver / order.script}\n"
        "  to do: ray.init(runtime_env={'working_dir': '.'}), or give a path that every node has"
    )


def _has_module(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


def _explained(name: str, child: Child) -> str:
    """Return how a process has ended, with the last lines that may explain it.

    Ray shows only the end of a long text in its own errors.
    """
    assert child.exit_code is not None
    lines = "".join(f"\n    {line}" for line in child.last_lines if _INFO not in line)
    return f"{name} {describe_exit_status(child.exit_code)}{lines}"

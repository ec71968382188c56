"""`DataService`: the data service of a Ray Train job, as its driver and its workers see it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.config import LaunchOptions, to_flags
from hetero.errors import ConfigError, DataPlaneError, HeteroError
from hetero.ray.connection import ServiceGoneError, import_ray, summary, wait_placed
from hetero.ray.scaling import Bounds

if TYPE_CHECKING:
    from hetero.ray.actors import ServiceOrder

__all__ = ["DataService"]

_CALL_S = 30.0
_SHUTDOWN_S = 60.0
_REFUSED = ("data_service", "tls_dir", "profile", "plan", "audit", "join", "join_group", "host", "port", "platform")


class DataService:
    """Data hosts that compute the batches of a Ray Train job. Make it in the driver, and pass it to the workers.

    The constructor connects to Ray, if this process is not connected yet, and waits until Ray has placed the data hosts
    that never leave: ``min_hosts`` if it is given, else ``num_hosts``. The constructor does not wait until the data
    hosts serve. The first batch waits for that. Use it as a context manager, or call `shutdown`. If the driver ends and
    does neither, Ray ends the service.

    A pickled `DataService` is a reference to the same service. A worker connects with this reference.

    Args:
        script: Path of the script that registers the data sets with ``@hetero.dataset``, usually the training script
            itself. Data hosts import it. Every node needs it, at this path, or below Ray's ``working_dir``.
        num_hosts: Data hosts at the start, at least 1. Ray spreads them over the nodes.
        cpus_per_host: CPUs that Ray reserves for each data host, at least 1.
        endpoints_per_host: Endpoints of each data host. Default: one per reserved CPU.
        label_selector: Labels of the nodes that data hosts may use, as in Ray.
        min_hosts: Smallest number of data hosts. With ``min_hosts`` or ``max_hosts``, the number follows what the job
            could use. Default: ``num_hosts``, if ``max_hosts`` is given.
        max_hosts: Largest number of data hosts. Default: ``num_hosts``, if ``min_hosts`` is given.
        script_args: Arguments of the script, for data hosts.
        is_module: Whether ``script`` is the name of a module.
        start_timeout_s: Longest time that Ray has to place the data hosts that never leave, in seconds.
        options: Further options of `hetero launch` by name, for example ``data_timeout_s=60``.

    Raises:
        CapacityError: If Ray cannot place the data hosts within ``start_timeout_s``.
        ConfigError: If an argument is out of range, or Ray is not installed.
        HeteroError: If the hub does not start, for example because the coordinator's node does not have the script.
    """

    def __init__(
        self,
        script: str,
        *,
        num_hosts: int = 1,
        cpus_per_host: float = 1,
        endpoints_per_host: int | None = None,
        label_selector: Mapping[str, str] | None = None,
        min_hosts: int | None = None,
        max_hosts: int | None = None,
        script_args: Sequence[str] = (),
        is_module: bool = False,
        start_timeout_s: float = 900.0,
        **options: Any,
    ) -> None:
        # Check the arguments, and collect what the actors need.
        _check(num_hosts, cpus_per_host, options)
        bounds = _bounds(num_hosts, min_hosts, max_hosts)
        launch = LaunchOptions(
            script=script,
            script_args=tuple(script_args),
            module=is_module,
            endpoints_per_host=endpoints_per_host or max(1, int(cpus_per_host)),
            start_timeout_s=start_timeout_s,
            **options,
        )
        ray = import_ray()
        from hetero.ray.actors import START_S, Coordinator, ServiceOrder

        self._order = ServiceOrder(
            script=script,
            script_args=launch.script_args,
            is_module=is_module,
            flags=tuple(to_flags(launch)),
            driver_folder=str(Path.cwd()),
            num_hosts=num_hosts,
            num_reserved=num_hosts if bounds is None else bounds.min_hosts,
            cpus_per_host=cpus_per_host,
            label_selector=None if label_selector is None else dict(label_selector),
            bounds=bounds,
        )
        # Connect to Ray if the user has not, as Ray's own functions do.
        if not ray.is_initialized():
            ray.init()
        self._coordinator: Any = None
        self._placement: Any = None
        # A copy of this object in a worker is no owner, and cannot shut the service down.
        self._is_owner = True
        # Place the data hosts, and start the coordinator. The coordinator starts the hub and the data hosts.
        try:
            self._placement = _place(ray, self._order, start_timeout_s)
            # The coordinator needs several threads. Workers and data hosts call it at the same time, and `start` and
            # `shutdown` each use a thread for seconds.
            coordinator = ray.remote(Coordinator).options(
                # With 0, Ray can start it on a node without free CPUs.
                num_cpus=0,
                max_concurrency=16,
                # Prefer the driver's node. The service ends with its driver in any case, so this node cannot leave too
                # early. A node of data hosts may leave while the service runs.
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=True
                ),
            )
            self._coordinator = coordinator.remote(self._order, self._placement)
            reason = ray.get(self._coordinator.start.remote(), timeout=start_timeout_s + START_S + _CALL_S)
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ray.exceptions.RayError):
                raise _translated(error) from error
            raise
        if reason:
            self.shutdown()
            raise HeteroError(f"the data service did not start: {reason}")

    def connect(self) -> None:
        """Connect this worker of Ray Train to the service, which then gives batches to `hetero.torch.DataLoader`.

        Call it in ``train_loop_per_worker``, before the first loader is made. This method imports the script of the
        service, unless the script's data sets are registered already. If the service fails or is shut down, loaders
        raise `DataPlaneError` within seconds. A second call does nothing.

        Raises:
            AuthenticationError: If the service refuses this worker.
            ConfigError: If this process is not a worker of Ray Train, or if the script is missing or registers no data
                set.
            DataPlaneError: If the service has ended or failed.
        """
        # `hetero.ray.worker` imports the data plane, which the driver does not need.
        from hetero.ray.worker import connect

        connect(self._order, self.call)

    def serving(self) -> list[str]:
        """Return the names of the data hosts that serve now. Blocks for one call of Ray.

        Raises:
            DataPlaneError: If the service has ended or failed.
        """
        return list(self.call("serving"))

    def wait_serving(self, num_hosts: int | None = None, *, timeout_s: float = 300.0) -> None:
        """Wait until data hosts serve.

        A job need not call this method, because the first batch waits for the first data host.

        Args:
            num_hosts: Number of hosts to wait for. Default: the number at the start of the service.
            timeout_s: Longest time to wait, in seconds.

        Raises:
            DataPlaneError: If the service fails, or fewer hosts serve at the end of this time.
        """
        wanted = self._order.num_hosts if num_hosts is None else num_hosts
        deadline_s = time.monotonic() + timeout_s
        while len(found := self.serving()) < wanted:
            if failure := self.call("failure"):
                raise DataPlaneError(f"the data service has failed: {failure}")
            if time.monotonic() > deadline_s:
                raise DataPlaneError(
                    f"the data service has {len(found)} of {wanted} data hosts after {timeout_s:.0f} s\n"
                    f"  found: {', '.join(found) or 'none'}\n"
                    "  to do: read the log of the actors named DataHost, and see `ray status` for missing CPUs"
                )
            time.sleep(0.2)

    def call(self, method: str, *, timeout_s: float = _CALL_S) -> Any:
        """Call the coordinator's actor and return its answer.

        Args:
            method: Name of a method without arguments.
            timeout_s: Longest time to wait, in seconds.

        Raises:
            DataPlaneError: If the actor does not answer in time.
            ServiceGoneError: If the actor has ended.
        """
        ray = import_ray()
        if self._coordinator is None:
            raise ServiceGoneError("the data service was shut down; make another DataService")
        try:
            return ray.get(getattr(self._coordinator, method).remote(), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise _translated(error) from error

    def shutdown(self) -> None:
        """End the data hosts and the coordinator, and give their CPUs back to Ray. Idempotent.

        Blocks until the processes have ended, usually a few seconds, at most a minute.

        Raises:
            ConfigError: If another process has made the service.
        """
        if not self._is_owner:
            raise ConfigError("only the process that made the DataService can shut it down")
        ray = import_ray()
        coordinator, self._coordinator = self._coordinator, None
        placement, self._placement = self._placement, None
        if not ray.is_initialized():
            # When the driver disconnected, Ray ended the actors and removed the placement group.
            return
        # At its end the stack calls these functions, the last one first, even if another one fails. The same holds if
        # the wait for the coordinator fails or is interrupted.
        with contextlib.ExitStack() as stack:
            if placement is not None:
                stack.callback(ray.util.remove_placement_group, placement)
            if coordinator is not None:
                stack.callback(ray.kill, coordinator)
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(coordinator.shutdown.remote(), timeout=_SHUTDOWN_S)

    def __enter__(self) -> DataService:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, object]:
        return {"_order": self._order, "_coordinator": self._coordinator, "_placement": None, "_is_owner": False}


def _check(num_hosts: int, cpus_per_host: float, options: Mapping[str, Any]) -> None:
    """Check the arguments of a `DataService`.

    Raises:
        ConfigError: If an argument is out of range, or an option is not known or not supported.
    """
    if num_hosts < 1:
        raise ConfigError(f"num_hosts is {num_hosts}; expected at least 1")
    if cpus_per_host < 1:
        raise ConfigError(f"cpus_per_host is {cpus_per_host}; expected at least 1")
    known = {field.name for field in dataclasses.fields(LaunchOptions)}
    for name in options:
        if name in _REFUSED:
            raise ConfigError(f"DataService does not support the option {name!r}; leave it out")
        if name not in known:
            raise ConfigError(f"DataService has no option {name!r:.80}; see `hetero launch --help` for the options")


def _bounds(num_hosts: int, min_hosts: int | None, max_hosts: int | None) -> Bounds | None:
    """Return the bounds of the number of data hosts. None if the number is fixed.

    Raises:
        ConfigError: If the number at the start is not within the bounds.
    """
    if min_hosts is None and max_hosts is None:
        return None
    bounds = Bounds(
        min_hosts=num_hosts if min_hosts is None else min_hosts,
        max_hosts=num_hosts if max_hosts is None else max_hosts,
    )
    if not bounds.min_hosts <= num_hosts <= bounds.max_hosts:
        raise ConfigError(
            f"num_hosts is {num_hosts}; expected at least min_hosts ({bounds.min_hosts}) and at most max_hosts "
            f"({bounds.max_hosts})"
        )
    return bounds


def _place(ray: Any, order: ServiceOrder, timeout_s: float) -> Any:
    """Return a placement group for the data hosts that never leave. Blocks until Ray has placed it."""
    count = order.num_reserved
    selector = {} if order.label_selector is None else {"bundle_label_selector": [order.label_selector] * count}
    placement = ray.util.placement_group([{"CPU": order.cpus_per_host}] * count, strategy="SPREAD", **selector)
    needed = f"{count} data hosts with {order.cpus_per_host:g} CPUs each"
    if order.label_selector is not None:
        needed += f", on nodes with the labels {order.label_selector}"
    try:
        wait_placed(ray, placement, needed, timeout_s=timeout_s)
    # Remove the group also after an interrupt. Otherwise its CPUs would stay reserved.
    except BaseException:
        ray.util.remove_placement_group(placement)
        raise
    return placement


def _translated(error: Exception) -> HeteroError:
    """Return the error for a failure of a call to the coordinator's actor."""
    # If the code of the actor has raised an error, Ray's error has the original error in this attribute.
    cause = getattr(error, "cause", None)
    if isinstance(cause, HeteroError):
        return cause
    what = summary(error)
    if not isinstance(error, import_ray().exceptions.ActorDiedError):
        return DataPlaneError(
            f"the coordinator of the data service does not answer ({type(error).__name__}): {what:.200}"
        )
    return ServiceGoneError(
        f"the data service is gone: its coordinator has ended\n  found: {what:.200}\n"
        "  to do: keep the DataService open in the driver until the training has ended, and read the coordinator's log"
    )

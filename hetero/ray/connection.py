"""The connection of a driver to a Ray cluster, the placement of hosts there, and what Ray's errors mean."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero.documents.text import counted
from hetero.errors import (
    AuthenticationError,
    CapacityError,
    ClusterError,
    ConfigError,
    DataPlaneError,
    ExitCode,
    HeteroError,
)
from hetero.ray.head import HeadWatch
from hetero.system.logs import write_line
from hetero.system.waits import LOG_INTERVAL_S

__all__ = ["ServiceGoneError", "connected", "exit_code_of", "import_ray", "say", "summary", "wait_placed"]

_CODES = {
    "ActorUnschedulableError": ExitCode.CAPACITY,
    "AuthenticationError": ExitCode.AUTHENTICATION,
    "ObjectStoreFullError": ExitCode.RESOURCES,
    "OutOfDiskError": ExitCode.RESOURCES,
    "OutOfMemoryError": ExitCode.RESOURCES,
    "RayTaskError": ExitCode.INTERNAL,
    "RuntimeEnvSetupError": ExitCode.USAGE,
}
"""Exit codes by the name of Ray's error. Every other error means that the host was lost."""
_SHOWN = ("CPU", "GPU")


class ServiceGoneError(DataPlaneError):
    """The coordinator's actor of a data service has ended, or was shut down."""


def say(text: str) -> None:
    """Print a line of the driver."""
    write_line(f"hetero: {text}")


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ConfigError: If Ray is not installed.
    """
    try:
        import ray

        # `import ray` alone does not import this module.
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError("a job on Ray needs Ray, which is not installed; pip install 'hetero[ray]'") from error
    return ray


@contextmanager
def connected(ray: Any) -> Iterator[HeadWatch]:
    """Connect to the Ray cluster, and disconnect at the end if this process was not connected before.

    Yields:
        The watch of the head of the cluster. With Ray Client, which notices the loss itself, it watches nothing.

    Raises:
        ConfigError: If Ray cannot send the working directory to the nodes.
        AuthenticationError: If the cluster demands a token that is missing.
        ClusterError: If the Ray cluster is missing, has another version, or has failed.
    """
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            _connect(ray)
            stack.callback(ray.shutdown)
        # With Ray Client, the context does not know the address of the head.
        head_address = str(getattr(ray.get_runtime_context(), "gcs_address", ""))
        with HeadWatch(head_address, log_line=say) as head:
            try:
                yield head
            # Only failures of the whole cluster come here, because the caller handles errors of calls to single hosts.
            except ray.exceptions.RayError as error:
                raise ClusterError(f"the Ray cluster has failed: {summary(error)}") from error


def _connect(ray: Any) -> None:
    """Connect to the Ray cluster that ``RAY_ADDRESS`` names, or else to the cluster that Ray finds."""
    # In a Ray job, the runtime environment of that job already has the working directory.
    is_in_ray_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    environment = None if is_in_ray_job else {"working_dir": str(Path.cwd())}
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address == "local":
        raise ClusterError("RAY_ADDRESS is 'local', which would start another cluster; expected an address")
    say(f"connecting to the Ray cluster {address}")
    try:
        ray.init(address=address, runtime_env=environment, logging_level=logging.WARNING)
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise ConfigError(
            f"Ray cannot send the folder {Path.cwd()} to the nodes: {error}\n"
            "  to do: start the command from a folder that has only the code, or name the rest in .rayignore"
        ) from error
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # Compare the name, because not every version of Ray has this class.
        kind = AuthenticationError if type(error).__name__ == "AuthenticationError" else ClusterError
        raise kind(
            f"cannot connect to the Ray cluster {address}: {error}\n"
            "  to do: start one (ray start --head), set RAY_ADDRESS to ADDRESS:PORT of its head, or submit this "
            "command as a Ray job\n"
            "  if it demands a token (InvalidAuthToken): set RAY_AUTH_MODE=token, and put the token into "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from error


def exit_code_of(error: Exception) -> ExitCode:
    """Return the exit code of a host whose actor did not answer. No other function translates Ray's errors to codes."""
    # If the code of the actor has raised an error, Ray's error has the original error in this attribute.
    cause = getattr(error, "cause", None)
    if isinstance(cause, HeteroError):
        return cause.exit_code
    # Compare names, because not every version of Ray has all of these classes. A class may also be the base of the
    # error.
    found = (_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CODES)
    return next(found, ExitCode.ORPHANED)


def summary(error: Exception) -> str:
    """Return the first line of an error."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def wait_placed(
    ray: Any, placement: Any, needed: str, *, timeout_s: float, must_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until Ray has placed a placement group. Return False if ``must_stop`` returns True before that.

    Args:
        ray: The module.
        placement: The placement group.
        needed: Description of the hosts, for messages.
        timeout_s: Longest time to wait, in seconds.
        must_stop: Called about once per second.

    Raises:
        CapacityError: If Ray has not placed the group in time.
    """
    begin_s = shown_s = time.monotonic()
    # Wait for one second at a time, because `must_stop` has to be called meanwhile.
    while not placement.wait(1):
        now_s = time.monotonic()
        if must_stop():
            return False
        if now_s - begin_s > timeout_s:
            raise CapacityError(
                f"Ray has not placed the hosts within {timeout_s:.0f} s\n"
                f"  needed: {needed}\n"
                f"  found: {_nodes_of(ray)}\n"
                "  to do: ask for fewer hosts or CPUs, or add nodes"
            )
        if now_s - shown_s > LOG_INTERVAL_S:
            shown_s = now_s
            say(f"waiting for Ray to place {needed}; found: {_nodes_of(ray)}")
    return True


def _nodes_of(ray: Any) -> str:
    """Return the nodes of a cluster by kind, and the free CPUs and GPUs of all nodes together."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kinds = Counter(
        " ".join(f"{name}:{resources[name]:g}" for name in _SHOWN if name in resources) for resources in nodes
    )
    # A node may have neither CPUs nor GPUs for jobs, as heads of clusters often do.
    node_texts = [f"{count} with {kind or 'neither'}" for kind, count in kinds.most_common()]
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{name} {free.get(name, 0):g} of {total[name]:g}" for name in _SHOWN if total.get(name)]
    return f"{counted(len(nodes), 'node')} ({', '.join(node_texts)}); free: {', '.join(parts) or 'nothing'}"

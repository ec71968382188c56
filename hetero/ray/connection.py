"""The connection of a driver to a Ray cluster, and what Ray's errors mean."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero.errors import ClusterError, ConfigError, ExitCode, HeteroError
from hetero.ray.head import HeadWatch
from hetero.system.logs import write_line

__all__ = ["connected", "exit_code_of", "import_ray", "nodes_of", "say", "summary"]

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


def say(text: str) -> None:
    """Print a line of the driver."""
    write_line(f"hetero: {text}")


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError("--platform ray needs Ray; pip install 'hetero[ray]'") from error
    return ray


@contextmanager
def connected(ray: Any) -> Iterator[HeadWatch]:
    """Connect to the Ray cluster, and disconnect at the end if this process was not connected before.

    Yields:
        The watch of the head of the cluster. With Ray Client, which notices the loss itself, it watches nothing.

    Raises:
        ClusterError: If there is no Ray cluster, or it has failed.
    """
    if ray.is_initialized():
        with HeadWatch(_head_address(ray), log_line=say) as head:
            yield head
        return
    in_ray_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # its runtime environment has the working directory
    environment = None if in_ray_job else {"working_dir": str(Path.cwd())}
    address = os.environ.get("RAY_ADDRESS", "auto")
    say(f"connecting to the Ray cluster {address}")
    try:
        ray.init(address=address, runtime_env=environment, logging_level=logging.WARNING)
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
        raise ClusterError(
            f"found no Ray cluster: {error}\n"
            "  to do: start one (ray start --head), set RAY_ADDRESS, or submit this command as a Ray job"
        ) from error
    with HeadWatch(_head_address(ray), log_line=say) as head:
        try:
            yield head
        except ray.exceptions.RayError as error:  # of a call that is not for one host
            raise ClusterError(f"the Ray cluster has failed: {summary(error)}") from error
        finally:
            ray.shutdown()


def exit_code_of(error: Exception) -> ExitCode:
    """Return the exit code of a host whose actor did not answer. No other function translates Ray's errors to codes."""
    cause = getattr(error, "cause", None)  # what the actor's own code has raised
    if isinstance(cause, HeteroError):
        return cause.exit_code
    found = (_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CODES)
    return next(found, ExitCode.ORPHANED)


def summary(error: Exception) -> str:
    """Return the first line of an error."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def nodes_of(ray: Any) -> str:
    """Return the number of nodes of a cluster and what they have, for messages."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shown = [
        " ".join(f"{name}:{resources[name]:g}" for name in ("CPU", "GPU") if name in resources) for resources in nodes
    ]
    return f"{len(nodes)} nodes ({', '.join(shown)})"


def _head_address(ray: Any) -> str:
    return str(getattr(ray.get_runtime_context(), "gcs_address", ""))

"""Endpoints that this process starts for itself in a job without data hosts. They run the same code as data hosts."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from pathlib import Path

from hetero.config.timings import Timings
from hetero.control.members.directory import Directory
from hetero.control.security import Token, token_memfd
from hetero.endpoint.options import EndpointOptions
from hetero.errors import ConfigError, EndpointUnavailableError
from hetero.pool.pool import EndpointPool, PoolOptions
from hetero.reader.fleet import Fleet
from hetero.system.waits import LOG_INTERVAL_S

__all__ = ["LocalEndpoints", "local_endpoints", "script_path"]

_HOST = "local"
_ADDRESS = "127.0.0.1"
_START_TIMEOUT_S = Timings().start_timeout_s
"""Seconds until all endpoints must be ready. Each endpoint imports the script and its libraries, such as TensorFlow."""

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_started: dict[tuple[int, int], LocalEndpoints] = {}


class LocalEndpoints:
    """Endpoints that end with this process. The constructor blocks until they are ready.

    Only this process knows their token. The endpoints are new processes that import the script, and not forks of this
    process, because TensorFlow's threads do not survive a fork.

    Args:
        num_endpoints: Number of processes, at least 1.

    Raises:
        ConfigError: If this process does not run a script, or if the script does not register a data set.
        ChildFailedError: If the script cannot be imported.
        EndpointUnavailableError: If the endpoints are not ready within 15 minutes, as in a job with data hosts.
    """

    def __init__(self, num_endpoints: int) -> None:
        # Find the script before the descriptor of the token is opened, because the descriptor would stay open if
        # `script_path` raised.
        script = script_path()
        token = Token.generate()
        self._descriptor, token_path = token_memfd(token)
        directory = Directory()
        job_id = f"local-{os.getpid()}"
        module = _module_name(script)
        options = PoolOptions(
            endpoint=EndpointOptions(
                script=module or script,
                is_module=module is not None,
                script_args=tuple(sys.argv[1:]),
                host=_HOST,
                address=_ADDRESS,
                num_endpoints=num_endpoints,
                job_id=job_id,
                log_level="WARNING",
            ),
            token_path=token_path,
            # These endpoints must be killed with the process group of their rank.
            in_own_session=False,
        )
        # Start the processes, and wait until all of them have imported the script.
        self._pool = EndpointPool(options, directory.replace, _show)
        self._fleet: Fleet | None = None
        self._is_closed = False
        self._pool.start()
        atexit.register(self.close)
        try:
            # Wait in two parts, to log a line if the import of the script takes minutes.
            is_ready = self._pool.wait_ready(LOG_INTERVAL_S)
            if not is_ready:
                logger.warning("waiting for %d processes that import %s", num_endpoints, script)
                is_ready = self._pool.wait_ready(_START_TIMEOUT_S - LOG_INTERVAL_S)
            if not is_ready:
                raise EndpointUnavailableError(
                    f"{len(self._pool.records)} of {num_endpoints} processes that fetch batches were ready within "
                    f"{_START_TIMEOUT_S:.0f} s\n  Each of them imports {script}. Put slow code behind "
                    'if __name__ == "__main__":, or pass a smaller num_workers.'
                )
            self._fleet = Fleet(directory, token, job_id=job_id)
        except BaseException:
            self.close()
            raise

    @property
    def fleet(self) -> Fleet:
        """Fleet that readers fetch from."""
        assert self._fleet is not None
        return self._fleet

    def check(self) -> None:
        """Raise the failure that prevents further batches, if there is one. Call this while waiting for a batch.

        Raises:
            HeteroError: If endpoints ended too often to be started again.
        """
        # With a failure, the pool has given up some endpoints. While another one still serves, it makes their batches.
        failure = self._pool.failure
        if failure is not None and not self._pool.records:
            raise failure

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._fleet is not None:
            self._fleet.close()
        self._pool.stop(grace_s=0.0)
        os.close(self._descriptor)


def local_endpoints(num_endpoints: int) -> LocalEndpoints:
    """Return this process's endpoints, started on first use. Data sets with the same number of endpoints share them."""
    # A forked process needs its own endpoints, because it is not the parent of the processes that are `_started`.
    key = (os.getpid(), num_endpoints)
    with _lock:
        if key not in _started:
            _started[key] = LocalEndpoints(num_endpoints)
        return _started[key]


def script_path() -> str:
    """Return the script that this process runs, which registers the data sets.

    Raises:
        ConfigError: If this process does not run a script, for example in an interactive session.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        raise ConfigError(
            "the processes that fetch batches import the script, and this process does not run a script\n"
            "  Put the data set and the training into a file, and run that."
        )
    return str(Path(path).resolve())


def _module_name(script: str) -> str | None:
    """Return the script's module name if this process runs it with ``python -m``, else None."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.origin is None or str(Path(spec.origin).resolve()) != script:
        return None
    return str(spec.name).removesuffix(".__main__")


def _show(name: str, line: str) -> None:
    """Write a line of an endpoint's output to standard error, with the endpoint's name."""
    sys.stderr.write(f"[{name}] {line}\n")

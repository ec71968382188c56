"""Connects a worker of Ray Train to the data service of its job."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.batches.structure.conversion import set_script_module
from hetero.control.rank import session as sessions
from hetero.control.rank.session import RankSession
from hetero.control.rank.variables import LAUNCHER_VARIABLE
from hetero.control.security import TOKEN_FILE_VARIABLE, Token, token_memfd
from hetero.datasets import get_factory, registered
from hetero.endpoint.script import load_script
from hetero.errors import ConfigError, DataPlaneError, HeteroError
from hetero.loaders.remote import fleet_for
from hetero.ray.connection import ServiceGoneError
from hetero.ray.coordinator import MAX_RANKS
from hetero.ray.head import CHECK_S
from hetero.system import logs

if TYPE_CHECKING:
    from hetero.ray.actors import Admission, ServiceOrder

__all__ = ["connect"]

logger = logging.getLogger(__name__)

_lock = threading.Lock()
"""Lock of `_connected`. Several threads of a worker may connect at the same time."""
_connected: tuple[str, RankSession] | None = None
"""The id of the job that this process is connected to, and the session. None before the first connection."""


def connect(order: ServiceOrder, call: Callable[[str], Any]) -> None:
    """Connect this worker to a data service. See `hetero.ray.DataService.connect`.

    Args:
        order: What the driver has asked for.
        call: Calls the service's coordinator. Receives the name of a method.
    """
    global _connected
    rank, world_size = _rank_and_world_size()
    with _lock:
        admission: Admission = call("admission")
        if failure := call("failure"):
            raise DataPlaneError(f"the data service has failed: {failure}")
        # This process is connected to the same service already.
        if _connected is not None and _connected[0] == admission["job_id"] and sessions.current() is _connected[1]:
            return
        # Either an earlier call of this function or `hetero launch` has opened the session of this process. Without an
        # earlier call, it was `hetero launch`.
        has_session_of_launch = sessions.current() is not None and _connected is None
        if os.environ.get(LAUNCHER_VARIABLE) or has_session_of_launch:
            raise ConfigError("hetero launch has started this process; expected a worker that Ray Train has started")
        _register_datasets(order)
        # Show hetero's messages, as in the ranks of `hetero launch`.
        logs.setup_logging_of_script()
        # Ray may use a worker for several runs, which may have different services.
        if _connected is not None:
            _connected[1].close()
        session = _open_session(admission, rank, world_size)
        _connected = admission["job_id"], session
        watcher = threading.Thread(target=_watch, args=(call, session), name="hetero-ray-watch", daemon=True)
        watcher.start()


def _rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this worker and the number of workers.

    Raises:
        ConfigError: If Ray Train has not started this process, or there are too many workers.
    """
    import ray.train

    try:
        context = ray.train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
    except RuntimeError as error:
        raise ConfigError(
            "this process has no rank, because Ray Train has not started it\n"
            "  to do: call DataService.connect in train_loop_per_worker, not in the driver"
        ) from error
    if world_size > MAX_RANKS:
        raise ConfigError(f"the training has {world_size} workers; a DataService serves at most {MAX_RANKS}")
    return rank, world_size


def _open_session(admission: Admission, rank: int, world_size: int) -> RankSession:
    """Connect to the hub as a rank, and return the session."""
    # A session reads the token from a file. This file is in anonymous memory, so the token is never on a disk.
    descriptor, token_path = token_memfd(Token(admission["token"]))
    try:
        session = sessions.connect(
            {
                LAUNCHER_VARIABLE: admission["rank_launcher"],
                TOKEN_FILE_VARIABLE: token_path,
                "HETERO_JOB_ID": admission["job_id"],
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
            }
        )
    finally:
        os.close(descriptor)
    assert session is not None
    return session


def _watch(call: Callable[[str], Any], session: RankSession) -> None:
    """Make loaders raise if the service fails or ends. Without this thread, loaders would wait for the data timeout."""
    while True:
        # The service does not tell this process that it has failed, so ask it at intervals.
        time.sleep(CHECK_S)
        # The session has ended, or this worker has connected to another service.
        if sessions.current() is not session:
            return
        try:
            failure = call("failure")
            if not failure:
                continue
            error = DataPlaneError(f"the data service has failed: {failure}")
        except ServiceGoneError as gone:
            error = gone
        # A busy node, or a network that is cut for a while, must not fail the training.
        except HeteroError as slow:
            logger.warning("%s", slow)
            continue
        except Exception as unexpected:  # noqa: BLE001 - Ray raises various errors while this process ends
            logger.debug("no longer following the data service: %r", unexpected)
            return
        # The fleet has the connections of this process to all endpoints. When it fails, all loaders raise the error.
        fleet = fleet_for(session)
        with fleet.lock:
            fleet.fail(error)
        return


def _register_datasets(order: ServiceOrder) -> None:
    """Import the script, unless a module of this process is the script and has registered data sets.

    Endpoints run the script under another name. Therefore a batch names a class of the script without its module.
    `set_script_module` says which module of this process has these classes. `load_script` calls it too.

    ``sys.argv`` of the worker stays as it is. ``sys.path`` only gets the folder of the script, for later imports.
    """
    from hetero.ray.actors import script_folder

    folder = script_folder(order)
    if order.is_module:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            module = importlib.import_module(order.script)  # allowed: the user's own module
        except ImportError as error:
            name = repr(order.script)
            raise ConfigError(f"the module {name} cannot be imported in a worker of Ray Train: {error}") from error
        set_script_module(module.__name__)
        return
    path = (Path(folder) / order.script).resolve()
    # The place of a data set is FILE:LINE. If the script has registered one, this process has run the script already.
    if any(get_factory(name).place.rpartition(":")[0] == str(path) for name in registered()):
        # Without a call of `set_script_module`, the classes are looked for in ``__main__``. Copy the items, because
        # another thread may import a module meanwhile.
        for name, module in list(sys.modules.items()):
            if name != "__main__" and Path(getattr(module, "__file__", None) or "/").resolve() == path:
                set_script_module(name)
        return
    arguments, search_path = list(sys.argv), list(sys.path)
    # `load_script` overwrites the first entry of the search path with the script's folder. Ray's first entry must stay,
    # so put an empty entry before it, which `load_script` then overwrites.
    sys.path.insert(0, "")
    try:
        load_script(str(path), order.script_args, host="a worker of Ray Train")
    except BaseException:
        sys.path[:] = search_path
        raise
    finally:
        sys.argv[:] = arguments

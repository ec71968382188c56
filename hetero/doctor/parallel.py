"""Runs tasks in parallel, and does not wait for those that take too long, such as a query to a name server.

The examination runs its subjects in this way, and two subjects run a task for each host.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

__all__ = ["gather"]

_Key = TypeVar("_Key", bound=Hashable)
_T = TypeVar("_T")


def gather(tasks: Mapping[_Key, Callable[[], _T]], *, timeout_s: float) -> dict[_Key, _T | Exception]:
    """Call each function on another thread. Return the value or exception of each function that ended in time.

    The others continue until they end, on threads that do not keep the process alive.

    Args:
        tasks: The functions, by any key.
        timeout_s: Time limit for all of them together, seconds.
    """
    ended: queue.SimpleQueue[tuple[_Key, _T | Exception]] = queue.SimpleQueue()
    deadline_s = time.monotonic() + timeout_s

    def work(key: _Key, task: Callable[[], _T]) -> None:
        try:
            ended.put((key, task()))
        except Exception as error:  # noqa: BLE001 - the caller decides about it
            ended.put((key, error))

    for item in tasks.items():
        # A thread that asks a hung disk never ends. A daemon thread does not keep the process alive.
        threading.Thread(target=work, args=item, name="doctor", daemon=True).start()
    found: dict[_Key, _T | Exception] = {}
    while len(found) < len(tasks):
        try:
            key, outcome = ended.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            break
        found[key] = outcome
    return found

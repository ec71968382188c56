"""Data sets that are built once for all endpoints of a host, before the endpoints are forked.

An endpoint uses this module to announce data sets and to build them. `hetero.pool.builder` is the process that builds
them once.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.batches.build import BuiltDataset
from hetero.batches.purity.globals import GlobalsReader
from hetero.datasets import get_factory, prebuild, registered
from hetero.spec import DatasetSpec
from hetero.system.process import limit_threads

__all__ = ["Prebuilt", "announce", "build", "is_shareable"]


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """A data set that is built."""

    built: BuiltDataset
    globals: dict[str, str]
    """Digests of the globals that the data set's code reads, taken before that code ran."""


def build(spec: DatasetSpec, *, host: str) -> Prebuilt:
    """Build a data set in this process.

    Args:
        spec: The data set.
        host: Name of this host or endpoint, for errors of the user's code.

    Raises:
        DatasetError: If the factory raises.
    """
    # Compute the digests before the factory runs, because it may fill caches and counters among these globals.
    digests = GlobalsReader(get_factory(spec.name)).digests()
    built = prebuild(spec, host=host)
    # Limit the threads again, because the factory may have imported torch or OpenCV just now.
    limit_threads()
    return Prebuilt(built, digests)


def is_shareable(spec: DatasetSpec) -> bool:
    """Return whether the user allows that one process builds a data set and forks endpoints that have it."""
    return spec.name in registered() and get_factory(spec.name).fork_built


def announce(channel: socket.socket, specs: Sequence[DatasetSpec]) -> None:
    """Tell the fork server which data sets this endpoint will build. Return if the endpoint must build them itself.

    Block while the fork server makes one process build them for all endpoints. If this succeeds, the function does not
    return, because the fork server ends this process. Later calls return at once.

    Args:
        channel: Socket to the fork server, which all its endpoints share.
        specs: The data sets. Empty if the user allows none to be shared.
    """
    # If the fork server has closed the other end, or this end was closed by an earlier call, this endpoint builds its
    # own.
    with channel, contextlib.suppress(OSError):
        # The arguments of the first data set have at most 64 KiB, and the arguments of up to eight further ones at most
        # 4 KiB each. So the packet is shorter than the 208 KiB that the kernel allows.
        channel.send(json.dumps({"datasets": [[spec.name, spec.arguments_json] for spec in specs]}).encode())
        # The fork server never sends anything. `recv` returns when the fork server has closed its end.
        channel.recv(1)

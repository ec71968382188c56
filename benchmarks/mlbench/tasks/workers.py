"""Joins the process group of the workers, behind limited interfaces if the task asks for them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

import hetero
from tasks import network

__all__ = ["Skipped", "backend_of", "joined"]

_NAMES_KEY = "mlbench/namespaces"
_DONE_KEY = "mlbench/done-"
_RELEASE_S = 0.2
"""gloo's threads need at most these seconds to release the tensors of the last collectives."""


class Skipped(Exception):
    """The network is to be limited, and this machine cannot do it. The message says why."""


@contextlib.contextmanager
def joined(*, network_mbit: float = 0.0) -> Iterator[torch.device]:
    """Join the other workers and leave them at the end. Without a launcher, this process is the only worker.

    Args:
        network_mbit: Bandwidth of each worker's interface in 10^6 bits per second. 0 does not limit it.

    Yields:
        This worker's GPU, or the CPU if there are fewer GPUs than workers on this host.

    Raises:
        RuntimeError: If the network is to be limited, and there is one worker, or the workers use GPUs or several
            machines.
        Skipped: If the network is to be limited, and this machine cannot do it. All workers raise it.
    """
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    with contextlib.ExitStack() as stack:
        if network_mbit:
            stack.enter_context(_limited(device, network_mbit))
        elif "RANK" in os.environ:
            dist.init_process_group(backend_of(device))
        else:
            dist.init_process_group(backend_of(device), init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        yield device
        # DDP keeps gloo's threads beyond the end of the group (torch 2.13). A thread that releases the tensors of the
        # last collective needs the GIL. If Python ends meanwhile, the thread aborts the process ("terminate called
        # without an active exception"). torch has no event for it.
        time.sleep(_RELEASE_S)


def backend_of(device: torch.device) -> str:
    """Return the backends of a process group. On GPUs there are two, because times and losses are CPU tensors."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextlib.contextmanager
def _limited(device: torch.device, network_mbit: float) -> Iterator[None]:
    """Join with connections through limited interfaces, and remove these after the group has been left.

    At the end, each worker logs the bytes that its interface has sent as the metric ``network_bytes``.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2 or device.type != "cpu":
        raise RuntimeError(
            f"--network-mbit with {world_size} workers on {device.type}; expected at least two, on CPUs of one machine"
        )
    # The store is the launcher's, at an address outside of the namespaces. Its connection is made before they are
    # entered, and stays.
    store, _, _ = next(iter(rendezvous("env://")))
    with contextlib.ExitStack() as stack:
        if rank == 0:
            reason = network.why_not()
            names = [] if reason else stack.enter_context(network.LimitedNetwork(world_size, network_mbit)).names
            store.set(_NAMES_KEY, f"!{reason}" if reason else " ".join(names))
        found = store.get(_NAMES_KEY).decode()
        if found.startswith("!"):
            raise Skipped(found[1:])
        names = found.split()
        with network.inside(names[rank]):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        yield
        hetero.log_metric("network_bytes", network.sent_bytes(names[rank]))
        store.set(f"{_DONE_KEY}{rank}", "done")
        if rank == 0:  # it removes the interfaces next
            store.wait([f"{_DONE_KEY}{other}" for other in range(world_size)])

"""A Ray cluster of two nodes on this machine: one for the trainer, and one that preprocesses."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from ray.cluster_utils import Cluster

from ray_jobs import CPUS

__all__ = ["DATA_LABELS", "TRAINER_RESOURCE", "serve"]

DATA_LABELS = {"role": "data"}
"""Labels of the node that preprocesses."""
TRAINER_RESOURCE = "trainer"
"""Resource that only the trainer's node has."""

_OBJECT_STORE_BYTES = 2 << 30
"""Of each node."""


@contextlib.contextmanager
def serve(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the cluster, and end it on leaving. Yield its address and process ids. A server of the harness.

    The trainer's node has one CPU, for the worker. The other node has a CPU for each preprocessing process, and one
    more for Ray Data's own read tasks. hetero does not use it.
    """
    folder = tempfile.mkdtemp(prefix="ray-")  # short: it becomes part of the paths of sockets
    shared = {"object_store_memory": _OBJECT_STORE_BYTES}
    head = {"num_cpus": 1, "resources": {TRAINER_RESOURCE: 1}, "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **shared})
    try:
        data_node = cluster.add_node(num_cpus=CPUS + 1, labels=DATA_LABELS, **shared)
        yield {
            "address": cluster.address,
            "pid": os.getpid(),
            "trainer_raylet": _raylet(cluster.head_node),
            "data_raylet": _raylet(data_node),
        }
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _raylet(node: Any) -> int:
    """Return the process id of a node's raylet, which starts all processes of the node."""
    return int(node.all_processes["raylet"][0].process.pid)

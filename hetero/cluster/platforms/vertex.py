"""Vertex AI custom training, whose worker pools are the groups. `hetero render vertex` makes the job.

``CLUSTER_SPEC`` has the hosts of all pools, this host's pool and index, and the job as JSON inside of a string. Pool 0
has one replica, and its end is the end of the job, so trainers are pools 0 and 1. Which ports are open between replicas
is not documented.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.cluster.document import decode
from hetero.cluster.groups import group_document
from hetero.cluster.platforms.platform import ClusterDescription, Folders, Platform, environment_error
from hetero.errors import ClusterError

__all__ = ["Vertex"]

_SPEC = "CLUSTER_SPEC"
_JOB_ID = "CLOUD_ML_JOB_ID"
_POOL = re.compile(r"workerpool([0-9])")


class Vertex(Platform):
    """A replica of a Vertex AI custom job."""

    name = "vertex"
    variables = ("CLUSTER_SPEC", "CLOUD_ML_", "AIP_", "TF_CONFIG")
    stripped = ("TF_CONFIG", "CLUSTER_SPEC")
    kill_after_s = 30.0

    def is_here(self) -> bool:
        """Return whether this process runs in a Vertex AI custom job."""
        return _SPEC in self.environ and _JOB_ID in self.environ

    def describe(self) -> ClusterDescription:
        """Return the worker pools and their hosts."""
        spec = decode(self.environ[_SPEC], _SPEC)
        cluster, task = _mapping(spec.get("cluster")), _mapping(spec.get("task"))
        pools = {name: _hosts(hosts) for name, hosts in sorted(cluster.items()) if _POOL.fullmatch(name)}
        if not pools or not all(pools.values()):
            raise self._error(
                f"cluster is {spec.get('cluster')!r:.100}", "workerpool0 and others, each with its hosts as HOST:PORT"
            )
        own, index = str(task.get("type", "")), task.get("index")
        if isinstance(index, str) and index.isascii() and index.isdigit():
            index = int(index)
        if own not in pools or not isinstance(index, int) or not 0 <= index < len(pools[own]):
            raise self._error(f"task is {dict(task)!r:.100}", f"the pool and the index of a host of {', '.join(pools)}")
        types = self._types(spec)
        groups = [group_document(name, types.get(name, ""), hosts) for name, hosts in pools.items()]
        # Pool 0 decides how the job ends, so it trains. A pool without accelerators serves one that has them.
        document = {"instance_groups": groups, "current_host": pools[own][index]}
        return ClusterDescription(document=document, source=_SPEC, roles=("workerpool0=trainer",))

    @property
    def folders(self) -> Folders:
        """Folders below ``HETERO_WORKSPACE`` or ``/workspace``, and those in Cloud Storage that are mounted."""
        root = Path(self.environ.get("HETERO_WORKSPACE") or "/workspace")
        return Folders(
            root=root,
            output=root / "output",
            failure=root / "failure",
            model=_mounted(self.environ.get("AIP_MODEL_DIR", "")) or root / "model",
            checkpoints=_mounted(self.environ.get("AIP_CHECKPOINT_DIR", "")) or root / "checkpoints",
            code=root / "code",
        )

    def job_name(self) -> str:
        """Return the job's id."""
        number = self.environ.get(_JOB_ID, "")
        return f"vertex-{number}" if number else ""

    def _types(self, spec: Mapping[str, Any]) -> dict[str, str]:
        """Return the machine type of each pool, and its accelerators if the type's name does not show them."""
        job = spec.get("job")
        try:
            content = _mapping(json.loads(job) if isinstance(job, str) else job)
        except (ValueError, RecursionError):
            content = {}
        stated = content.get("worker_pool_specs") or content.get("workerPoolSpecs") or []
        found = {}
        for number, pool in enumerate(stated if isinstance(stated, list) else []):
            own = _mapping(pool)
            machine = _mapping(own.get("machine_spec") or own.get("machineSpec"))
            name = str(machine.get("machine_type") or machine.get("machineType") or "")
            count = machine.get("accelerator_count") or machine.get("acceleratorCount") or 0
            accelerators = int(count) if str(count).isdigit() else 0
            found[f"workerpool{number}"] = f"{name}+GPU:{accelerators}" if accelerators else name
        return found

    def _error(self, found: str, expected: str) -> ClusterError:
        return environment_error(_SPEC, found, expected)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _hosts(value: object) -> list[str]:
    """Return hosts without their ports, whose use is not documented."""
    return [str(each).rpartition(":")[0] or str(each) for each in value] if isinstance(value, list) else []


def _mounted(uri: str) -> Path | None:
    """Return the folder of a ``gs://`` address below ``/gcs``, where Vertex AI mounts Cloud Storage."""
    return Path("/gcs", uri.removeprefix("gs://")) if uri.startswith("gs://") else None

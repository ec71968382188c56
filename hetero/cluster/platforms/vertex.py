"""Vertex AI custom training, whose worker pools are the groups. `hetero render vertex` makes the job.

``CLUSTER_SPEC`` has the hosts of all pools, this host's pool and index, and the job as JSON inside of a string. Pool 0
has one replica, and its end is the end of the job. So the first host that trains is pool 0, and the other hosts that
train are pool 1. Data hosts are pool 2. A second group of data hosts is pool 3. Vertex AI does not document which ports
are open between replicas.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hetero.cluster.document import decode
from hetero.cluster.groups import StatedGroup, group_document
from hetero.cluster.platforms.platform import ClusterDescription, Folders, Platform
from hetero.cluster.platforms.pods import pod_folders
from hetero.cluster.rendering.kubernetes import text
from hetero.cluster.rendering.request import PORT, RenderRequest, machine_of
from hetero.cluster.rendering.spot import notes
from hetero.cluster.spec import Role
from hetero.documents.diagnosis import Diagnosis, warning
from hetero.errors import ConfigError

__all__ = ["Vertex"]

_SPEC = "CLUSTER_SPEC"
_JOB_ID = "CLOUD_ML_JOB_ID"
_POOL = re.compile(r"workerpool([0-9])")
_MACHINE = re.compile(r"(?P<machine>[a-z0-9-]{3,60})(?:\+(?P<kind>[A-Z0-9_]{3,60}):(?P<count>[1-9][0-9]?))?")
_MAX_DATA_POOLS = 2
"""Pools 2 and 3. Source: cloud.google.com/vertex-ai/docs/training/distributed-training"""
_ACCELERATORS: dict[tuple[str, float | None], str] = {
    ("NVIDIA L4", None): "NVIDIA_L4",
    ("NVIDIA A100", 40): "NVIDIA_TESLA_A100",
    ("NVIDIA A100", 80): "NVIDIA_A100_80GB",
    ("NVIDIA H100", 80): "NVIDIA_H100_80GB",
}
"""Vertex AI's names (AcceleratorType of its API) by name and memory in GB. Vertex AI's configurations state the
accelerators of a2, a3 and g2 too, although the machine type determines them."""


class Vertex(Platform):
    """A replica of a Vertex AI custom job."""

    name = "vertex"
    variables = ("CLUSTER_SPEC", "CLOUD_ML_", "AIP_", "TF_CONFIG")
    stripped = ("TF_CONFIG", "CLUSTER_SPEC")
    source = _SPEC
    renders = "a custom job of Vertex AI"
    settings: ClassVar[Mapping[str, str]] = {"token": "address gs://BUCKET/PATH of the file with the job's token"}

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
        own_pool, index = str(task.get("type", "")), task.get("index")
        if isinstance(index, str) and index.isascii() and index.isdigit():
            index = int(index)
        if own_pool not in pools or not isinstance(index, int) or not 0 <= index < len(pools[own_pool]):
            raise self._error(f"task is {dict(task)!r:.100}", f"the pool and the index of a host of {', '.join(pools)}")
        types = self._types(spec)
        groups = [group_document(name, types.get(name, ""), hosts) for name, hosts in pools.items()]
        # The end of pool 0 is the end of the job, so this pool must train. The other pools get their roles from their
        # names and types, as groups of any platform do.
        return self._described(groups, pools[own_pool][index], roles=("workerpool0=trainer",))

    @property
    def folders(self) -> Folders:
        """Folders below ``HETERO_WORKSPACE`` or ``/workspace``, and mounted folders of Cloud Storage."""
        folders = pod_folders(self.environ)
        return dataclasses.replace(
            folders,
            # The failure file of `pod_folders` is for Kubernetes.
            failure=folders.root / "failure",
            model=_mounted(self.environ.get("AIP_MODEL_DIR", "")) or folders.model,
            checkpoints=_mounted(self.environ.get("AIP_CHECKPOINT_DIR", "")) or folders.checkpoints,
        )

    def job_name(self) -> str:
        """Return the job's id."""
        number = self.environ.get(_JOB_ID, "")
        return f"vertex-{number}" if number else ""

    def _types(self, spec: Mapping[str, Any]) -> dict[str, str]:
        """Return the instance type of each pool: its machine type, with +GPU:N if the job states N accelerators."""
        job = spec.get("job")
        try:
            content = _mapping(json.loads(job) if isinstance(job, str) else job)
        except (ValueError, RecursionError):
            # Groups without types are enough to run the job.
            content = {}
        # The job has the names of the API in one of two spellings.
        pools = content.get("worker_pool_specs") or content.get("workerPoolSpecs") or []
        types = {}
        for number, pool in enumerate(map(_mapping, pools if isinstance(pools, list) else [])):
            machine = _mapping(pool.get("machine_spec") or pool.get("machineSpec"))
            name = str(machine.get("machine_type") or machine.get("machineType") or "")
            count = machine.get("accelerator_count") or machine.get("acceleratorCount") or 0
            num_gpus = int(count) if str(count).isdecimal() else 0
            types[f"workerpool{number}"] = f"{name}+GPU:{num_gpus}" if num_gpus else name
        return types

    def examine(self, own_host: str | None, port: int) -> Iterator[Diagnosis]:
        """Yield what is not known of the network of a job."""
        yield warning(
            f"Vertex AI does not document which ports are open between replicas; hetero needs {port}, and ports that "
            "endpoints choose",
            "see whether the ports below are reached; otherwise give the job a VPC network",
        )

    @classmethod
    def render(cls, request: RenderRequest) -> str:
        """Return the configuration for ``gcloud ai custom-jobs create --config``.

        Raises:
            ConfigError: If the image is missing, a type is malformed, or the pools are not enough.
        """
        request.check_image()
        trainers, data = request.members(Role.TRAINER), request.members(Role.DATA)
        if len(trainers) != 1 or len(data) > _MAX_DATA_POOLS:
            raise ConfigError(
                f"there are {len(trainers)} groups that train and {len(data)} of data hosts; Vertex AI has pools for "
                f"one and for at most {_MAX_DATA_POOLS}"
            )
        (trainer,) = trainers
        if request.spot and (missing := [group.name for group in request.groups if not request.is_spot(group)]):
            raise ConfigError(
                f"--spot {request.spot[0]}: Vertex AI has spot capacity only for all pools of a job; --spot is missing "
                f"for {', '.join(missing)}\n  to do: give --spot for every group, or for none"
            )
        token = request.setting("token")
        if not token.startswith("gs://"):
            raise ConfigError(
                "--token gs://BUCKET/PATH: missing, expected a file in Cloud Storage with the job's token, which only "
                "the job's service account can read\n  to do: openssl rand -hex 32 | gcloud storage cp - gs://BUCKET/PATH"
            )
        lines = [
            *_head(request),
            *_scheduling(request),
            "workerPoolSpecs:",
            # Pool 0 has one replica, so the first trainer host has a separate pool.
            *_pool(
                request,
                trainer,
                count=1,
                token=token,
                comment="pool 0: the first host that trains. Its end is the end of the job",
            ),
        ]
        if trainer.count > 1:
            lines += _pool(request, trainer, trainer.count - 1, token, "pool 1: the other hosts that train")
        elif data:
            lines.append("- {}  # pool 1 is empty: one host trains")
        for number, group in enumerate(data, start=2):
            lines += _pool(request, group, group.count, token, f"pool {number}: {group.name}")
        return "\n".join(lines) + "\n"


def _mapping(value: object) -> Mapping[str, Any]:
    """Return a value of an untrusted document if it is an object, or else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _hosts(addresses: object) -> list[str]:
    """Return the hosts of a pool without their ports, whose use is not documented. Empty if the value is no list."""
    return [str(each).rpartition(":")[0] or str(each) for each in addresses] if isinstance(addresses, list) else []


def _mounted(uri: str) -> Path | None:
    """Return the folder of a ``gs://`` address below ``/gcs``, where Vertex AI mounts Cloud Storage."""
    return Path("/gcs", uri.removeprefix("gs://")) if uri.startswith("gs://") else None


def _head(request: RenderRequest) -> list[str]:
    """Return the comment at the top of the configuration."""
    return [
        f"# hetero render vertex: {request.groups_text}",
        "#",
        "# Submit it:",
        f"#   gcloud ai custom-jobs create --region=REGION --display-name={shlex.quote(request.name)} --config=FILE",
        "#",
        f"# Vertex AI does not document which ports are open between replicas. hetero uses port {PORT} on each, and",
        "# ports that endpoints choose. If hosts do not reach each other, give the job a network (network: below).",
    ]


def _scheduling(request: RenderRequest) -> list[str]:
    """Return the time limit and the provisioning strategy, which all pools share."""
    time_limit = [] if request.hours is None else [f"timeout: {round(3600 * request.hours)}s"]
    if not request.spot:
        return [f"scheduling: {{{time_limit[0]}}}"] if time_limit else []
    return [
        "#",
        "# Spot capacity for all pools. A trainer that is taken back ends this attempt of the job: save checkpoints in",
        "# Cloud Storage. A data host that is taken back does not.",
        *notes(request),
        f"scheduling: {{{', '.join([*time_limit, 'strategy: SPOT'])}}}",
    ]


def _pool(request: RenderRequest, group: StatedGroup, count: int, token: str, comment: str) -> list[str]:
    """Return the configuration of a worker pool.

    Args:
        request: The job.
        group: The group whose hosts the pool has.
        count: Number of hosts of the pool.
        token: Address ``gs://BUCKET/PATH`` of the file with the job's token.
        comment: What the pool is for.

    Raises:
        ConfigError: If the type of the group is not a machine type of Google Cloud.
    """
    found = _MACHINE.fullmatch(group.instance_type)
    # Vertex AI needs the name of the accelerator. ``GPU:4`` states only a number.
    if found is None or found["kind"] == "GPU":
        raise ConfigError(
            f"--group {group.text}: expected a machine type such as n2-highcpu-32 or a2-highgpu-1g, or with "
            "accelerators n1-standard-16+NVIDIA_TESLA_V100:4"
        )
    machine = [f"machineType: {text(found['machine'])}"]
    accelerator, count_text = found["kind"], found["count"]
    # Some machine types have accelerators that the name does not state.
    machine_info = machine_of(group)
    if not accelerator and machine_info is not None and machine_info.num_accelerators:
        accelerator = _ACCELERATORS[machine_info.accelerator or "", machine_info.accelerator_memory_gib]
        count_text = str(machine_info.num_accelerators)
    if accelerator:
        machine += [f"acceleratorType: {accelerator}", f"acceleratorCount: {count_text}"]
    mounted_token = "/gcs/" + token.removeprefix("gs://")
    # Copy the token's file, because files in Cloud Storage have no owner, and only the owner may have access to it.
    script = f"install -m 600 {shlex.quote(mounted_token)} /tmp/hetero-token && exec {request.shell_command}"
    environment = {"PYTHONUNBUFFERED": "1", "HETERO_TOKEN_FILE": "/tmp/hetero-token"}
    return [
        f"- machineSpec: {{{', '.join(machine)}}}  # {comment}",
        f"  replicaCount: {count}",
        "  containerSpec:",
        f"    imageUri: {text(request.image)}",
        f"    command: {text(['/bin/sh', '-c', script])}",
        "    env:",
        *(f"    - {{name: {name}, value: {text(value)}}}" for name, value in environment.items()),
    ]

"""Renders a job as a custom job of Vertex AI. Pure.

The worker pools have a fixed meaning. Pool 0 has one replica, and its end is the end of the job. So the first host that
trains is pool 0, the others are pool 1, and data hosts are pools 2 and 3.
"""

from __future__ import annotations

import re
import shlex

from hetero.cluster.groups import StatedGroup
from hetero.cluster.spec import Role
from hetero.errors import ConfigError
from hetero.render.kubernetes import indented, text
from hetero.render.request import RenderRequest, machine_of
from hetero.render.spot import notes

__all__ = ["render_vertex"]

_MACHINE = re.compile(r"(?P<machine>[a-z0-9-]{3,60})(?:\+(?P<kind>[A-Z0-9_]{3,60}):(?P<count>[1-9][0-9]?))?")
_MAX_DATA_POOLS = 2
_ACCELERATORS: dict[tuple[str, float | None], str] = {
    ("NVIDIA L4", None): "NVIDIA_L4",
    ("NVIDIA A100", 40): "NVIDIA_TESLA_A100",
    ("NVIDIA A100", 80): "NVIDIA_A100_80GB",
    ("NVIDIA H100", 80): "NVIDIA_H100_80GB",
}
"""Vertex AI's names (AcceleratorType of its API) by name and memory in GB. Its configurations state the accelerators of
a2, a3 and g2 too, although the machine type determines them."""


def render_vertex(request: RenderRequest) -> str:
    """Return the configuration for ``gcloud ai custom-jobs create --config``.

    Raises:
        ConfigError: If there is no image, a type is malformed, or the pools are not enough.
    """
    request.check_image()
    trainers, data = request.members(Role.TRAINER), request.members(Role.DATA)
    if len(trainers) != 1 or len(data) > _MAX_DATA_POOLS:
        raise ConfigError(
            f"there are {len(trainers)} groups that train and {len(data)} of data hosts; Vertex AI has pools for one "
            f"and for at most {_MAX_DATA_POOLS}"
        )
    (trainer,) = trainers
    if request.spot and (missing := [group.name for group in request.groups if not request.is_spot(group)]):
        raise ConfigError(
            f"--spot {request.spot[0]}: Vertex AI has spot capacity only for all pools of a job; --spot is missing for "
            f"{', '.join(missing)}\n  to do: give --spot for every group, or for none"
        )
    token = request.settings.get("token", {}).get("", "")
    if not token.startswith("gs://"):
        raise ConfigError(
            "--token gs://BUCKET/PATH: missing, expected a file in Cloud Storage with the job's token, which only the "
            "job's service account can read\n  to do: openssl rand -hex 32 | gcloud storage cp - gs://BUCKET/PATH"
        )
    lines = [
        f"# hetero render vertex: {request.groups_text}",
        "#",
        "# Submit it:",
        f"#   gcloud ai custom-jobs create --region=REGION --display-name={shlex.quote(request.name)} --config=FILE",
        "#",
        "# Vertex AI does not document which ports are open between replicas. hetero uses port 17170 on each of them,",
        "# and ports that endpoints choose. If hosts do not reach each other, give the job a network (network: below).",
        *_scheduling(request),
        "workerPoolSpecs:",
        *_pool(request, trainer, 1, token, "pool 0: the first host that trains. Its end is the end of the job"),
    ]
    if trainer.count > 1:
        lines += _pool(request, trainer, trainer.count - 1, token, "pool 1: the other hosts that train")
    elif data:
        lines.append("- {}  # pool 1 is empty: one host trains")
    for number, group in enumerate(data, start=2):
        lines += _pool(request, group, group.count, token, f"pool {number}: {group.name}")
    return "\n".join(lines) + "\n"


def _scheduling(request: RenderRequest) -> list[str]:
    """Return the time limit and the provisioning strategy, which are those of all pools."""
    values = [] if request.hours is None else [f"timeout: {round(3600 * request.hours)}s"]
    if not request.spot:
        return [f"scheduling: {{{', '.join(values)}}}"] if values else []
    return [
        "#",
        "# Spot capacity for all pools. A trainer that is taken back ends this attempt of the job: save checkpoints in",
        "# Cloud Storage. A data host that is taken back does not.",
        *notes(request),
        f"scheduling: {{{', '.join([*values, 'strategy: SPOT'])}}}",
    ]


def _pool(request: RenderRequest, group: StatedGroup, count: int, token: str, comment: str) -> list[str]:
    found = _MACHINE.fullmatch(group.instance_type)
    if found is None or found["kind"] == "GPU":
        raise ConfigError(
            f"--group {group.text}: expected a machine type such as n2-highcpu-32 or a2-highgpu-1g, or with "
            "accelerators n1-standard-16+NVIDIA_TESLA_V100:4"
        )
    machine = [f"machineType: {text(found['machine'])}"]
    known = machine_of(group)
    kind, number = found["kind"], found["count"]
    if not kind and known is not None and known.num_accelerators:
        kind, number = _ACCELERATORS[known.accelerator or "", known.accelerator_memory_gib], known.num_accelerators
    if kind:
        machine += [f"acceleratorType: {kind}", f"acceleratorCount: {number}"]
    mounted = "/gcs/" + token.removeprefix("gs://")
    # Cloud Storage has no owners, and a token's file must be its owner's alone.
    script = f"install -m 600 {shlex.quote(mounted)} /tmp/hetero-token && exec {request.shell_command}"
    return [
        f"- machineSpec: {{{', '.join(machine)}}}  # {comment}",
        f"  replicaCount: {count}",
        "  containerSpec:",
        f"    imageUri: {text(request.image)}",
        f"    command: {text(['/bin/sh', '-c', script])}",
        "    env:",
        *indented(
            [
                f"- {{name: {name}, value: {text(value)}}}"
                for name, value in {"PYTHONUNBUFFERED": "1", "HETERO_TOKEN_FILE": "/tmp/hetero-token"}.items()
            ],
            4,
        ),
    ]

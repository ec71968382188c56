"""Hosts to examine: clusters on addresses of the loopback device, and the command in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.config import LaunchOptions
from hetero.doctor import Diagnosis, Level, Snapshot, take_snapshot

DOCTOR = [sys.executable, "-m", "hetero.cli", "doctor", "--json"]
TIMEOUT_S = 300.0


def write_cluster(folder: Path, addresses: Mapping[str, str], *, kind: str = "ml.p3.2xlarge") -> dict[str, str]:
    """Write a cluster of one group and a hosts file. Return the environment that names the hosts file.

    Args:
        folder: Receives ``cluster.json`` and ``hosts``.
        addresses: By host. An empty one leaves the name out of the hosts file.
        kind: Instance type of the hosts.
    """
    group = {"instance_group_name": "dnn", "instance_type": kind, "hosts": list(addresses)}
    (folder / "cluster.json").write_text(json.dumps({"instance_groups": [group]}))
    lines = [f"{address} {host}\n" for host, address in addresses.items() if address]
    (folder / "hosts").write_text("".join(lines))
    return {"HETERO_HOSTS_FILE": str(folder / "hosts")}


def here(folder: Path, environ: Mapping[str, str] | None = None, **options: Any) -> Snapshot:
    """Return this machine as seen with some options. Its ``/opt/ml`` is a folder of the test."""
    environ = {"SAGEMAKER_BASE_DIR": str(folder / "ml"), **(environ or {})}
    return take_snapshot(LaunchOptions(script="-", **options), environ)


def in_cluster(folder: Path, addresses: Mapping[str, str], **options: Any) -> Snapshot:
    """Return this machine as the first host of a cluster."""
    environ = write_cluster(folder, addresses)
    return here(folder, environ, cluster_file=str(folder / "cluster.json"), host=next(iter(addresses)), **options)


def levels(diagnoses: Sequence[Diagnosis]) -> list[Level]:
    return [diagnosis.level for diagnosis in diagnoses]


def run_doctor(
    *flags: str, before: Sequence[str] = (), after: Sequence[str] = (), **environment: str
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Run the command. Return its exit status and its findings by subject.

    Args:
        flags: Of the command.
        before: A program that is given the command as its last arguments.
        after: What comes after the command.
        environment: Variables beside this process's own.
    """
    command = [*before, *DOCTOR, *flags, *after]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stdout, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for diagnosis in json.loads(done.stdout)["findings"]:
        found.setdefault(diagnosis["subject"], []).append(diagnosis)
    return done.returncode, found


def worst(diagnoses: Sequence[Mapping[str, Any]]) -> str:
    """Return the gravest level of the findings."""
    return max((diagnosis["level"] for diagnosis in diagnoses), key=["ok", "warning", "error"].index)

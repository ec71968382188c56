"""Result files: every run with its full configuration, commit, versions and hardware."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from harness.comparison import Protocol, is_fresh
from harness.processes import HERE
from harness.trials import Row

RESULTS = HERE / "results"
"""Of full runs; committed."""
SHORT_RESULTS = RESULTS / "short"
"""Folder of all other results. They are not committed."""
_PACKAGES = (
    *("hetero", "grpcio", "numpy", "protobuf", "torch", "tensorflow", "ray", "rpcdataloader"),
    *("opencv-python-headless", "lz4", "zstandard"),
)


def environment() -> dict[str, Any]:
    """Return what every result depends on."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"], check=False, capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "commit": commit,
        "hardware": {
            "cpu": _cpu_model(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "machine": platform.machine(),
            "kernel": platform.release().split("-")[0],
        },
        "load_average": os.getloadavg()[0],
        "versions": versions,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def row_content(row: Row, protocol: Protocol) -> dict[str, Any]:
    """Return what the file says of one row."""
    return {
        "competitor": row.trial.competitor,
        "name": row.trial.name,
        "group": row.trial.group,
        "basis": row.trial.basis,
        "config": dict(row.trial.config),
        "environment": dict(row.trial.environment),
        "protocol": {**dataclasses.asdict(protocol), "fresh": is_fresh(row.trial, protocol)},
        "error": row.error,
        "medians": {key: row.median(key) for key in row.metrics()},
        "spreads": {key: row.spread(key) for key in row.metrics() if row.median(key)},
        "runs": [dataclasses.asdict(run) for run in row.runs],
    }


def write(
    path: Path, rows: Sequence[Row], text: str, protocol: Protocol, facts: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Keep a result: ``PATH.json`` with a row per trial, ``PATH.md`` for readers.

    Args:
        path: Path without an ending.
        rows: The measured rows.
        text: Markdown for readers.
        protocol: How every row was run.
        facts: Result of `environment` before the runs, because its load must be that of other programs.
        about: More entries of the file: scope, command line, duration.
    """
    content = {**about, **facts, "rows": [row_content(row, protocol) for row in rows]}
    versions = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
    hardware = facts["hardware"]
    footer = (
        f"{str(about.get('scope', '')).capitalize()} form. {facts['date']}, commit {facts['commit']}, "
        f"{hardware['cpus']} CPUs ({hardware['cpu']}); {versions}. "
        f"{protocol.runs} runs of {protocol.seconds:g} s after {protocol.warmup_batches} batches of warm-up, "
        f"{'new processes in every round' if protocol.fresh else 'processes kept through the rounds'} unless said. "
        "Spread is (highest - lowest) / median over the runs."
    )
    save(path, content, f"{text.rstrip()}\n\n{footer}\n")


def save(path: Path, content: Mapping[str, Any], text: str) -> None:
    """Write ``PATH.json`` and ``PATH.md``, each as a whole or not at all. Paths in the repository become relative."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for ending, whole in ((".json", json.dumps(content, indent=1) + "\n"), (".md", text)):
        draft = path.with_name(f"{path.name}{ending}.draft")
        draft.write_text(whole.replace(f"{HERE.parent}{os.sep}", ""), encoding="utf-8")
        draft.replace(path.with_name(path.name + ending))

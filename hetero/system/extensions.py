"""Parts of hetero that other packages may bring too, found by entry point.

A package brings a part by an entry point of its metadata. hetero brings its own parts by the same entry points. The
source folder of a job lacks metadata, so a table has the names of hetero's parts too. tests/test_extensions.py compares
the table with pyproject.toml. Nothing below ``hetero.cli`` imports ``hetero.sagemaker`` or ``hetero.ray``, because
their parts are found by these names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

__all__ = ["DRIVERS", "EXECUTORS", "OWN", "PLATFORMS", "REQUESTS", "find", "names"]

PLATFORMS = "hetero.platforms"
"""Subclasses of `hetero.cluster.platforms.platform.Platform`, by their name."""
DRIVERS = "hetero.drivers"
"""Functions that run a whole job from one command, by the name of a platform: `LaunchOptions` to exit code."""
REQUESTS = "hetero.requests"
"""What the command line does with a platform's request for a job, a JSON file: ``check`` and ``simulate``."""
EXECUTORS = "hetero.executors"
"""Functions that make the executor of a study, by the name in its file."""
OWN: Mapping[str, Mapping[str, str]] = {
    # In the order of detection: a TrainJob is a JobSet too.
    PLATFORMS: {
        "sagemaker": "hetero.cluster.platforms.sagemaker:SageMaker",
        "trainjob": "hetero.cluster.platforms.trainjob:TrainJob",
        "jobset": "hetero.cluster.platforms.jobset:JobSet",
        "volcano": "hetero.cluster.platforms.volcano:Volcano",
        "vertex": "hetero.cluster.platforms.vertex:Vertex",
        "aws-batch": "hetero.cluster.platforms.aws_batch:AwsBatch",
        "slurm": "hetero.cluster.platforms.slurm:Slurm",
    },
    DRIVERS: {"ray": "hetero.ray.job:run"},
    REQUESTS: {
        "check": "hetero.sagemaker.commands:check",
        "simulate": "hetero.sagemaker.commands:simulate",
    },
    EXECUTORS: {"sagemaker": "hetero.sagemaker.study_executor:from_study"},
}
"""The parts of this package: module and name, by kind and name."""


def names(kind: str) -> list[str]:
    """Return the names of all parts of a kind, the parts of this package first."""
    found = [*OWN[kind], *(entry.name for entry in importlib.metadata.entry_points(group=kind))]
    return list(dict.fromkeys(found))


def find(kind: str, name: str) -> Any:
    """Return a part, None for an unknown name. A part of hetero ranks before a part of another package."""
    if name in OWN[kind]:
        module, _, attribute = OWN[kind][name].partition(":")
        return getattr(importlib.import_module(module), attribute)  # allowed: a module of hetero, from the table above
    entries = importlib.metadata.entry_points(group=kind, name=name)
    return next((entry.load() for entry in entries), None)

"""Writes the tree that a platform fills on a host before it starts the container there: ``/opt/ml``.

A simulation builds one tree for each host. A launcher finds its place in the job from these files and a few variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CHANNEL_NAME", "TreeChannel", "has_trees", "platform_environment", "write_tree"]

CHANNEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
"""Pattern of a channel's name, which becomes the name of a link or folder in every host's tree."""

_FOLDERS = ("checkpoints", "code", "model", "output/data", "output/intermediate")
"""Empty folders of a tree. Without ``output/intermediate``, SageMaker's toolkit would upload its content to S3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeChannel:
    """One input channel of a host."""

    name: str
    path: Path | None
    """Folder or file with the data. The tree gets a link to it. None if the data comes in another way, for example
    through the pipes of ``Pipe`` mode."""
    mode: str = "File"
    """Input mode: ``File``, ``FastFile`` or ``Pipe``."""
    distribution: str = "FullyReplicated"
    """How the platform distributes the data over the hosts."""
    content_type: str | None = None
    record_wrapper: str = "None"

    def config(self) -> dict[str, str]:
        """Return the channel's entry in ``inputdataconfig.json``."""
        found = {
            "TrainingInputMode": self.mode,
            "S3DistributionType": self.distribution,
            "RecordWrapperType": self.record_wrapper,
        }
        return found if self.content_type is None else {"ContentType": self.content_type, **found}


def write_tree(
    base_dir: Path,
    *,
    resource_config: Mapping[str, object],
    hyperparameters: Mapping[str, str],
    channels: Sequence[TreeChannel],
) -> None:
    """Write the tree of one host.

    Args:
        base_dir: The folder that corresponds to ``/opt/ml`` on the platform. It must not exist yet.
        resource_config: Content of ``resourceconfig.json``.
        hyperparameters: Content of ``hyperparameters.json``.
        channels: The inputs of this host.
    """
    config, data = base_dir / "input" / "config", base_dir / "input" / "data"
    for folder in (config, data, *(base_dir / name for name in _FOLDERS)):
        folder.mkdir(parents=True)
    _write_json(config / "resourceconfig.json", resource_config)
    _write_json(config / "hyperparameters.json", hyperparameters)
    _write_json(config / "inputdataconfig.json", {channel.name: channel.config() for channel in channels})
    for channel in channels:
        if channel.path is not None and channel.path.is_dir():
            (data / channel.name).symlink_to(channel.path.resolve())
        elif channel.path is not None:  # the platform puts a single object into the channel's folder
            (data / channel.name).mkdir()
            (data / channel.name / channel.path.name).symlink_to(channel.path.resolve())


def has_trees(folder: Path) -> bool:
    """Return whether a simulation has written to a folder, which then has the trees of hosts, with links to data."""
    return any(folder.glob("hosts/*/ml/input/config/resourceconfig.json"))


def platform_environment(base_dir: Path, host: str, channels: Sequence[str]) -> dict[str, str]:
    """Return the variables that training scripts read on the platform."""
    found = {
        "SAGEMAKER_BASE_DIR": str(base_dir),
        "SM_MODEL_DIR": str(base_dir / "model"),
        "SM_OUTPUT_DATA_DIR": str(base_dir / "output" / "data"),
        "SM_CURRENT_HOST": host,
    }
    for name in channels:
        found[f"SM_CHANNEL_{name.upper()}"] = str(base_dir / "input" / "data" / name)
    return found


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

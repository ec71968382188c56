"""Writes folders like the ``/opt/ml`` that SageMaker prepares on a host before it starts the container.

A simulation writes one such tree of folders for each host. A launcher reads the tree of its host and a few environment
variables. They contain the hosts of the job, and the name of this host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.cluster.platforms.sagemaker import CHANNELS, CONFIG, folders_below

__all__ = ["CHANNEL_NAME", "InputChannel", "earlier_hosts", "has_opt_ml", "write_opt_ml"]

# Without this pattern, a channel with the name ../../x was linked outside of the tree (A13).
CHANNEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
"""Pattern of a channel's name, which becomes the name of a link or folder in every host's tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputChannel:
    """One input channel of a host."""

    name: str
    path: Path | None
    """Folder or file with the data. The tree gets a link to it. None for no link, as in ``Pipe`` mode."""
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


def write_opt_ml(
    base_dir: Path,
    *,
    resource_config: Mapping[str, object],
    hyperparameters: Mapping[str, str],
    channels: Sequence[InputChannel],
) -> None:
    """Write the tree of one host.

    Args:
        base_dir: The folder that is ``/opt/ml`` for the host. It must not exist yet.
        resource_config: Content of ``resourceconfig.json``.
        hyperparameters: Content of ``hyperparameters.json``.
        channels: The inputs of this host.
    """
    config, data, folders = base_dir / CONFIG, base_dir / CHANNELS, folders_below(base_dir)
    # Without this folder, SageMaker's toolkit would upload files to S3.
    intermediate = folders.output.with_name("intermediate")
    for folder in (config, data, folders.checkpoints, folders.code, folders.model, folders.output, intermediate):
        folder.mkdir(parents=True)
    _write_json(config / "resourceconfig.json", resource_config)
    _write_json(config / "hyperparameters.json", hyperparameters)
    _write_json(config / "inputdataconfig.json", {channel.name: channel.config() for channel in channels})
    for channel in channels:
        if channel.path is not None and channel.path.is_dir():
            (data / channel.name).symlink_to(channel.path.resolve())
        # A channel may be a single object, which the platform puts into the channel's folder.
        elif channel.path is not None:
            (data / channel.name).mkdir()
            (data / channel.name / channel.path.name).symlink_to(channel.path.resolve())


def earlier_hosts(folder: Path) -> list[Path]:
    """Return the host folders that earlier simulations wrote to a folder. Ignores symbolic links."""
    return sorted(path.parents[3] for path in _host_files(folder) if not path.parents[3].is_symlink())


def has_opt_ml(folder: Path) -> bool:
    """Return whether a simulation has written to a folder. The folder then contains trees with links to data."""
    return any(_host_files(folder))


def _host_files(folder: Path) -> Iterator[Path]:
    return folder.glob(f"hosts/*/ml/{CONFIG}/resourceconfig.json")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

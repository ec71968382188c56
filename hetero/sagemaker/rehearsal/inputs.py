"""The inputs of a rehearsal: the files that each host gets from each channel. Local data replaces data in S3."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from hetero.errors import ConfigError
from hetero.sagemaker.request import Channel, TrainingRequest
from hetero.simulate.opt_ml import CHANNEL_NAME, InputChannel

__all__ = ["LocalChannel", "local_channels"]

_MODES = ("File", "FastFile", "Pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChannel(Channel):
    """A channel of the request whose data is on this machine."""

    path: Path

    @property
    def is_compressed(self) -> bool:
        """Whether the data consists of gzip files. In Pipe mode, the platform unpacks them."""
        return bool(self.document.get("CompressionType") == "Gzip")

    def is_for(self, group: str) -> bool:
        """Return whether the hosts of a group get the channel."""
        return not self.groups or group in self.groups

    def files(self, host: str, hosts: Sequence[str]) -> list[Path]:
        """Return the files that a host gets, ordered by the bytes of their names. S3 orders keys in this way.

        Args:
            host: Name of the host.
            hosts: Names of all hosts that get the channel, in order.
        """
        found = [self.path]
        if self.path.is_dir():
            found = sorted((entry for entry in _entries_below(self.path) if entry.is_file()), key=os.fsencode)
        # Of a sharded channel, each host gets every n-th file, if n hosts get the channel.
        return found[hosts.index(host) :: len(hosts)] if self.is_sharded else found

    def in_tree(self, host: str, hosts: Sequence[str], parts: Path) -> InputChannel:
        """Return the channel as it appears in a host's tree.

        Args:
            host: Name of the host.
            hosts: Names of all hosts that get the channel, in order.
            parts: A folder for links to the host's part of the files. No other host uses it.
        """
        path: Path | None = self.path
        if self.mode == "Pipe":
            # The host reads from FIFOs and has no folder of the channel.
            path = None
        elif self.is_sharded and self.path.is_dir():
            path = parts / self.name
            path.mkdir(parents=True)
            for file in self.files(host, hosts):
                link = path / file.relative_to(self.path)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())
        return InputChannel(
            name=self.name,
            path=path,
            mode=self.mode,
            distribution="ShardedByS3Key" if self.is_sharded else "FullyReplicated",
            content_type=self.document.get("ContentType"),
        )

    def state(self) -> tuple[int, int, int]:
        """Return three numbers that change if a program writes to the data: entries, bytes, and latest change in ns."""
        status = [path.stat() for path in (self.path, *_entries_below(self.path)) if path.exists()]
        return len(status), sum(each.st_size for each in status), max(each.st_mtime_ns for each in status)


def local_channels(request: TrainingRequest, data: Mapping[str, Path]) -> list[LocalChannel]:
    """Return the request's channels with their local data.

    Args:
        request: The request.
        data: Local folder or file for each channel, with the data that the platform would read from S3.

    Raises:
        ConfigError: If local data for a channel is missing, if a channel is malformed, if a rehearsal does not support
            a channel's kind, or if ``data`` names an unknown channel.
    """
    # Reject data for an unknown channel.
    names = [channel.name for channel in request.channels]
    if unknown := sorted(set(data) - set(names)):
        raise ConfigError(
            f"the request has no channel {unknown[0]!r:.80}; its channels are: {', '.join(names) or 'none'}"
        )
    # Check each channel, then look up its data.
    groups = {group.name for group in request.groups}
    found = []
    for channel in request.channels:
        name = channel.name
        if not CHANNEL_NAME.fullmatch(name) or names.count(name) > 1:
            raise ConfigError(
                f"the request has the channel {name!r:.80}; expected unique names that the service accepts"
            )
        if channel.mode not in _MODES:
            raise ConfigError(f"channel {name} has the mode {channel.mode!r:.40}; expected one of {', '.join(_MODES)}")
        if unknown := sorted(set(channel.groups) - groups):
            raise ConfigError(
                f"channel {name} is for the group {unknown[0]!r:.80}, but the request has {', '.join(sorted(groups))}"
            )
        if name not in data:
            raise ConfigError(
                f"channel {name} is {channel.uri or 'a file system'}, but a rehearsal does not use the network; give "
                f"local data with --channel {name}=DIR (submit_job.py: --data {name}=DIR) or data={{{name!r}: DIR}}"
            )
        if not data[name].exists():
            raise ConfigError(f"the data of channel {name}, {data[name]}, does not exist")
        is_wrapped = channel.document.get("RecordWrapperType", "None") != "None"
        if is_wrapped or channel.source.get("S3DataType") == "AugmentedManifestFile":
            raise ConfigError(
                f"channel {name} has RecordWrapperType or AugmentedManifestFile, which a rehearsal does not support; "
                "rehearse with another input"
            )
        # A `LocalChannel` has all fields of the request's channel.
        stated = {each.name: getattr(channel, each.name) for each in fields(channel)}
        found.append(LocalChannel(**stated, path=data[name].resolve()))
    return found


def _entries_below(path: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(path):
        yield from (Path(folder, name) for name in (*folders, *files))

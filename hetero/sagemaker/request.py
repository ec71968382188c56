"""A CreateTrainingJob request to SageMaker, read from a dict or a file.

The checks of a job and the hosts of its rehearsal follow from this request. Its members have the names of the service's
API.

Source: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hetero.errors import ConfigError
from hetero.system.documents import read_bounded

__all__ = ["ONLY_GROUP", "Channel", "InstanceGroup", "TrainingRequest", "read_request"]

ONLY_GROUP = "homogeneousCluster"
"""Name that the service gives to the only group of a request without instance groups."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """One group of hosts of one type."""

    name: str
    instance_type: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One input of the job."""

    name: str
    mode: str
    """``File``, ``FastFile`` or ``Pipe``. The mode of the job if the channel states none."""
    uri: str | None
    """S3 URI of the data, or None for a file system."""
    groups: tuple[str, ...]
    """The groups that get the channel. Empty if all groups get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """A parsed request. `document` is the whole request."""

    name: str
    groups: tuple[InstanceGroup, ...]
    channels: tuple[Channel, ...]
    hyperparameters: Mapping[str, str]
    environment: Mapping[str, str]
    document: Mapping[str, Any]

    @property
    def is_heterogeneous(self) -> bool:
        """Whether the request has instance groups."""
        return bool(self.document["ResourceConfig"].get("InstanceGroups"))

    @classmethod
    def parse(cls, document: object, source: str = "request") -> TrainingRequest:
        """Return the request that a dict of boto3's arguments describes.

        Args:
            document: The arguments of ``create_training_job``, or the output of ``describe-training-job``.
            source: Origin of the document, for messages.

        Raises:
            ConfigError: If a member has a wrong type, or a required member is missing.
        """
        reader = _Reader(source)
        whole = reader.expect(document, dict, "", "an object")
        resources = reader.member(whole, "ResourceConfig", dict, "", {})
        if not resources:
            raise ConfigError(f"{source} has no ResourceConfig; expected the request of CreateTrainingJob")
        algorithm = reader.member(whole, "AlgorithmSpecification", dict, "", {})
        default_mode = reader.member(algorithm, "TrainingInputMode", str, "AlgorithmSpecification", "File")
        return cls(
            name=reader.member(whole, "TrainingJobName", str, "", "job"),
            groups=tuple(reader.groups(resources)),
            channels=tuple(
                reader.channel(item, f"InputDataConfig[{index}]", default_mode)
                for index, item in enumerate(reader.member(whole, "InputDataConfig", list, "", []))
            ),
            hyperparameters=reader.texts(whole, "HyperParameters"),
            environment=reader.texts(whole, "Environment"),
            document=whole,
        )


def read_request(path: Path) -> TrainingRequest:
    """Read a request from a JSON file.

    Raises:
        ConfigError: If the file cannot be read, is longer than `hetero.system.documents.MAX_BYTES`, or does not contain
            a request as JSON.
    """
    content = read_bounded(path, f"the request {path}")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {str(error)[:200]}") from error
    return TrainingRequest.parse(document, str(path))


class _Reader:
    """Reads typed members of a document and raises ConfigError with the path of a wrong one."""

    def __init__(self, source: str) -> None:
        self._source = source

    def expect(self, value: object, kind: type[_T], path: str, expected: str) -> _T:
        if not isinstance(value, kind) or isinstance(value, bool):
            where = f": {path}" if path else ""
            raise ConfigError(f"{self._source}{where} is {value!r:.80}; expected {expected}")
        return value

    def member(self, where: Mapping[str, Any], key: str, kind: type[_T], path: str, default: _T) -> _T:
        value = where.get(key)
        if value is None:
            return default
        names = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
        return self.expect(value, kind, f"{path}.{key}" if path else key, names[kind])

    def texts(self, where: Mapping[str, Any], key: str) -> dict[str, str]:
        found = self.member(where, key, dict, "", {})
        return {str(name): self.expect(value, str, f"{key}[{name!r}]", "a text") for name, value in found.items()}

    def groups(self, resources: Mapping[str, Any]) -> list[InstanceGroup]:
        listed = self.member(resources, "InstanceGroups", list, "ResourceConfig", [])
        if not listed:
            return [self._group({"InstanceGroupName": ONLY_GROUP, **resources}, "ResourceConfig")]
        return [
            self._group(self.expect(item, dict, path, "an object"), path)
            for index, item in enumerate(listed)
            for path in [f"ResourceConfig.InstanceGroups[{index}]"]
        ]

    def _group(self, item: Mapping[str, Any], path: str) -> InstanceGroup:
        count = self.member(item, "InstanceCount", int, path, 0)
        name = self.member(item, "InstanceGroupName", str, path, "")
        instance_type = self.member(item, "InstanceType", str, path, "")
        if count < 1 or not name or not instance_type:
            raise ConfigError(
                f"{self._source}: {path} has the name {name!r:.80}, the type {instance_type!r:.80} and {count} hosts; "
                "expected a name, an instance type and at least one host"
            )
        return InstanceGroup(name=name, instance_type=instance_type, count=count)

    def channel(self, item: object, path: str, default_mode: str) -> Channel:
        channel = self.expect(item, dict, path, "an object")
        source = self.member(channel, "DataSource", dict, path, {})
        s3 = self.member(source, "S3DataSource", dict, f"{path}.DataSource", {})
        names = self.member(s3, "InstanceGroupNames", list, f"{path}.DataSource.S3DataSource", [])
        return Channel(
            name=self.member(channel, "ChannelName", str, path, ""),
            mode=self.member(channel, "InputMode", str, path, default_mode),
            uri=self.member(s3, "S3Uri", str, f"{path}.DataSource.S3DataSource", "") or None,
            groups=tuple(self.expect(name, str, f"{path}: a group's name", "a text") for name in names),
        )

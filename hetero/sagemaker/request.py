"""A CreateTrainingJob request to SageMaker, read from a dict or a file.

The checks examine this request, and a rehearsal simulates its hosts. Its members have the names of the service's API.

Source: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from hetero.documents.files import read_bounded
from hetero.documents.records import camel_case, decode, limits
from hetero.errors import ConfigError

__all__ = ["ONLY_GROUP", "Channel", "RequestGroup", "TrainingRequest", "read_request"]

ONLY_GROUP = "homogeneousCluster"
"""Name that the service gives to the only group of a request without instance groups."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """One group of hosts of one type."""

    name: str = field(metadata=limits(accepts=bool, expected="a name"))
    instance_type: str = field(metadata=limits(accepts=bool, expected="an instance type"))
    count: int = field(metadata=limits(minimum=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One input of the job."""

    name: str
    mode: str
    """``File``, ``FastFile`` or ``Pipe``. If the channel states no mode, it is the mode of the job."""
    uri: str
    """S3 URI of the data. Empty for a file system."""
    groups: tuple[str, ...]
    """The groups that get the channel. Empty if all groups get it."""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The channel as the request has it."""

    @property
    def source(self) -> Mapping[str, Any]:
        """The channel's ``S3DataSource``. Empty for a file system."""
        return (self.document.get("DataSource") or {}).get("S3DataSource") or {}

    @property
    def is_sharded(self) -> bool:
        """Whether each host gets only a part of the objects."""
        return bool(self.source.get("S3DataDistributionType") == "ShardedByS3Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """A parsed request. `document` is the whole request."""

    name: str
    groups: tuple[RequestGroup, ...]
    channels: tuple[Channel, ...]
    hyperparameters: Mapping[str, str]
    environment: Mapping[str, str]
    document: Mapping[str, Any]

    @property
    def is_heterogeneous(self) -> bool:
        """Whether the request has instance groups."""
        return bool(self.document["ResourceConfig"].get("InstanceGroups"))

    @property
    def algorithm(self) -> Mapping[str, Any]:
        """The request's ``AlgorithmSpecification``. Empty without one."""
        return self.document.get("AlgorithmSpecification") or {}

    def parameter(self, name: str) -> Any:
        """Return the value of a hyperparameter, decoded from the SDK's JSON. None if it is missing."""
        text = self.hyperparameters.get(name, "null")
        # A text that is not JSON was not encoded by an SDK.
        try:
            return json.loads(text)
        except ValueError:
            return text

    @classmethod
    def parse(cls, document: object, source: str = "request") -> TrainingRequest:
        """Return a request from a dict of boto3's arguments.

        Args:
            document: The arguments of ``create_training_job``, or the output of ``describe-training-job``.
            source: Origin of the document, for messages.

        Raises:
            ConfigError: If a member has a wrong type, or a required member is missing.
        """
        found = _decode(_Request, document, source)
        stated = cast("dict[str, Any]", document)
        groups = found.resource_config.instance_groups
        # Without groups, the request has one type and one count. All hosts are then one group.
        if not groups:
            only_group = {"InstanceGroupName": ONLY_GROUP, **stated["ResourceConfig"]}
            groups = (_decode(RequestGroup, only_group, source, "ResourceConfig"),)
        return cls(
            name=found.training_job_name,
            groups=groups,
            channels=tuple(
                Channel(
                    name=channel.channel_name,
                    mode=channel.input_mode or found.algorithm_specification.training_input_mode,
                    uri=channel.data_source.s3_data_source.s3_uri,
                    groups=channel.data_source.s3_data_source.instance_group_names,
                    document=item,
                )
                for channel, item in zip(found.input_data_config, stated.get("InputDataConfig") or (), strict=True)
            ),
            hyperparameters=found.hyper_parameters,
            environment=found.environment,
            document=stated,
        )


def read_request(path: Path) -> TrainingRequest:
    """Read a request from a JSON file.

    Raises:
        ConfigError: If the file cannot be read, is longer than `hetero.documents.files.MAX_BYTES`, or does not contain
            a request as JSON.
    """
    content = read_bounded(path, f"the request {path}")
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {str(error)[:200]}") from error
    return TrainingRequest.parse(document, str(path))


_ANY_LENGTH = limits(max_length=2**20)
"""Limits of texts whose length `hetero.sagemaker.limits` checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resources:
    instance_groups: tuple[RequestGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _S3Source:
    s3_uri: str = field(default="", metadata=_ANY_LENGTH)
    instance_group_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    s3_data_source: _S3Source = _S3Source()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    channel_name: str = ""
    input_mode: str = ""
    data_source: _Source = _Source()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Algorithm:
    training_input_mode: str = "File"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The members of a request that hetero reads."""

    resource_config: _Resources
    training_job_name: str = "job"
    algorithm_specification: _Algorithm = _Algorithm()
    input_data_config: tuple[_Input, ...] = ()
    hyper_parameters: dict[str, str] = field(default_factory=dict, metadata=_ANY_LENGTH)
    environment: dict[str, str] = field(default_factory=dict, metadata=_ANY_LENGTH)


def _api_name(name: str) -> str:
    """Return the name of a member in the service's API."""
    return {"name": "InstanceGroupName", "count": "InstanceCount"}.get(name) or camel_case(name)


def _decode(cls: type[_T], value: object, source: str, path: str = "") -> _T:
    """Return a part of a request as a record. Raise `ConfigError` with advice if the part is malformed."""
    # A request has the names of the service's API, and may have members that hetero does not read (`is_foreign`).
    try:
        return decode(cls, value, path=path, spelling=_api_name, is_foreign=True)
    except ConfigError as error:
        advice = "pass the arguments of create_training_job, or the output of describe-training-job"
        raise ConfigError(f"{source}: {error}\n  to do: {advice}") from error

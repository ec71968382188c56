"""The objects of a channel, manifests that name some of them, and the inputs of an estimator that use a manifest.

A manifest is a JSON list: an object with the common prefix, then the keys below it. With ``S3DataType: ManifestFile``
the service gives a job exactly these objects, for any algorithm.

Source: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_S3DataSource.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.canary.files import MAX_FILES, DataFile
from hetero.errors import ConfigError
from hetero.sagemaker.request import TrainingRequest

__all__ = ["S3Channel", "channels_of", "list_objects", "manifest_text", "sdk_inputs", "split_uri"]

_MAX_MANIFEST_KEYS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Channel:
    """One channel of a request whose data is in S3."""

    name: str
    uri: str
    is_prefix: bool
    """Whether all objects below the URI belong to the channel. Only such a channel can be reduced."""
    is_sharded: bool
    """Whether each host gets only a part of the objects."""
    document: Mapping[str, Any]
    """The channel as the request has it."""


def channels_of(request: TrainingRequest) -> list[S3Channel]:
    """Return the channels of a request.

    Raises:
        ConfigError: If a channel is not in S3.
    """
    found = []
    documents = request.document.get("InputDataConfig") or ()
    for channel, document in zip(request.channels, documents, strict=True):
        source = (document.get("DataSource") or {}).get("S3DataSource") or {}
        if channel.uri is None:
            raise ConfigError(f"channel {channel.name} is a file system; expected data in S3 for canary jobs")
        found.append(
            S3Channel(
                name=channel.name,
                uri=channel.uri,
                is_prefix=source.get("S3DataType", "S3Prefix") == "S3Prefix",
                is_sharded=source.get("S3DataDistributionType") == "ShardedByS3Key",
                document=document,
            )
        )
    return found


def split_uri(uri: str) -> tuple[str, str]:
    """Return bucket and key of an S3 URI.

    Raises:
        ConfigError: If it is not an S3 URI.
    """
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://") or not bucket:
        raise ConfigError(f"found {uri!r:.200}; expected an S3 URI such as s3://bucket/prefix")
    return bucket, key


def list_objects(client: Any, uri: str) -> list[DataFile]:
    """Return the objects below a URI, with keys relative to it. Objects without bytes, such as folders, are left out.

    Args:
        client: boto3's S3 client.
        uri: S3 URI of a prefix.

    Raises:
        ConfigError: If there are no objects, or more than `MAX_FILES`.
    """
    bucket, prefix = split_uri(uri)
    found: list[DataFile] = []
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        listed = ((str(each["Key"]), int(each["Size"])) for each in page.get("Contents", ()))
        found += [DataFile(key[len(prefix) :], size) for key, size in listed if size > 0]
        if len(found) > MAX_FILES:
            raise ConfigError(f"{uri} has more than {MAX_FILES:,} objects; give a canary fewer, larger files")
    if not found:
        raise ConfigError(f"{uri} has no objects; expected the files of a channel")
    return sorted(found)


def manifest_text(uri: str, files: Sequence[DataFile]) -> str:
    """Return a manifest with some of the objects below a URI.

    Raises:
        ConfigError: If there are too many objects for one manifest.
    """
    if len(files) > _MAX_MANIFEST_KEYS:
        raise ConfigError(f"a canary of {uri} has {len(files):,} objects; expected at most {_MAX_MANIFEST_KEYS:,}")
    return json.dumps([{"prefix": uri}, *(file.name for file in files)])


def sdk_inputs(version: int, channels: Sequence[S3Channel], manifests: Mapping[str, str]) -> Any:
    """Return the inputs for an estimator: channels with a manifest read its objects, others are as before.

    Args:
        version: Version of the SDK, 2 or 3.
        channels: All channels of the job.
        manifests: S3 URI of the manifest of each reduced channel.
    """
    if version == 2:
        return {channel.name: _input_of_2(channel, manifests.get(channel.name)) for channel in channels}
    return [_input_of_3(channel, manifests.get(channel.name)) for channel in channels]


def _source_of(channel: S3Channel, manifest: str | None) -> dict[str, Any]:
    source = dict((channel.document.get("DataSource") or {}).get("S3DataSource") or {})
    if manifest is not None:
        source |= {"S3Uri": manifest, "S3DataType": "ManifestFile"}
    return source


def _input_of_2(channel: S3Channel, manifest: str | None) -> Any:
    from sagemaker.inputs import TrainingInput

    source, document = _source_of(channel, manifest), channel.document
    return TrainingInput(
        s3_data=source["S3Uri"],
        s3_data_type=source.get("S3DataType", "S3Prefix"),
        distribution=source.get("S3DataDistributionType"),
        compression=document.get("CompressionType"),
        content_type=document.get("ContentType"),
        record_wrapping=document.get("RecordWrapperType"),
        input_mode=document.get("InputMode"),
        instance_groups=source.get("InstanceGroupNames"),
        attribute_names=source.get("AttributeNames"),
    )


def _input_of_3(channel: S3Channel, manifest: str | None) -> Any:
    from sagemaker.core.shapes import S3DataSource  # type: ignore[import-untyped,unused-ignore]
    from sagemaker.core.training.configs import InputData  # type: ignore[import-untyped,unused-ignore]

    source = _source_of(channel, manifest)
    given = {
        "s3_uri": source["S3Uri"],
        "s3_data_type": source.get("S3DataType", "S3Prefix"),
        "s3_data_distribution_type": source.get("S3DataDistributionType"),
        "instance_group_names": source.get("InstanceGroupNames"),
    }
    content_type = channel.document.get("ContentType")
    return InputData(
        channel_name=channel.name,
        data_source=S3DataSource(**{name: value for name, value in given.items() if value is not None}),
        **({"content_type": content_type} if content_type else {}),
    )

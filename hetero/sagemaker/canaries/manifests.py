"""The objects of a channel, manifests that name some of them, and the inputs of an estimator that use a manifest.

A manifest is a JSON list. The first item is an object with the prefix of all keys. The other items are the rest of each
key. With ``S3DataType: ManifestFile`` the service gives a job exactly these objects, for any algorithm.

Source: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_S3DataSource.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hetero.decide.canary.files import MAX_FILES, DataFile
from hetero.errors import ConfigError
from hetero.sagemaker.request import Channel, TrainingRequest

__all__ = ["channels_of", "channels_of_sdk", "list_objects", "manifest_text", "sdk_inputs", "split_uri"]

_OF_SDK_3 = ("code", "sm_drivers", "recipe")
"""Channels that SDK 3 adds to each request, with the source code and its own drivers."""


def channels_of_sdk(estimator: Any, *, version: int) -> frozenset[str]:
    """Return the names of the channels that the SDK itself adds to each request of an estimator.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3.
        version: Version of the SDK, 2 or 3.
    """
    if version == 3:
        return frozenset(_OF_SDK_3)
    names = set()
    if estimator.model_uri:
        names.add(str(estimator.model_channel_name))
    if estimator.enable_network_isolation() and getattr(estimator, "entry_point", None):
        # The container of an isolated network cannot download its code itself.
        names.add(str(estimator.code_channel_name))
    return frozenset(names)


def channels_of(request: TrainingRequest, *, without: Collection[str]) -> list[Channel]:
    """Return the channels of a request that are inputs of the user.

    Args:
        request: The request.
        without: Names of the channels that the SDK adds.

    Raises:
        ConfigError: If a channel is not in S3.
    """
    found = [channel for channel in request.channels if channel.name not in without]
    for channel in found:
        if not channel.uri:
            raise ConfigError(f"channel {channel.name} is a file system; expected data in S3 for canary jobs")
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
        ConfigError: If the prefix is empty, or has more than `MAX_FILES` objects, or the URI is that of an object.
    """
    bucket, prefix = split_uri(uri)
    found: list[DataFile] = []
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        keys_and_sizes = ((str(each["Key"]), int(each["Size"])) for each in page.get("Contents", ()))
        found += [DataFile(key.removeprefix(prefix), size) for key, size in keys_and_sizes if size > 0]
        if len(found) > MAX_FILES:
            raise ConfigError(f"{uri} has more than {MAX_FILES:,} objects; give a canary fewer, larger files")
    if not found:
        raise ConfigError(f"{uri} contains no objects; expected the files of a channel")
    # Reject the URI of a single object, because it once gave a manifest with an empty key.
    if any(not file.name for file in found):
        raise ConfigError(
            f"{uri} is an object; expected the prefix of several, because an object cannot be divided\n"
            "  to do: give the prefix above it, or name the channel in whole=[...]"
        )
    return sorted(found)


def manifest_text(uri: str, files: Sequence[DataFile]) -> str:
    """Return a manifest with some of the objects below a URI."""
    return json.dumps([{"prefix": uri}, *(file.name for file in files)])


def sdk_inputs(version: int, channels: Sequence[Channel], manifests: Mapping[str, str]) -> Any:
    """Return the inputs for an estimator: channels with a manifest read its objects, others are as before.

    Args:
        version: Version of the SDK, 2 or 3.
        channels: All channels of the job.
        manifests: S3 URI of the manifest of each reduced channel.
    """
    if version == 2:
        return {channel.name: _input_of_2(channel, manifests.get(channel.name)) for channel in channels}
    return [_input_of_3(channel, manifests.get(channel.name)) for channel in channels]


def _document_of(channel: Channel, manifest: str | None) -> dict[str, Any]:
    """Return the channel as the request had it. If ``manifest`` is the URI of a manifest, the channel reads it."""
    source = dict(channel.source)
    if manifest is not None:
        source |= {"S3Uri": manifest, "S3DataType": "ManifestFile"}
    return {**channel.document, "DataSource": {"S3DataSource": source}}


def _input_of_2(channel: Channel, manifest: str | None) -> Any:
    """Return the channel as an input of SDK 2. See `_document_of`."""
    from sagemaker.inputs import TrainingInput

    made = TrainingInput(channel.uri)
    # Set the whole document, because the constructor knows only some members of a channel.
    made.config = {name: value for name, value in _document_of(channel, manifest).items() if name != "ChannelName"}
    return made


def _input_of_3(channel: Channel, manifest: str | None) -> Any:
    """Return the channel as an input of SDK 3. See `_document_of`."""
    from sagemaker.core import shapes  # type: ignore[import-untyped,unused-ignore]

    return shapes.Channel(**_snake_case(_document_of(channel, manifest)))


def _snake_case(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the names of SDK 3: ``S3DataType`` becomes ``s3_data_type``."""
    found = {}
    for name, value in document.items():
        snake_name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        found[snake_name] = _snake_case(value) if isinstance(value, Mapping) else value
    return found

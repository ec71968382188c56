"""Record the request that the SageMaker SDK would send for an estimator, without an account or a network.

A copy of the estimator gets a session whose AWS clients never use the network. botocore validates every call against
its own model, and then an event handler of this module returns the response. The module also keeps the uploaded code.

This works with version 2 of the SDK (``Estimator`` and the estimators of frameworks) and version 3 (``ModelTrainer``).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from hetero.errors import ConfigError
from hetero.sagemaker.request import TrainingRequest

__all__ = [
    "ACCOUNT",
    "CLIENT_LOCK",
    "MAX_CODE_BYTES",
    "Recording",
    "copy_of",
    "is_local",
    "offline_session",
    "record",
    "sdk_version",
]

CLIENT_LOCK = threading.Lock()
"""Lock of the client that the whole process shares in SDK 3.

A recording replaces this client for a moment. Another recording, or the start of a job, must not meet the replacement.
"""

MAX_CODE_BYTES = 1 << 30
"""Maximum size of a job's code, copied, uploaded or unpacked. More is data, which belongs into a channel."""
ACCOUNT = "000000000000"
"""Placeholder for the number of the user's account, which only AWS knows."""
_REGION = "us-east-1"
_LOCAL_BUCKET = "hetero-local-data"
"""Bucket of the S3 URIs that replace local inputs. Otherwise the SDK would upload the inputs."""

_Estimator = TypeVar("_Estimator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The request and the uploads that the SDK would have sent."""

    request: TrainingRequest
    objects: Mapping[str, bytes] = field(repr=False)
    """Uploads of the SDK: S3 URI -> content."""
    local_data: Mapping[str, Path]
    """Local inputs: S3 URI that replaces the input in the request -> local folder or file."""


def sdk_version(estimator: object) -> int:
    """Return the version of the SDK that an object belongs to: 2 for an estimator, 3 for a ``ModelTrainer``.

    Raises:
        ConfigError: If the object belongs to neither SDK.
    """
    for kind in type(estimator).__mro__:
        if kind.__module__.startswith("sagemaker.") and kind.__name__ in ("EstimatorBase", "ModelTrainer"):
            return 3 if kind.__name__ == "ModelTrainer" else 2
    raise ConfigError(
        f"found an object of type {type(estimator).__name__}; expected an estimator of the SageMaker SDK 2, "
        "such as sagemaker.pytorch.PyTorch, or a ModelTrainer of version 3"
    )


def copy_of(estimator: _Estimator) -> _Estimator:
    """Return a copy whose lists and dicts are also copies, because ``fit`` and ``train`` add to some of these."""
    estimator_copy = copy.copy(estimator)
    for name, value in vars(estimator).items():
        if isinstance(value, dict | list):
            setattr(estimator_copy, name, copy.copy(value))
    return estimator_copy


def is_local(estimator: Any) -> bool:
    """Return whether an estimator or ``ModelTrainer`` is for the SDK's local mode."""
    session = estimator.sagemaker_session
    return bool(getattr(session, "local_mode", False)) or "LOCAL" in str(getattr(estimator, "training_mode", ""))


def offline_session(region: str = _REGION) -> Any:
    """Return a session of the installed SageMaker SDK that needs no account and never uses the network.

    An estimator with this session can be checked, recorded and rehearsed, but not submitted.

    Raises:
        ConfigError: If no SageMaker SDK is installed.
    """
    # If the session took the request, a submission would raise the internal `_Recorded` instead of an AccessDenied.
    return _session(_Answers(takes_request=False), region, original=None)


def record(estimator: Any, inputs: Any = None, *, job_name: str | None = None) -> Recording:
    """Return the request that ``estimator.fit(inputs)`` or ``trainer.train(inputs)`` would send.

    The function uploads and sends nothing, and changes neither the estimator nor its session. `ACCOUNT` replaces an
    account number that the SDK would request from AWS.

    Args:
        estimator: An estimator of SDK 2 or a ``ModelTrainer`` of SDK 3.
        inputs: The inputs that its ``fit`` or ``train`` takes. An S3 URI replaces each local input (a path or a
            ``file://`` URI).
        job_name: Name of the job. SDK 3 ignores it and makes its own name.

    Raises:
        ConfigError: If the object is not an estimator, its session is for the SDK's local mode, or a local input does
            not exist.
    """
    version = sdk_version(estimator)
    original = estimator.sagemaker_session
    if is_local(estimator):
        raise ConfigError(
            "the estimator is for the SDK's local mode, which does not support instance groups; give it the job's "
            "instance types, and hetero.sagemaker.rehearse runs the job on this machine"
        )
    answers = _Answers()
    # Record with a copy, because neither the estimator nor its session may change.
    session = _session(answers, getattr(original, "boto_region_name", None) or _REGION, original)
    local_data: dict[str, Path] = {}
    if version == 2:
        _fit(estimator, _with_s3_uris(inputs, local_data), session, job_name)
    else:
        _train(estimator, inputs, session, local_data)
    if answers.request is None:
        raise ConfigError("the SDK sent no request for a training job; expected CreateTrainingJob")
    return Recording(
        request=TrainingRequest.parse(answers.request, "the estimator's request"),
        objects=answers.objects,
        local_data=local_data,
    )


def _fit(estimator: Any, inputs: Any, session: Any, job_name: str | None) -> None:
    """Call ``fit`` of a copy of the estimator. The session records the request and ends the call with `_Recorded`."""
    estimator_copy = copy_of(estimator)
    estimator_copy.sagemaker_session = session
    with contextlib.suppress(_Recorded):
        estimator_copy.fit(inputs, wait=False, logs=False, job_name=job_name)


def _train(trainer: Any, inputs: Any, session: Any, local_data: dict[str, Path]) -> None:
    """Call ``train`` of a copy of the trainer. The session records the request and ends the call with `_Recorded`.

    Args:
        trainer: The trainer. It does not change.
        inputs: The inputs of ``train``.
        session: The recording session.
        local_data: Receives the local inputs, see `Recording.local_data`.
    """
    from sagemaker.core.utils import utils  # type: ignore[import-untyped,unused-ignore]

    trainer_copy = copy_of(trainer)
    trainer_copy.sagemaker_session = session
    trainer_copy.input_data_config = _with_s3_uris(trainer_copy.input_data_config, local_data)
    # In some versions of the SDK, the whole process shares the first client. Remove this client during the call. Then
    # the SDK makes an offline client. Restore the first client afterwards for the user.
    instances = type(utils.SageMakerClient)._instances
    with CLIENT_LOCK:
        client_of_user = instances.pop(utils.SageMakerClient, None)
        try:
            with contextlib.suppress(_Recorded):
                trainer_copy.train(_with_s3_uris(inputs, local_data), wait=False, logs=False)
        finally:
            instances.pop(utils.SageMakerClient, None)
            if client_of_user is not None:
                instances[utils.SageMakerClient] = client_of_user


def _session(answers: _Answers, region: str, original: Any) -> Any:
    """Return a session of the SDK whose calls get ``answers`` instead of the network."""
    try:
        import boto3
    except ModuleNotFoundError:
        raise ConfigError(
            "no SageMaker SDK is installed; pip install 'sagemaker>=2.257,<3', or 'sagemaker>=3.18,<4' for version 3"
        ) from None
    # Try the module of version 3 first. If version 3 is installed, an import of the module of version 2 logs a warning.
    try:
        from sagemaker.core.helper.session_helper import Session
    except ModuleNotFoundError:
        from sagemaker.session import Session
    boto_session = boto3.Session(aws_access_key_id="none", aws_secret_access_key="none", region_name=region)
    # botocore validates a call before this event, so a malformed request fails here too.
    boto_session.events.register("before-call", answers)
    # Take over the settings of the user's session that change requests: its default bucket and the SDK's defaults. A
    # session has its bucket in the first attribute only after the first use. Before that, the second attribute has it.
    arguments = {
        "default_bucket": getattr(original, "_default_bucket", None)
        or getattr(original, "_default_bucket_name_override", None),
        "default_bucket_prefix": getattr(original, "default_bucket_prefix", None),
        "sagemaker_config": getattr(original, "sagemaker_config", None),
        "settings": getattr(original, "settings", None),
    }
    stated_arguments = {name: value for name, value in arguments.items() if value is not None}
    session = Session(boto_session=boto_session, **stated_arguments)
    # The SDK does not send telemetry through botocore, so the handler above would not see it.
    session.sagemaker_config = _without_telemetry(session.sagemaker_config)
    return session


def _without_telemetry(defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the SDK's defaults with telemetry off.

    The SDK does not send telemetry through botocore, so the recording session's event handler cannot intercept it. When
    a request is recorded, the exception `_Recorded` ends the SDK's call before the SDK reports a success. But the SDK
    would still report an error, for example of invalid inputs.
    """
    settings = dict(defaults or {"SchemaVersion": "1.0"})
    # Copy each level of the settings down to the one with the switch, because the user's settings must not change.
    level = settings
    for name in ("SageMaker", "PythonSDK", "Modules"):
        level[name] = dict(level.get(name) or {})
        level = level[name]
    level["TelemetryOptOut"] = True
    return settings


class _Recorded(BaseException):
    """Raised after the request is recorded, to skip the SDK's next steps, such as telemetry."""


def _response(status_code: int) -> SimpleNamespace:
    """Return the part of an HTTP response that botocore reads."""
    return SimpleNamespace(status_code=status_code, headers={})


class _Answers:
    """Handler of botocore's event ``before-call``. It returns the response of each call.

    botocore sends this event after it has validated the call.

    Args:
        takes_request: Whether to record the request for a training job and raise `_Recorded`. If False, the request
            gets the answer AccessDenied, as any other call that needs an account.
    """

    def __init__(self, *, takes_request: bool = True) -> None:
        self._takes_request = takes_request
        """Whether to record the request for a training job. If False, the request gets the answer AccessDenied."""
        self.request: dict[str, Any] | None = None
        """The recorded request. None until the SDK has sent it."""
        self.objects: dict[str, bytes] = {}
        """Uploaded objects: S3 URI -> content."""
        self._parts: dict[str, dict[int, bytes]] = {}
        """Parts of uploads in progress, by S3 URI and number of the part."""
        self._num_bytes = 0
        """Bytes of all uploads so far."""

    def __call__(
        self, *, event_name: str, params: Mapping[str, Any], **_: object
    ) -> tuple[SimpleNamespace, dict[str, Any]]:
        """Return the HTTP response and the parsed response of a call."""
        # The name of the event is before-call.SERVICE.OPERATION.
        service, operation = event_name.split(".")[1:3]
        if (service, operation) == ("sagemaker", "CreateTrainingJob") and self._takes_request:
            self.request = json.loads(params["body"])
            raise _Recorded
        if (service, operation) == ("sts", "GetCallerIdentity"):
            return _response(200), {"Account": ACCOUNT, "Arn": f"arn:aws:iam::{ACCOUNT}:user/none", "UserId": "none"}
        if service == "s3":
            return _response(200), self._store(operation, params)
        error = {"Code": "AccessDenied", "Message": f"{operation} needs an account, but this session is offline"}
        return _response(403), {"Error": error}

    def _store(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Keep an uploaded object, and return what S3 would answer. The SDK uploads large objects in parts."""
        uri = _s3_uri(params)
        query = params.get("query_string") or {}
        if operation == "PutObject":
            self.objects[uri] = self._content(params["body"])
        elif operation == "UploadPart":
            self._parts.setdefault(uri, {})[int(query["partNumber"])] = self._content(params["body"])
        elif operation == "CompleteMultipartUpload":
            parts = self._parts.pop(uri)
            self.objects[uri] = b"".join(parts[number] for number in sorted(parts))
        # All operations get the same answer, so it has everything that the SDK reads from any of them.
        return {"Buckets": [], "ETag": '"none"', "UploadId": "none", "ResponseMetadata": {"HTTPStatusCode": 200}}

    def _content(self, body: Any) -> bytes:
        """Return the uploaded content, which is kept in memory.

        Raises:
            ConfigError: If all uploads together are larger than `MAX_CODE_BYTES`.
        """
        content = body if isinstance(body, bytes) else bytes(body.read())
        self._num_bytes += len(content)
        if self._num_bytes > MAX_CODE_BYTES:
            raise ConfigError(
                f"the SDK would upload more than {MAX_CODE_BYTES} bytes; expected a source_dir without data"
            )
        return content


def _s3_uri(params: Mapping[str, Any]) -> str:
    """Return the ``s3://bucket/key`` of a call. The bucket may be in the URL's path or in its host name."""
    # botocore notes the bucket of each call here, for a redirection to the region of the bucket.
    redirection = params.get("context", {}).get("s3_redirect", {})
    bucket = str(redirection.get("bucket") or "")
    path = unquote(urlsplit(params["url"]).path).lstrip("/")
    return f"s3://{bucket}/{path.removeprefix(f'{bucket}/')}"


def _with_s3_uris(value: Any, local_data: dict[str, Path]) -> Any:
    """Return a copy of inputs for the SDK, with an S3 URI in place of each local input.

    Args:
        value: A text, a path, an object of either SDK, or a list or dict of these.
        local_data: Receives each S3 URI and the local path that it replaces.
    """
    if isinstance(value, str | os.PathLike):
        return _s3_uri_for(os.fspath(value), local_data)
    if isinstance(value, list | tuple):
        return [_with_s3_uris(item, local_data) for item in value]
    if isinstance(value, dict):
        return {name: _with_s3_uris(item, local_data) for name, item in value.items()}
    # A TrainingInput of SDK 2 has the channel of the request as a dict.
    if isinstance(getattr(value, "config", None), dict):
        input_copy = copy.deepcopy(value)
        source = input_copy.config.get("DataSource", {}).get("S3DataSource", {})
        if isinstance(source.get("S3Uri"), str):
            source["S3Uri"] = _s3_uri_for(source["S3Uri"], local_data)
        return input_copy
    # InputData, Channel and S3DataSource of SDK 3 have the input in one of these attributes.
    for name in ("data_source", "s3_data_source", "s3_uri"):
        inner = getattr(value, name, None)
        if isinstance(inner, str) or hasattr(inner, "model_copy"):
            return value.model_copy(update={name: _with_s3_uris(inner, local_data)})
    return value


def _s3_uri_for(text: str, local_data: dict[str, Path]) -> str:
    """Return an S3 URI in place of a local path, and add both to ``local_data``. Other URIs stay as they are."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "file":
        return text
    path = Path(rest if separator else text).absolute()
    if not path.exists():
        raise ConfigError(f"the input {text!r} does not exist; give a local folder or an S3 URI")
    # The number makes the URIs of different inputs different.
    uri = f"s3://{_LOCAL_BUCKET}/{len(local_data)}/{path.name}"
    local_data[uri] = path
    return uri

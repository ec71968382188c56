"""The identity of an estimator's job. Canary jobs of another identity must not be used again."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from hetero.launch.job_token import STAGED_FOLDER, TOKEN_NAME
from hetero.sagemaker.recording import Recording

__all__ = ["digest_of_text", "identity_of"]

_ALGORITHM = ("TrainingImage", "AlgorithmName", "ContainerEntrypoint", "ContainerArguments")
_DRIVERS = "sm_drivers"
"""Channel with SDK 3's own scripts. Only `_COMMAND` depends on the user's job alone."""
_COMMAND = "sm_train.sh"


def identity_of(recording: Recording) -> dict[str, object]:
    """Return what determines the work of a job, apart from its inputs and its cluster.

    The result for the same job is the same in each process. The SDK puts the name of the job into some values. This
    name is left out, because it contains the time.
    """
    request = recording.request
    algorithm = request.algorithm

    def without_job_name(values: Mapping[str, str]) -> dict[str, str]:
        return {name: value.replace(request.name, "JOB") for name, value in sorted(values.items())}

    return {
        "hyperparameters": without_job_name(request.hyperparameters),
        "algorithm": {name: algorithm[name] for name in _ALGORITHM if name in algorithm},
        # A digest, because the environment may have secrets.
        "environment": digest_of_text(json.dumps(without_job_name(request.environment))),
        "content of the sources": _sources_digest(recording),
    }


def digest_of_text(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sources_digest(recording: Recording) -> str:
    """Return a digest of all files that the SDK would upload, except those that differ between two processes."""
    files = {
        name: hashlib.sha256(content).hexdigest()
        for uri, content in recording.objects.items()
        for name, content in _files(_name_of(recording, uri), content)
        if not _is_ignored(PurePosixPath(name))
    }
    return digest_of_text(json.dumps(files, sort_keys=True))


def _name_of(recording: Recording, uri: str) -> str:
    """Return a name for an uploaded object that does not contain the name of the job.

    It is the path below the channel, after the channel's name. An object of no channel has the last part of its URI.
    """
    for channel in recording.request.channels:
        if channel.uri and uri.startswith(f"{channel.uri}/"):
            return f"{channel.name}/{uri.removeprefix(f'{channel.uri}/')}"
    return uri.rpartition("/")[2]


def _files(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of an archive, or of the object if it is no archive.

    An archive also contains the times of its files, which differ each time that the SDK makes it.
    """
    if not name.endswith(".tar.gz"):
        yield name, content
        return
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield f"{name}/{member.name}", file.read()


def _is_ignored(path: PurePosixPath) -> bool:
    """Return whether a file differs between two processes that start the same job."""
    is_token = path.parts[-2:] == (STAGED_FOLDER, TOKEN_NAME)  # `prepare` makes a new one
    return is_token or "__pycache__" in path.parts or (path.parts[0] == _DRIVERS and path.name != _COMMAND)

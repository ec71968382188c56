"""Checks where the job's token and certificates come from, and whether they are usable. Never shows their content."""

from __future__ import annotations

import time
from pathlib import Path

from hetero.doctor.snapshot import Snapshot
from hetero.documents.diagnosis import Diagnosis, error, ok, warning
from hetero.errors import AuthenticationError, ConfigError
from hetero.wire.tls import Tls

__all__ = ["examine"]

_UNREAD_NAME = "hetero_token"
"""Name of a variable or hyperparameter. Some users put a token there, but hetero reads a token only from a file."""


def examine(snapshot: Snapshot) -> list[Diagnosis]:
    """Read the token file and the certificate as a launcher would."""
    return [*_token(snapshot), *_misplaced(snapshot), *_certificate(snapshot)]


def _token(snapshot: Snapshot) -> list[Diagnosis]:
    """Return whether the job has a token, and whether its file is safe."""
    # Imported only here, because these modules import gRPC, which may be broken.
    from hetero.control.security import TOKEN_FILE_VARIABLE, token_from_environment
    from hetero.launch.job_token import staged_token

    path = snapshot.environ.get(TOKEN_FILE_VARIABLE)
    try:
        token = token_from_environment(snapshot.environ)
    except AuthenticationError as problem:
        return [error(str(problem), f"create the file again with mode 0600, or correct {TOKEN_FILE_VARIABLE}")]
    if token is not None:
        return [ok(f"a token is in {path}, which only this user can read")]
    # The job's code may be in either folder, and a token beside it.
    for folder in (Path.cwd(), snapshot.platform.folders.code):
        try:
            if staged_token(folder) is not None:
                return [ok(f"a token came with the code in {folder}")]
        except AuthenticationError as problem:
            return [error(str(problem), "prepare the estimator again")]
    to_do = f"put a shared secret into a file of mode 0600 on every host, and set {TOKEN_FILE_VARIABLE} to its path"
    found = f"{TOKEN_FILE_VARIABLE} is not set, so a job accepts every process that reaches its ports"
    if snapshot.options.require_token:
        return [error(f"{found}, and --require-token demands one (HET-22)", to_do)]
    # Outside of a cluster, no job is open to other processes.
    return [warning(found, to_do) if snapshot.hosts else ok(found)]


def _misplaced(snapshot: Snapshot) -> list[Diagnosis]:
    """Return an error for each place with a token where hetero does not read one, such as a hyperparameter."""
    places = [f"the variable {name}" for name in snapshot.environ if name.lower() == _UNREAD_NAME]
    try:
        parameters = snapshot.platform.parameters()
    # `hetero launch` reports hyperparameters that cannot be read.
    except ConfigError:
        parameters = None
    if parameters is not None and _UNREAD_NAME in parameters.values:
        places.append(f"the hyperparameter {_UNREAD_NAME}")
    to_do = "remove it and put a new token into a file, because consoles, logs and processes of this user show this one"
    return [error(f"there seems to be a token in {place}, which hetero does not read", to_do) for place in places]


def _certificate(snapshot: Snapshot) -> list[Diagnosis]:
    """Return whether this host has a valid certificate, and how long it is valid."""
    folder, host = snapshot.options.tls_dir, snapshot.own_host
    if folder is None:
        return []
    if host is None:
        return [warning(f"it is not known which certificate in {folder} belongs to this host", "give --host NAME")]
    try:
        remaining_s = Tls(Path(folder), host).expires_epoch_s - time.time()
    except AuthenticationError as problem:
        return [error(str(problem), "make certificates with hetero certs and copy those of this host here")]
    return [ok(f"the certificate of {host} in {folder} ends in {remaining_s / 3600:.1f} h")]

"""The job's token and certificates: where they come from and whether they are usable. Their content is never shown."""

from __future__ import annotations

import json
import time
from pathlib import Path

from hetero.doctor.finding import Finding, error, ok, warning
from hetero.doctor.surroundings import Surroundings
from hetero.errors import AuthenticationError
from hetero.wire.tls import Tls

__all__ = ["examine"]

_SHORT_S = 86_400.0
_ELSEWHERE = "hetero_token"


def examine(surroundings: Surroundings) -> list[Finding]:
    """Read the token file and the certificate as a launcher would."""
    return [*_token(surroundings), *_elsewhere(surroundings), *_certificate(surroundings)]


def _token(surroundings: Surroundings) -> list[Finding]:
    # Imported only here, because it imports gRPC, which may be broken.
    from hetero.control.security import TOKEN_FILE_VARIABLE, token_from_environment
    from hetero.launch.staged import staged_token

    path = surroundings.environ.get(TOKEN_FILE_VARIABLE)
    try:
        token = token_from_environment(surroundings.environ)
    except AuthenticationError as problem:
        return [error(str(problem), f"make the file anew, mode 0600, or correct {TOKEN_FILE_VARIABLE}")]
    if token is not None:
        return [ok(f"a token is in {path}, which only this user can read")]
    for folder in (Path.cwd(), surroundings.base_dir / "code"):  # folders that may hold the job's code
        try:
            if staged_token(folder) is not None:
                return [ok(f"a token came with the code in {folder}")]
        except AuthenticationError as problem:
            return [error(str(problem), "prepare the estimator again")]
    to_do = f"put a shared secret into a file of mode 0600 on every host, and its path into {TOKEN_FILE_VARIABLE}"
    found = f"{TOKEN_FILE_VARIABLE} is not set: a job is open to whoever reaches its ports"
    if surroundings.options.require_token:
        return [error(f"{found}, and --require-token demands one (HET-22)", to_do)]
    return [warning(found, to_do) if surroundings.hosts else ok(found)]


def _elsewhere(surroundings: Surroundings) -> list[Finding]:
    places = [f"the variable {name}" for name in surroundings.environ if name.lower() == _ELSEWHERE]
    path = surroundings.base_dir / "input/config/hyperparameters.json"
    try:
        names = json.loads(path.read_bytes())
    except (OSError, ValueError):
        names = {}
    if isinstance(names, dict) and _ELSEWHERE in names:
        places.append(f"the hyperparameter {_ELSEWHERE}")
    to_do = "remove it and make a new one: consoles, logs and the processes of this user show it; a file is the source"
    return [error(f"there seems to be a token in {place}, which hetero does not read", to_do) for place in places]


def _certificate(surroundings: Surroundings) -> list[Finding]:
    folder, host = surroundings.options.tls_dir, surroundings.own_host
    if folder is None:
        return []
    if host is None:
        return [warning(f"which certificate of {folder} is this host's is not known", "say --host NAME")]
    try:
        remaining_s = Tls(Path(folder), host).expires_epoch_s - time.time()
    except AuthenticationError as problem:
        return [error(str(problem), "make certificates with hetero certs and copy this host's here")]
    found = f"the certificate of {host} in {folder} ends in {remaining_s / 3600:.1f} h"
    if remaining_s < _SHORT_S:
        return [warning(found, "make certificates with hetero certs: connections that are made later fail")]
    return [ok(found)]

"""What `hetero.sagemaker.prepare` puts beside a job's code for the launcher.

The token arrives as a file of the code, which on its way through S3 may lose its owner and its mode: by the rules for
token files it would be refused. Whoever may read a host's copy of the code is the job itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from hetero.control.security import TOKEN_FILE_VARIABLE, Token, token_from_environment
from hetero.errors import AuthenticationError

__all__ = ["LAUNCHER_NAME", "STAGED_FOLDER", "TOKEN_NAME", "job_token", "staged_token"]

logger = logging.getLogger(__name__)

# No names that Python could import: setuptools, which the toolkit has install code with a setup.py, takes what has one
# for the user's, and refuses to guess where it finds two packages or two modules.
LAUNCHER_NAME = "hetero-launcher.py"
"""The launcher's file at the top of the code; the user's own ``launcher.py`` may lie beside it."""
STAGED_FOLDER = "hetero-job"
"""The folder at the top of the code that has all else."""
TOKEN_NAME = "token"

_MAX_BYTES = 1024


def job_token(environ: Mapping[str, str], code_dir: Path, *, is_required: bool) -> Token | None:
    """Return the job's token: of the file that the environment names, or else the one that came with the code.

    Raises:
        AuthenticationError: If it cannot be read or used, or there is none and it is required.
    """
    token = token_from_environment(environ) or staged_token(code_dir)
    if token is None:
        hint = f"set {TOKEN_FILE_VARIABLE} to the path of a file with mode 0600"
        if is_required:
            raise AuthenticationError(f"--require-token is given but the job has no token; {hint}")
        logger.warning("the job has no token: whoever reaches its ports can use them; %s", hint)
    return token


def staged_token(code_dir: Path) -> Token | None:
    """Return the token that came with the code; None if none did.

    Raises:
        AuthenticationError: If what came cannot be read or is none.
    """
    path = code_dir / STAGED_FOLDER / TOKEN_NAME
    try:
        with path.open("rb") as file:
            return Token(file.read(_MAX_BYTES).decode("ascii").strip())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise AuthenticationError(f"cannot read the token {path} that came with the code: {error.strerror}") from error
    except (UnicodeDecodeError, AuthenticationError):
        raise AuthenticationError(
            f"{path}, which came with the code, holds no token; expected what hetero.sagemaker.prepare puts there\n"
            "  to do: prepare the estimator again, and leave that file alone"
        ) from None

"""Reads the files that `hetero.sagemaker.prepare` adds to a job's code for the launcher.

The token arrives as one of these files. On its way through S3 a file may lose its owner and mode, so the checks of
token files would reject it. These checks are skipped, because only the job itself can read a host's copy of the code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from hetero.control.security import TOKEN_FILE_VARIABLE, Token, token_from_environment
from hetero.errors import AuthenticationError

__all__ = ["LAUNCHER_NAME", "STAGED_FOLDER", "TOKEN_NAME", "job_token", "staged_token"]

logger = logging.getLogger(__name__)

# Python cannot import these names. If it could, setuptools would take them for packages and modules of the user's. The
# toolkit installs code that has a setup.py with setuptools, which fails if it finds two packages or two modules.
LAUNCHER_NAME = "hetero-launcher.py"
"""Name of the launcher's file at the top of the code. The user may have another ``launcher.py`` beside it."""
STAGED_FOLDER = "hetero-job"
"""Name of the folder at the top of the code for all other files."""
TOKEN_NAME = "token"

_MAX_BYTES = 1024


def job_token(environ: Mapping[str, str], code_dir: Path, *, is_required: bool) -> Token | None:
    """Return the job's token from the file that the environment names, or else from the job's code.

    Raises:
        AuthenticationError: If the token cannot be read or used, or if it is required and missing.
    """
    token = token_from_environment(environ) or staged_token(code_dir)
    if token is None:
        hint = f"set {TOKEN_FILE_VARIABLE} to the path of a file with mode 0600"
        if is_required:
            raise AuthenticationError(f"--require-token is given but the job has no token; {hint}")
        logger.warning("the job has no token: whoever reaches its ports can use them; %s", hint)
    return token


def staged_token(code_dir: Path) -> Token | None:
    """Return the token in the job's code, None if its file is missing.

    Raises:
        AuthenticationError: If the file cannot be read or does not hold a token.
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

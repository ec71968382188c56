"""Reads the files that `hetero.sagemaker.prepare` adds to a job's code for the launcher.

One of these files contains the token. A file may lose its owner and mode in S3, and the usual checks of token files
would then reject it. These checks are skipped, because only the job itself can read a host's copy of the code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from hetero.cluster.document import MAX_FILE_BYTES
from hetero.control.security import TOKEN_FILE_VARIABLE, Token, token_from_environment
from hetero.errors import AuthenticationError

__all__ = ["LAUNCHER_NAME", "STAGED_FOLDER", "TOKEN_NAME", "job_token", "staged_token"]

logger = logging.getLogger(__name__)

# Python cannot import these names. Otherwise setuptools would treat them as the user's packages and modules. If the
# code has a setup.py, the toolkit installs it with setuptools, which fails if it finds two packages or two modules.
LAUNCHER_NAME = "hetero-launcher.py"
"""Name of the launcher's file at the top of the code. The user may have a ``launcher.py`` in the same folder."""
STAGED_FOLDER = "hetero-job"
"""Name of the folder at the top of the code for all other files."""
TOKEN_NAME = "token"


def job_token(environ: Mapping[str, str], code_dir: Path, *, is_required: bool) -> Token | None:
    """Return the job's token from the file that the environment names, or else from the job's code.

    Raises:
        AuthenticationError: If the token is unreadable or invalid, or if it is required and missing.
    """
    token = token_from_environment(environ) or staged_token(code_dir)
    if token is None:
        hint = f"Set {TOKEN_FILE_VARIABLE} to the path of a file with mode 0600."
        if is_required:
            raise AuthenticationError(f"--require-token is given, but the job's token is missing\n  {hint}")
        logger.warning("the job has no token, so any process that reaches its ports can use them. %s", hint)
    return token


def staged_token(code_dir: Path) -> Token | None:
    """Return the token in the job's code, or None if its file is missing.

    Raises:
        AuthenticationError: If the file cannot be read or does not contain a token.
    """
    path = code_dir / STAGED_FOLDER / TOKEN_NAME
    try:
        with path.open("rb") as file:
            return Token(file.read(MAX_FILE_BYTES).decode("ascii").strip())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise AuthenticationError(f"cannot read the token {path} of the job's code: {error.strerror}") from error
    except (UnicodeDecodeError, AuthenticationError):
        raise AuthenticationError(
            f"{path} holds no token; expected the one that hetero.sagemaker.prepare writes\n"
            "  to do: prepare the estimator again, and do not change that file"
        ) from None

"""The user's script on a data host: imported once, under a name that is not ``__main__``."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from hetero.batches.structure import set_script_module
from hetero.datasets import registered
from hetero.errors import ChildFailedError, ChildFailure, ConfigError

__all__ = ["SCRIPT_MODULE", "load_script"]

SCRIPT_MODULE = "__hetero_script__"
"""Name of the script's module on endpoints: its ``if __name__ == "__main__"`` block must not run there."""

_MAX_TRACEBACK_LINES = 40
_ADVICE = (
    "Data hosts only import the script, to learn its data sets: what trains, or reads the command line, belongs "
    'behind if __name__ == "__main__".'
)


def load_script(path: str, arguments: Sequence[str], *, host: str) -> None:
    """Import the user's script so that its data sets are registered.

    The script sees its own directory first in ``sys.path`` and its command line in ``sys.argv``, as if it were run.

    Args:
        path: The script.
        arguments: Its command line after the name.
        host: Named in errors.

    Raises:
        ConfigError: It does not exist, registers no data set, or registers one wrongly.
        ChildFailedError: It raises anything else, with the end of the traceback.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"the script {path!r} does not exist on {host}")
    sys.argv = [path, *arguments]
    sys.path[0] = str(file.resolve().parent)
    loader = SourceFileLoader(SCRIPT_MODULE, path)
    spec = importlib.util.spec_from_loader(SCRIPT_MODULE, loader, origin=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path
    sys.modules[SCRIPT_MODULE] = module
    set_script_module(SCRIPT_MODULE)
    try:
        loader.exec_module(module)  # allowed: the user's own script
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        failure = ChildFailure(
            name=f"the script {path!r}",
            exit_status=1,
            explanation=f"raised while {host} imported it: {text}\n  {_ADVICE}",
            last_lines=_user_lines(error, path),
        )
        if isinstance(error, ConfigError):
            raise ConfigError(str(failure)) from error
        raise ChildFailedError(failure) from error
    if not registered():
        hint = (
            "\n  If it calls hetero.tf.distribute: launch with --data-service tf." if "hetero.tf" in sys.modules else ""
        )
        raise ConfigError(
            f"the script {path!r} registers no data set; data hosts can serve only what a function with "
            f"@hetero.dataset at the top level of the script builds{hint}"
        )


def _user_lines(error: BaseException, path: str) -> tuple[str, ...]:
    """Return the end of the traceback, from the script's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    return tuple(text.rstrip().splitlines()[-_MAX_TRACEBACK_LINES:])

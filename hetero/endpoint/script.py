"""Imports the user's script on a data host, once, and under a name that is not ``__main__``."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from hetero.batches.structure.conversion import set_script_module
from hetero.datasets import registered
from hetero.errors import ChildFailedError, ChildFailure, ConfigError
from hetero.system.memory import no_garbage_collection
from hetero.system.scripts import SCRIPT_MODULE, find_script

__all__ = ["join_package", "load_script"]


_MAX_TRACEBACK_LINES = 40
_ADVICE = (
    "Data hosts only import the script, to register its data sets. Put code that trains or reads the command line "
    'under if __name__ == "__main__".'
)
_ADVICE_IMPORTS = "Data hosts import the script too. Install the same packages there, and copy the same files."


def load_script(script: str, arguments: Sequence[str], *, host: str, is_module: bool = False) -> None:
    """Import the user's script, which registers its data sets.

    ``sys.argv`` and ``sys.path`` are set as for a script that is run: ``sys.path`` begins with the script's folder, or
    with the current folder for a module. A module also gets its package, so relative imports work.

    Args:
        script: Path of the script, or the name of a module.
        arguments: The script's command line after its name.
        host: This host's name, for errors.
        is_module: Whether ``script`` is the name of a module.

    Raises:
        ConfigError: The script does not exist, registers no data set, or registers one wrongly.
        ChildFailedError: The script raises anything else. The error has the end of the traceback.
    """
    # Set up the process as if the script were run.
    path = str(find_script(script, is_module=is_module, host=host))
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path.cwd() if is_module else Path(path).resolve().parent)
    loader = SourceFileLoader(SCRIPT_MODULE, path)
    spec = importlib.util.spec_from_loader(SCRIPT_MODULE, loader, origin=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path
    sys.modules[SCRIPT_MODULE] = module
    set_script_module(SCRIPT_MODULE)
    try:
        # An import without garbage collection takes a tenth less time.
        with no_garbage_collection():
            if is_module:
                join_package(module, script)
            loader.exec_module(module)  # allowed: the user's own script
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        failure = ChildFailure(
            name=f"the script {script!r}",
            exit_status=1,
            explanation=f"raised while {host} imported it: {text}{_advice(error)}",
            last_lines=_user_lines(error, path),
        )
        # A `ConfigError` of the script stays a `ConfigError`, which has its own exit code.
        if isinstance(error, ConfigError):
            raise ConfigError(str(failure)) from error
        raise ChildFailedError(failure) from error
    if not registered():
        hint = (
            "\n  If it calls hetero.tf.distribute: launch with --data-service tf." if "hetero.tf" in sys.modules else ""
        )
        raise ConfigError(
            f"the script {script!r} registers no data set. Data hosts serve only data sets that a function with "
            f"@hetero.dataset at the top level of the script builds{hint}"
        )


def _advice(error: BaseException) -> str:
    """Return advice on a separate line, or an empty text if the error itself says what is wrong."""
    # For these errors, the advice about ``__main__`` would mislead.
    if isinstance(error, (SyntaxError, ConfigError)):
        return ""
    return f"\n  {_ADVICE_IMPORTS if isinstance(error, ImportError) else _ADVICE}"


def join_package(module: ModuleType, name: str) -> None:
    """Import the packages that contain a module, and make the module part of them, as ``python -m`` does."""
    spec = importlib.util.find_spec(name)
    # A package is run as its ``__main__``.
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec is not None, name
    module.__spec__, module.__package__ = spec, spec.parent


def _user_lines(error: BaseException, path: str) -> tuple[str, ...]:
    """Return the last lines of the traceback. The frames before the script's first frame are left out."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    return tuple(text.rstrip().splitlines()[-_MAX_TRACEBACK_LINES:])

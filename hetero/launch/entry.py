"""The launcher as the entry point of a training job. It turns the platform's input into a `hetero launch` command.

A platform such as SageMaker starts the same file on every host, in one of these ways:

- Its training toolkit (SDK 2) runs ``python launcher.py --epochs 3 --hetero_script train.py`` in the folder of the
  user's code. Under mpirun it runs ``python -m mpi4py launcher.py ...``, and per group ``torchrun launcher.py ...``.
- Its drivers (SDK 3) run the same commands. There the folder of the user's code is an input channel.
- The container starts the file with the argument ``train`` or without arguments, in any folder of the image.

If the job has hyperparameters, the launcher reads their file and ignores these command lines, because shells may have
split texts with blanks and quotes into several words. A launcher that is started by hand reads its command line.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.cluster import base_dir
from hetero.control.status import Cause
from hetero.errors import ExitCode
from hetero.launch.failure import write_failure

__all__ = ["command", "platform_arguments", "run"]

_SCRIPT = "hetero_script"
_OF_THE_TOOLKIT = ("sagemaker_", "default_user_module_name", "_tuning_objective_metric")
"""Prefixes of hyperparameters that the toolkit does not pass to the entry point."""


def run(main: Callable[[Sequence[str]], int], arguments: Sequence[str], *, folder: Path) -> int:
    """Run this host's part of the job and return its exit code.

    Args:
        main: `hetero.cli.main`.
        arguments: Arguments of this process.
        folder: Folder of the entry point. It becomes the current folder if the script lies there and not in the current
            folder. The hyperparameters or the environment name the script.
    """
    base = base_dir(os.environ)
    parameters = read_hyperparameters(base) or {}
    script = _named(parameters, "script")
    if script and not _is_in(Path.cwd(), script, parameters) and _is_in(folder, script, parameters):
        os.chdir(folder)
    status = main(command(arguments, os.environ))
    failure = base / "output" / "failure"
    if status == ExitCode.USAGE and base.is_dir() and not failure.exists():  # the options could not be parsed
        summary = f"hetero cannot read the arguments of {' '.join(arguments)!r:.200}; its log says why"
        write_failure(failure, Cause(host=socket.gethostname(), summary=summary, exit_code=ExitCode.USAGE))
    return status


def _named(parameters: Mapping[str, Any], option: str) -> str:
    """Return the value of an option from the hyperparameters, or else from the environment. Empty if neither has it."""
    return _plain(_decoded(parameters.get(f"hetero_{option}", os.environ.get(f"HETERO_{option.upper()}", ""))))


def _is_in(folder: Path, script: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether a folder has the script, which is a file or, with the ``module`` option, a module."""
    if _named(parameters, "module").lower() not in ("true", "yes", "on", "1"):
        return (folder / script).is_file()
    path = folder.joinpath(*script.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def command(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of `hetero` for this host."""
    base = base_dir(environ)
    parameters = read_hyperparameters(base)
    if parameters is None:
        return ["launch", *arguments]
    given = [argument.partition("=")[0].lstrip("-") for argument in arguments if argument.startswith("-")]
    is_a_platforms = list(arguments) == ["train"] or (bool(given) and given[0] in parameters)
    if _SCRIPT in parameters or environ.get("HETERO_SCRIPT") or is_a_platforms:
        return ["launch", "--", *script_arguments(parameters)]
    return ["launch", *arguments]


def read_hyperparameters(base: Path) -> dict[str, Any] | None:
    """Return the job's hyperparameters, or None if their file cannot be read.

    For a damaged file, return only an empty script name. `hetero.config.resolve_options` then reports the damage.
    """
    try:
        content = json.loads((base / "input/config/hyperparameters.json").read_bytes())
    except OSError:
        return None
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {_SCRIPT: ""}


def script_arguments(parameters: Mapping[str, Any]) -> list[str]:
    """Return the arguments that the platform would give the training script, without hetero's own options."""
    return platform_arguments({name: text for name, text in parameters.items() if not name.startswith("hetero_")})


def platform_arguments(parameters: Mapping[str, Any]) -> list[str]:
    """Return the arguments that the platform gives an entry point.

    The toolkit of SDK 2 sorts the arguments, writes values as Python does, and puts one dash before a name of one
    letter. The drivers of SDK 3 write values as JSON. Both remove the JSON quotes around texts.
    """
    is_toolkit = any(name.startswith("sagemaker_") for name in parameters)
    arguments: list[str] = []
    for name in sorted(parameters) if is_toolkit else parameters:
        if name.startswith(_OF_THE_TOOLKIT):
            continue
        value = _decoded(parameters[name])
        dashes = "-" if is_toolkit and len(name) == 1 else "--"
        arguments += [f"{dashes}{name}", _as_toolkit(value) if is_toolkit else _plain(value)]
    return arguments


def _decoded(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _as_toolkit(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={item}" for name, item in sorted(value.items()))
    return "" if value is None else str(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

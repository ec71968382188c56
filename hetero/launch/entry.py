"""The launcher as the entry point of a training job. It turns the platform's input into a `hetero launch` command.

A platform such as SageMaker starts the same file on every host, in one of these ways:

- Its training toolkit (SDK 2) runs ``python launcher.py --epochs 3 --hetero_script train.py`` in the folder of the
  user's code. Under mpirun it runs ``python -m mpi4py launcher.py ...``, with torchrun ``torchrun launcher.py ...``.
- Its drivers (SDK 3) run the same commands. The folder of the user's code is then an input channel.
- The container starts the file with the argument ``train`` or without arguments, in any folder of the image.

If the platform provides a file with the job's parameters, the launcher reads this file and ignores the command line,
because a shell may have split values with blanks or quotes. A launcher that is started by hand reads its command line.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hetero.cluster import JobParameters, Platform, find_platform
from hetero.control.status import Cause
from hetero.errors import ConfigError, ExitCode
from hetero.launch.failure import write_failure

__all__ = ["command", "run"]

_SCRIPT = "hetero_script"


def run(main: Callable[[Sequence[str]], int], arguments: Sequence[str], *, folder: Path) -> int:
    """Run this host's part of the job and return its exit code.

    Args:
        main: `hetero.cli.main`.
        arguments: Arguments of this process.
        folder: Folder of the entry point. It becomes the current folder if it contains the script and the current
            folder does not. The job's parameters or the environment name the script.
    """
    platform = find_platform(os.environ)
    parameters = _parameters(platform)
    values = {} if parameters is None else parameters.values
    script = _option(values, "script")
    is_beside_this_file = bool(script) and _contains_script(folder, script, values)
    if is_beside_this_file and not _contains_script(Path.cwd(), script, values):
        # A container may start this file in any folder of the image. SageMaker's SDK 3 keeps the code in the folder of
        # an input channel, which need not be the current folder.
        os.chdir(folder)
    status = main(command(arguments, platform))
    folders = platform.folders
    # After other failures the launcher has written the failure file. Invalid options end the command before a launcher
    # exists.
    if status == ExitCode.USAGE and folders.root.is_dir() and not folders.failure.exists():
        summary = f"hetero cannot read the arguments {' '.join(arguments)!r:.200}; see the log for the reason"
        write_failure(folders.failure, Cause(host=socket.gethostname(), summary=summary, exit_code=ExitCode.USAGE))
    return status


def command(arguments: Sequence[str], platform: Platform) -> list[str]:
    """Return the arguments of `hetero` for this host.

    If the platform has a file with the job's parameters, and the platform started this process, the script's arguments
    come from the file. `hetero launch` finds the script and its own options in the file or the environment.
    """
    parameters = _parameters(platform)
    # Without such a file, the script's arguments are in `arguments`.
    if parameters is not None and parameters.script_arguments is not None:
        # The platform has started this process if the parameters or the environment name the script.
        has_script = _SCRIPT in parameters.values or bool(platform.environ.get("HETERO_SCRIPT"))
        # Otherwise the arguments show it. SageMaker starts a container with the argument "train", or passes the job's
        # parameters as flags. If the first flag is not a parameter, a person has typed the command.
        flags = [argument.partition("=")[0].lstrip("-") for argument in arguments if argument.startswith("-")]
        is_from_platform = list(arguments) == ["train"] or (bool(flags) and flags[0] in parameters.values)
        if has_script or is_from_platform:
            return ["launch", "--", *parameters.script_arguments]
    return ["launch", *arguments]


def _parameters(platform: Platform) -> JobParameters | None:
    """Return the job's parameters. If they are unreadable, return an empty script name, so `launch` reports why."""
    try:
        return platform.parameters()
    except ConfigError:
        return JobParameters(values={_SCRIPT: ""}, source="", script_arguments=())


def _option(parameters: Mapping[str, object], option: str) -> str:
    """Return the value of an option from the parameters, or else from the environment. Empty if neither has it."""
    return str(parameters.get(f"hetero_{option}", os.environ.get(f"HETERO_{option.upper()}", "")))


def _contains_script(folder: Path, script: str, parameters: Mapping[str, object]) -> bool:
    """Return whether a folder contains the script: a file or, with the ``module`` option, a module."""
    if _option(parameters, "module").lower() not in ("true", "yes", "on", "1"):
        return (folder / script).is_file()
    path = folder.joinpath(*script.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()

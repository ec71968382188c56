"""The program that runs in the container of each host of a rehearsal.

The platform starts one program per container. With SDK 2 and a framework's image, the program is the training toolkit,
which runs the user's entry point. With SDK 3, it is a shell script of the SDK. A request may also name another program.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.cluster.platforms.sagemaker import (
    BASE_DIR,
    BASE_DIR_VARIABLE,
    CHANNELS,
    JOB_NAME_VARIABLE,
    entry_arguments,
    script_variables,
)
from hetero.errors import ConfigError
from hetero.launch.job_token import LAUNCHER_NAME
from hetero.sagemaker.preparation.ignore_file import copy_code, ignored_files
from hetero.sagemaker.preparation.staging import LAUNCHER_FILE
from hetero.sagemaker.request import TrainingRequest
from hetero.simulate.launchers import HostCommand, SimulatedHost
from hetero.system.scripts import python_path

__all__ = ["THROUGH", "Container"]

THROUGH = ("plain", "toolkit")
_PLATFORM_DIR = re.compile(rf"(?<![\w.-]){BASE_DIR}(?![\w.-])")
"""Matches the platform's tree ``/opt/ml``, but not ``/opt/mlflow`` or a part of another path or URI."""
_CODE, _DRIVERS = "code", "sm_drivers"
"""Channels of SDK 3: the user's code, and the SDK's own scripts, which run this code."""
_DISTRIBUTIONS = ("mpi", "torch_distributed", "smdistributed", "distributed_dataparallel", "pytorch_ddp")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")
_NO_CODE = shutil.ignore_patterns(".git", "__pycache__")
"""Selects files that no job needs, which are not copied."""
_NO_INSTALLATION = 'print("a rehearsal does not install requirements, and uses your environment")\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The container that every host of a job runs."""

    request: TrainingRequest
    through: str
    """How to start the user's entry point: through the training ``toolkit``, or ``plain``, which means directly."""
    entry: tuple[str, ...]
    """The program that the request names for the container, with its arguments.

    If empty, the container runs the toolkit or the user's entry point.
    """
    script: str
    """The user's entry point, relative to the folder of the user's code."""
    source_dir: Path | None
    """Folder of the user's code. None if a channel contains the code."""
    left_out: Path
    """A folder that is not copied with the user's code."""

    @classmethod
    def of(cls, request: TrainingRequest, *, source_dir: Path | None, through: str, output_dir: Path) -> Container:
        """Return the container for a request.

        Args:
            request: The request.
            source_dir: Folder of the user's code. None if a channel contains the code.
            through: ``toolkit`` or ``plain``.
            output_dir: The rehearsal's output folder. It is not copied if it is inside the user's code.

        Raises:
            ConfigError: If the request names neither a program nor an entry point, if one of them or the code is not on
                this machine, if a shell would misread the path that replaces ``/opt/ml``, or if the toolkit would start
                the ranks of a distribution.
        """
        algorithm = request.algorithm
        program = (*(algorithm.get("ContainerEntrypoint") or ()), *(algorithm.get("ContainerArguments") or ()))
        entry_point = str(request.parameter("sagemaker_program") or "")
        # The user's code, and the program or the entry point, must be on this machine.
        if source_dir is not None and not source_dir.is_dir():
            raise ConfigError(f"the source directory {source_dir} does not exist; expected a folder")
        if not program:
            _check_entry_point(request, entry_point, source_dir)
        # A program below /opt/ml comes with the code or a channel.
        elif not _PLATFORM_DIR.search(program[0]) and shutil.which(_program(program[0])) is None:
            raise ConfigError(
                f"the container's program {program[0]!r:.200} is not on this machine; a rehearsal cannot run "
                "programs that only the image has"
            )
        # Check that the paths of the output folder can replace /opt/ml. `_moved` raises if not.
        for text in (*program, *request.environment.values()):
            _moved(text, output_dir.resolve())
        # The toolkit would start the ranks of a distribution over the network.
        enabled = [each for each in _DISTRIBUTIONS if request.parameter(f"sagemaker_{each}_enabled") in (True, "true")]
        if enabled and through == "toolkit" and not program:
            raise ConfigError(
                f"the request has the distribution {enabled[0]}: the toolkit would start ranks over the network\n"
                "  Leave distribution out of the estimator, because hetero starts the ranks, or rehearse through plain."
            )
        return cls(
            request=request,
            through=through,
            entry=program,
            # A request with a program may name no entry point. The launch options need one, and the program decides
            # whether it is used.
            script=entry_point or "launcher.py",
            source_dir=source_dir,
            left_out=output_dir.resolve(),
        )

    def set_up(self, host: SimulatedHost, environment: Mapping[str, str], channels: Sequence[str]) -> HostCommand:
        """Copy the user's code into a host's tree, and return the command that the host runs.

        Args:
            host: The host. Its tree is complete except for the code.
            environment: Variables that the rehearsal sets on the host.
            channels: Names of the channels that the host gets.
        """
        base = host.base_dir.resolve()
        if self.source_dir is not None:
            # For a prepared job the caller may pass the original code. So leave out the files that `prepare` leaves
            # out, and add the launcher. Of the code of other jobs, leave out only files that no job needs.
            is_prepared = self.script == LAUNCHER_NAME
            ignored = ignored_files(self.source_dir) if is_prepared else _NO_CODE
            copy_code(self.source_dir, base / "code", left_out=self.left_out, ignored=[ignored])
            if is_prepared:
                shutil.copyfile(LAUNCHER_FILE, base / "code" / LAUNCHER_NAME)
        common = {
            **self._platform_environment(base),
            **environment,
            # SageMaker's images set this variable too.
            "PYTHONUNBUFFERED": "1",
            BASE_DIR_VARIABLE: str(base),
        }
        common["PYTHONPATH"] = python_path(common.get("PYTHONPATH", ""))
        # The kernel gives process 1 of a container only the signals that the process has a handler for. With
        # `is_process_1`, a simulated host does the same. A program that the request names is process 1.
        if self.entry:
            self._copy_channels(base)
            # In the program and its arguments, python and python3 mean the Python of this process.
            path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
            return HostCommand(
                arguments=_local_command(self.entry, base),
                environment={**common, "PATH": path},
                directory=base / "code",
                is_process_1=True,
            )
        # Otherwise run the entry point through the toolkit, which is process 1 too, or directly. A launcher that is
        # started directly handles SIGTERM, so `is_process_1` would change nothing.
        if self.through == "toolkit":
            image = str(self.request.algorithm.get("TrainingImage", ""))
            return HostCommand(
                arguments=[sys.executable, "-m", "hetero.sagemaker.rehearsal.toolkit", image],
                environment=common,
                directory=base,
                is_process_1=True,
            )
        interpreter = sys.executable if self.script.endswith(".py") else "/bin/sh"
        return HostCommand(
            arguments=[interpreter, self.script, *entry_arguments(self.request.hyperparameters)],
            environment={**common, **script_variables(base, host.name, channels)},
            directory=base / "code",
        )

    def _platform_environment(self, base: Path) -> dict[str, str]:
        """Return the variables that the platform and the request set. The request has priority."""
        request = self.request
        return {
            JOB_NAME_VARIABLE: request.name,
            "TRAINING_JOB_ARN": f"arn:aws:sagemaker:us-east-1:000000000000:training-job/{request.name}",
            "AWS_REGION": str(request.parameter("sagemaker_region") or "us-east-1"),
            **{name: _moved(value, base) for name, value in request.environment.items()},
        }

    def _copy_channels(self, base: Path) -> None:
        """Replace the links to SDK 3's code channels with copies.

        In the copied scripts of the SDK, ``/opt/ml`` is replaced with the path of the host's tree. The script that
        installs requirements is replaced too, because a rehearsal must not change the user's environment.
        """
        for name in (_CODE, _DRIVERS):
            channel = base / CHANNELS / name
            if channel.is_symlink():
                source = channel.resolve()
                channel.unlink()
                copy_code(source, channel, left_out=self.left_out, ignored=[_NO_CODE])
        drivers = base / CHANNELS / _DRIVERS
        if not drivers.is_dir():
            return
        for path in drivers.rglob("*"):
            if path.suffix in (".py", ".sh", ".json"):
                path.write_text(_moved(path.read_text(encoding="utf-8"), base), encoding="utf-8")
        installer = drivers / "scripts" / "install_requirements.py"
        if installer.exists():
            installer.write_text(_NO_INSTALLATION, encoding="utf-8")


def _check_entry_point(request: TrainingRequest, script: str, source_dir: Path | None) -> None:
    """Raise `ConfigError` if the entry point of a request without a ContainerEntrypoint is not on this machine."""
    if not script:
        raise ConfigError(
            "the request names no program; expected the hyperparameter sagemaker_program (the SDK's entry_point) "
            "or a ContainerEntrypoint, because a rehearsal cannot run the image's own program"
        )
    if source_dir is None:
        where = request.parameter("sagemaker_submit_directory") or "an unknown place"
        raise ConfigError(f"the user's code is at {where!s:.200}; give its folder on this machine: --source-dir DIR")
    # `Container.set_up` adds the launcher of a prepared job to the code.
    if script != LAUNCHER_NAME and not (source_dir / script).is_file():
        raise ConfigError(
            f"{source_dir} has no {script!r:.100}, the request's entry point; give the folder that has it"
        )


def _local_command(entry: Sequence[str], base: Path) -> list[str]:
    """Return the command that starts the container's program on this machine.

    Raises:
        ConfigError: If the program is in the host's tree but is not an executable file.
    """
    program, *arguments = (_moved(part, base) for part in (_program(entry[0]), *entry[1:]))
    # If the program was below /opt/ml, `_moved` has replaced this part of its path by the path of the host's tree.
    is_in_tree = program != entry[0] and program.startswith(str(base))
    if is_in_tree and not os.access(program, os.X_OK):
        raise ConfigError(
            f"the container's program {entry[0]!r:.200} is not an executable file; expected it with mode 0755 in "
            f"the code ({BASE_DIR}/code) or in a channel ({BASE_DIR}/{CHANNELS}/CHANNEL)"
        )
    return [program, *arguments]


def _program(name: str) -> str:
    """Return this process's interpreter if the program is Python, else the unchanged name."""
    return sys.executable if re.fullmatch(r"(/.*/)?python3?", name) else name


def _moved(text: str, base: Path) -> str:
    """Return the text with ``/opt/ml`` replaced by the path of a host's tree.

    Raises:
        ConfigError: If a shell would misread the path of the host's tree.
    """
    # The replacement is a function, because `subn` would interpret backslashes in a text.
    moved_text, num_replaced = _PLATFORM_DIR.subn(lambda _: str(base), text)
    if num_replaced and not _PLAIN_PATH.fullmatch(str(base)):
        raise ConfigError(
            f"a shell would misread the path {base}; choose an --output-dir with only letters, digits and ._+-"
        )
    return moved_text

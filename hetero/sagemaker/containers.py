"""The program that runs in the container of each host of a rehearsal.

The platform starts one program per container. With SDK 2 and a framework's image, the program is the training toolkit,
which runs the user's entry point. With SDK 3, it is a shell script of the SDK. A request may also name another program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError
from hetero.launch.entry import platform_arguments
from hetero.launch.staged import LAUNCHER_NAME
from hetero.sagemaker.request import TrainingRequest
from hetero.sagemaker.staging import LAUNCHER_FILE
from hetero.simulate.launchers import HostCommand, SimulatedHost
from hetero.simulate.opt_ml import has_trees, platform_environment

__all__ = ["THROUGH", "Container", "python_path"]

THROUGH = ("plain", "toolkit")
_PLATFORM_DIR = re.compile(r"(?<![\w.-])/opt/ml(?![\w.-])")
"""Matches the platform's tree, but neither ``/opt/mlflow`` nor a part of another path or URI."""
_CODE, _DRIVERS = "code", "sm_drivers"
"""Channels of SDK 3 for the user's code, and for the SDK's own scripts, which run that code."""
_DISTRIBUTIONS = ("mpi", "torch_distributed", "smdistributed", "distributed_dataparallel", "pytorch_ddp")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")
_NO_INSTALLATION = 'print("a rehearsal installs nothing: requirements are taken to be here")\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The container that every host of a request gets."""

    request: TrainingRequest
    through: str
    """``toolkit`` or ``plain``."""
    entry: tuple[str, ...]
    """The program that the request names for the container, with its arguments.

    If empty, the container runs the toolkit or the user's entry point.
    """
    script: str
    """The user's entry point, in the folder of the user's code."""
    source_dir: Path | None
    """The user's code, or None if a channel has it."""
    left_out: Path
    """A folder that is not copied with the user's code."""

    @classmethod
    def of(cls, request: TrainingRequest, *, source_dir: Path | None, through: str, output_dir: Path) -> Container:
        """Return the container that a request asks for.

        Args:
            request: The request.
            source_dir: The user's code, or None if a channel has it.
            through: ``toolkit`` or ``plain``.
            output_dir: The rehearsal's output folder. It is not copied if it lies within the user's code.

        Raises:
            ConfigError: If the request names no program, if its code or program is not on this machine, if a shell
                would misread the path that replaces ``/opt/ml``, or if the toolkit would start the ranks of a
                distribution.
        """
        algorithm = request.document.get("AlgorithmSpecification") or {}
        entry = (*(algorithm.get("ContainerEntrypoint") or ()), *(algorithm.get("ContainerArguments") or ()))
        script = _unquoted(request.hyperparameters.get("sagemaker_program", ""))
        # The program and the user's code must be on this machine.
        if source_dir is not None and not source_dir.is_dir():
            raise ConfigError(f"the source directory {source_dir} does not exist; expected a folder")
        if not entry and not script:
            raise ConfigError(
                "the request names no program: it has neither the hyperparameter sagemaker_program, which is the SDK's "
                "entry_point, nor a ContainerEntrypoint; what the image runs by itself cannot be rehearsed"
            )
        if not entry and source_dir is None:
            where = _unquoted(request.hyperparameters.get("sagemaker_submit_directory", "nowhere"))
            raise ConfigError(f"the user's code is {where:.200}; say where it is here: --source-dir DIR")
        is_here = script == LAUNCHER_NAME or source_dir is None or (source_dir / script).is_file()
        if not entry and not is_here:
            raise ConfigError(f"{source_dir} has no {script!r:.100}, which the request names as its entry point")
        if entry and not _PLATFORM_DIR.search(entry[0]) and shutil.which(_program(entry[0])) is None:
            raise ConfigError(
                f"the container's program {entry[0]!r:.200} is not on this machine; it is in the image only"
            )
        # Check that the paths of the output folder can replace /opt/ml.
        for text in (*entry, *request.environment.values()):
            _moved(text, output_dir.resolve())
        # The toolkit would start the ranks of a distribution over the network.
        enabled = [name for name in _DISTRIBUTIONS if _is_on(request, f"sagemaker_{name}_enabled")]
        if enabled and through == "toolkit" and not entry:
            raise ConfigError(
                f"the request has the distribution {enabled[0]}, for which the toolkit starts ranks over the network; "
                "hetero starts them itself: leave distribution out of the estimator, or rehearse through plain"
            )
        return cls(
            request=request,
            through=through,
            entry=entry,
            script=script or "launcher.py",
            source_dir=source_dir,
            left_out=output_dir.resolve(),
        )

    def set_up(self, host: SimulatedHost, environment: Mapping[str, str], channels: Sequence[str]) -> HostCommand:
        """Copy the user's code into a host's tree and return the command to start there.

        Args:
            host: The host. Its tree is complete except for the code.
            environment: Variables that the rehearsal sets on the host.
            channels: Names of the channels that the host gets.
        """
        base = host.base_dir.resolve()
        if self.source_dir is not None:
            _copy(self.source_dir, base / "code", left_out=self.left_out)
            if self.script == LAUNCHER_NAME:  # a prepared job may bring code from before `prepare`
                shutil.copyfile(LAUNCHER_FILE, base / "code" / LAUNCHER_NAME)
        common = {
            **self._platform_environment(base),
            **environment,
            "PYTHONUNBUFFERED": "1",  # as in the images
            "SAGEMAKER_BASE_DIR": str(base),
        }
        common["PYTHONPATH"] = python_path(common.get("PYTHONPATH"))
        # The request's own program runs in any case.
        if self.entry:
            self._copy_channels(base)
            path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
            return HostCommand(
                arguments=_here(self.entry, base),
                environment={**common, "PATH": path},
                directory=base / "code",
                is_process_1=True,
            )
        # Otherwise the toolkit runs the entry point, or it runs directly.
        if self.through == "toolkit":
            image = str((self.request.document.get("AlgorithmSpecification") or {}).get("TrainingImage", ""))
            return HostCommand(
                arguments=[sys.executable, "-m", "hetero.sagemaker.toolkit", image],
                environment=common,
                directory=base,
                is_process_1=True,
            )
        return HostCommand(
            arguments=[*_interpreter(self.script), *platform_arguments(self.request.hyperparameters)],
            environment={**common, **platform_environment(base, host.name, channels)},
            directory=base / "code",
        )

    def _platform_environment(self, base: Path) -> dict[str, str]:
        request = self.request
        found = {
            "TRAINING_JOB_NAME": request.name,
            "TRAINING_JOB_ARN": f"arn:aws:sagemaker:us-east-1:000000000000:training-job/{request.name}",
            "AWS_REGION": _unquoted(request.hyperparameters.get("sagemaker_region", "us-east-1")),
        }
        return {**found, **{name: _moved(value, base) for name, value in request.environment.items()}}

    def _copy_channels(self, base: Path) -> None:
        """Replace the links to SDK 3's code channels by copies.

        The copied scripts of the SDK get the paths of the host's tree, because they otherwise know only ``/opt/ml``.
        """
        for name in (_CODE, _DRIVERS):
            channel = base / "input" / "data" / name
            if channel.is_symlink():
                source = channel.resolve()
                channel.unlink()
                _copy(source, channel, left_out=self.left_out)
        drivers = base / "input" / "data" / _DRIVERS
        if not drivers.is_dir():
            return
        for path in drivers.rglob("*"):
            if path.suffix in (".py", ".sh", ".json"):
                path.write_text(_moved(path.read_text(encoding="utf-8"), base), encoding="utf-8")
        installer = drivers / "scripts" / "install_requirements.py"
        if installer.exists():
            installer.write_text(_NO_INSTALLATION, encoding="utf-8")


def _here(entry: Sequence[str], base: Path) -> list[str]:
    """Return the command that starts the container's program on this machine.

    Raises:
        ConfigError: If the program lies in the host's tree but is not an executable file.
    """
    program, *arguments = (_moved(part, base) for part in (_program(entry[0]), *entry[1:]))
    if program != entry[0] and program.startswith(str(base)) and not os.access(program, os.X_OK):
        raise ConfigError(
            f"the container's program {entry[0]!r:.200} is no file that may be executed; expected it in the code "
            "(/opt/ml/code) or in a channel (/opt/ml/input/data/CHANNEL), with mode 0755"
        )
    return [program, *arguments]


def _program(name: str) -> str:
    """Return this process's interpreter if the program is Python, or else the unchanged name."""
    return sys.executable if re.fullmatch(r"(/.*/)?python3?", name) else name


def _moved(text: str, base: Path) -> str:
    """Return the text with the platform's tree replaced by a host's.

    Raises:
        ConfigError: If a shell would misread the path of the host's tree.
    """
    found, number = _PLATFORM_DIR.subn(lambda _: str(base), text)
    if number and not _PLAIN_PATH.fullmatch(str(base)):
        raise ConfigError(f"a shell would misread the path {base}; choose an --output-dir of letters, digits and ._+-")
    return found


def _copy(source: Path, target: Path, *, left_out: Path) -> None:
    """Copy code without caches, repositories and the output of this or an earlier rehearsal."""

    def ignored(folder: str, names: Iterable[str]) -> set[str]:
        here = Path(folder).resolve()
        return {
            name
            for name in names
            if name in (".git", "__pycache__") or here / name == left_out or has_trees(here / name)
        }

    try:
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    except shutil.Error as error:  # lists (source, target, why) for each file
        path, _, why = error.args[0][0]
        raise ConfigError(
            f"cannot copy {path} with the code: {why}; make it a file that you may read, or take it away"
        ) from error


def python_path(stated: str | None) -> str:
    """Return the PYTHONPATH of a host.

    It has the folders that the job states, then those of this process, then hetero's source tree unless hetero is
    installed in ``site-packages``.
    """
    parts = [stated or "", os.environ.get("PYTHONPATH", "")]
    own = Path(__file__).resolve().parents[2]
    if own.name not in ("site-packages", "dist-packages"):
        parts.append(str(own))
    return os.pathsep.join(dict.fromkeys(part for text in parts for part in text.split(os.pathsep) if part))


def _interpreter(script: str) -> list[str]:
    return [sys.executable, script] if script.endswith(".py") else ["/bin/sh", script]


def _is_on(request: TrainingRequest, name: str) -> bool:
    return _unquoted(request.hyperparameters.get(name, "false")) == "true"


def _unquoted(value: str) -> str:
    """Undo the JSON quotes that SDK 2 puts around texts."""
    try:
        content = json.loads(value)
    except ValueError:
        return value
    return content if isinstance(content, str) else value

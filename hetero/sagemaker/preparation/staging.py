"""Change an estimator into one that starts a heterogeneous job: `prepare`.

`prepare` copies the user's code and adds these files::

    hetero-launcher.py                      the entry point, on every host
    hetero-job/hetero-VERSION-...whl        hetero itself, which pip installs without a registry
    hetero-job/token                        the job's secret, mode 0600
    requirements.txt                        a line for the wheel, then the user's lines

It then sets the estimator's code to this staged folder. `hetero.launch.job_token` reads the token in the container.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from hetero.config import check_hyperparameters
from hetero.errors import ConfigError
from hetero.launch.job_token import LAUNCHER_NAME, STAGED_FOLDER, TOKEN_NAME
from hetero.sagemaker.preparation.adapters import Adapter, Code, adapter_of
from hetero.sagemaker.preparation.ignore_file import IGNORE_FILE, copy_code, ignored_files
from hetero.sagemaker.preparation.metric_definitions import METRIC_DEFINITIONS
from hetero.sagemaker.preparation.wheel import build_wheel
from hetero.sagemaker.recording import MAX_CODE_BYTES
from hetero.system.workdir import private_folder

__all__ = ["LAUNCHER_FILE", "prepare"]

LAUNCHER_FILE = Path(__file__).with_name("launcher.txt")
"""The launcher: a link to launchers/launcher.py in the source tree, or a copy of this file if hetero is installed.

It is a text file, because modules of this package must not import higher layers, which the launcher imports.
"""
_LEAST_PYTHON = (3, 10)
_PYTHON_TAG = re.compile(r"(?:^|-)py(\d)(\d+)(?:-|$)")

_Estimator = TypeVar("_Estimator")


class _Origin(NamedTuple):
    """The user's code that a staged folder was made from. If the estimator is prepared again, this code is copied."""

    code: Code
    script: str


_origins: dict[str, _Origin] = {}
"""The user's code and script of each estimator that was prepared, by the path of the staged copy."""
# Removes all staged folders.
_folders = contextlib.ExitStack()
atexit.register(_folders.close)


def prepare(
    estimator: _Estimator,
    script: str | None = None,
    *,
    token: bool | Path = True,
    wheels: Path | str | None = None,
    **options: Any,
) -> _Estimator:
    """Make an estimator ready for ``fit()``, or a ``ModelTrainer`` for ``train()``, as a heterogeneous job.

    The function copies the code, and sets the estimator's source folder and entry point to this staged copy. The copy
    is removed when this process ends. The estimator keeps its own hyperparameters, metric definitions, requirements and
    all other settings. If the estimator is prepared again, the code is copied again.

    Args:
        estimator: An estimator of SageMaker's SDK 2 or a ``ModelTrainer`` of SDK 3. The function changes and returns
            it.
        script: The training script, relative to the source folder, or with the option ``module=True`` the name of a
            module in this folder. The default is the estimator's entry point.
        token: True sends a new secret with the job, and False sends none. A path names a file of mode 0600 with the
            secret.
        wheels: Folder with wheels of packages that the job's image lacks. pip searches this folder, too. Under network
            isolation, pip searches only this folder. Packages of the image that satisfy the requirements are kept.
        options: Options of `hetero launch`, by the names of `hetero.config.LaunchOptions`.

    Raises:
        ConfigError: If the object is not an estimator, its code is not a local folder or file, the Python of its image
            is too old, or an option is unknown or malformed.
        AuthenticationError: If the token's file cannot be used.
    """
    # Find the user's script and check the options.
    adapter = adapter_of(estimator)
    _check_python(adapter.image())
    origin = _origin(adapter, script)
    code = origin.code
    module = options.get("module", adapter.hyperparameters().get("hetero_module", False))
    # A hyperparameter that the SDK has encoded as JSON may have quotes.
    is_module = str(module).strip('"').lower() in ("true", "yes", "on", "1")
    script_path = _module_path(origin) if is_module else _script_path(origin)
    # Without a source folder, the script alone is copied, so its folder does not exist in the job.
    staged_script = script_path.name if code.folder is None else origin.script
    parameters = _parameters(staged_script, adapter, options)
    # Stage the code. The staged folder outlives this call only if every step succeeds.
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(private_folder("hetero-staged-")) / "source"
        _copy_code(code, script_path, folder)
        _add_ours(folder, code.requirements, token=token, wheels=wheels, is_offline=adapter.is_isolated())
        adapter.apply(
            folder, LAUNCHER_NAME, requirements=code.requirements, parameters=parameters, metrics=METRIC_DEFINITIONS
        )
        # Keep the folder. `_folders` removes it when this process ends.
        _folders.push(undo.pop_all())
    # If the estimator is prepared again, `_origins` has the code to copy. Without a source folder, the script is
    # relative to the current folder. The program may change that folder in between, so keep the absolute path of
    # the script.
    _origins[str(folder)] = origin if code.folder is not None else _Origin(code, str(script_path))
    return estimator


def _origin(adapter: Adapter, script: str | None) -> _Origin:
    """Return the user's code and script. If the estimator is already prepared, return the original code and script."""
    code = adapter.code()
    earlier_origin = None if code.folder is None else _origins.get(str(code.folder))
    if earlier_origin is not None:
        return _Origin(earlier_origin.code, script or earlier_origin.script)
    parameters = adapter.hyperparameters()
    if script is None and "hetero_script" in parameters:
        script = check_hyperparameters(parameters, "the estimator's hyperparameters").script
    return _Origin(code, script or code.script)


def _check_python(image: str) -> None:
    """Raise ConfigError if the image's Python version or tag states a Python that is too old."""
    found = _PYTHON_TAG.search(image)
    if found and (version := (int(found[1]), int(found[2]))) < _LEAST_PYTHON:
        raise ConfigError(
            f"the image has Python {version[0]}.{version[1]}; hetero needs {_LEAST_PYTHON[0]}.{_LEAST_PYTHON[1]} or "
            "newer\n  to do: give another framework_version and py_version, or another image"
        )


def _script_path(origin: _Origin) -> Path:
    """Return the path of the training script on this machine.

    Raises:
        ConfigError: If the script does not exist, or is outside the source folder.
    """
    folder, name = origin.code.folder, origin.script
    if not name:
        raise ConfigError("found no training script; give its path: prepare(estimator, script='train.py')")
    if folder is None:
        path = Path(name).absolute()
        if not path.is_file():
            raise ConfigError(f"the training script {name!r} does not exist in {Path.cwd()}; give its path")
        return path
    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts or not (folder / name).is_file():
        raise ConfigError(f"the training script {name!r} is not in {folder}; give its path relative to this folder")
    return folder / name


def _module_path(origin: _Origin) -> Path:
    """Return the file of a module in the source folder.

    Raises:
        ConfigError: If the module or the source folder does not exist.
    """
    folder, name = origin.code.folder, origin.script
    if folder is None:
        raise ConfigError(
            f"the module {name!r} needs a source folder\n  Give the estimator a source_dir that contains its package."
        )
    # Find the file without an import, because importing a package could start threads or CUDA.
    path = folder.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__main__.py"):
        if all(part.isidentifier() for part in name.split(".")) and file.is_file():
            return file
    raise ConfigError(f"{folder} has no module {name!r}; expected a name such as package.train for package/train.py")


def _parameters(script: str, adapter: Adapter, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that `prepare` adds to the estimator's own."""
    own_parameters = adapter.hyperparameters()
    added: dict[str, Any] = {"hetero_script": script}
    for name, value in options.items():
        # One SDK writes values as JSON, the other as Python does. A list looks the same in both, but a tuple does not,
        # and JSON cannot represent paths.
        if isinstance(value, tuple):
            value = list(value)
        added[f"hetero_{name}"] = os.fspath(value) if isinstance(value, os.PathLike) else value
    if adapter.trains_with_tensorflow() and "hetero_framework" not in own_parameters:
        added.setdefault("hetero_framework", "tensorflow")
    check_hyperparameters({**own_parameters, **added}, "the options of prepare or the hyperparameters")
    return added


def _copy_code(code: Code, script: Path, target: Path) -> None:
    """Copy the source folder except ignored files. Without a source folder, copy only the script."""
    if code.folder is None:
        target.mkdir()
        shutil.copy2(script, target)
        return
    ignore_file = code.folder / IGNORE_FILE
    copied_bytes = 0

    def copy(source: str, destination: str) -> None:
        """Copy a file. Raise `ConfigError` if all files so far have more than `MAX_CODE_BYTES`."""
        nonlocal copied_bytes
        copied_bytes += Path(source).stat().st_size
        if copied_bytes > MAX_CODE_BYTES:
            raise ConfigError(
                f"{code.folder} has more than {MAX_CODE_BYTES} bytes; move the data into a channel, or name files to "
                f"leave out in {ignore_file}"
            )
        shutil.copy2(source, destination)

    ignored = (ignored_files(code.folder), shutil.ignore_patterns(*code.ignored))
    # The code may contain the folder for temporary files, and so the staged folder. A copy must not contain itself.
    copy_code(code.folder, target, left_out=target.parent.resolve(), ignored=ignored, copy=copy)
    # Reject code with files under hetero's names, and ignore patterns that exclude the script.
    for name in (LAUNCHER_NAME, STAGED_FOLDER):
        if (target / name).exists():
            raise ConfigError(f"{code.folder} has a {name}, which prepare makes itself; rename or remove yours")
    if not (target / script.relative_to(code.folder)).is_file():
        raise ConfigError(
            f"the training script {script.name!r} is ignored; correct {ignore_file} or the estimator's "
            f"ignore_patterns, {list(code.ignored)}"
        )


def _add_ours(
    source: Path, requirements: str, *, token: bool | Path, wheels: Path | str | None, is_offline: bool
) -> None:
    """Add to a copy of the code what a job of hetero needs: launcher, token, wheels, requirements."""
    folder = source / STAGED_FOLDER
    folder.mkdir()
    shutil.copyfile(LAUNCHER_FILE, source / LAUNCHER_NAME)
    if token is not False:
        _write_token(folder / TOKEN_NAME, token)
    for wheel in _wheels(wheels):
        shutil.copy2(wheel, folder)
    own_wheel = build_wheel(folder)
    path = source / requirements
    users_lines = path.read_text(encoding="utf-8") if path.is_file() else ""
    # If one line of a requirements file has a hash, pip demands a hash in each line.
    digest = hashlib.sha256(own_wheel.read_bytes()).hexdigest()
    hash_option = f" --hash=sha256:{digest}" if "--hash" in users_lines else ""
    lines = [
        "# hetero.sagemaker.prepare: hetero comes with the code",
        f"--find-links {STAGED_FOLDER}",
        *(["--no-index"] if is_offline else []),
        f"./{STAGED_FOLDER}/{own_wheel.name}{hash_option}",
        "# the job's own",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n" + users_lines, encoding="utf-8")


def _write_token(path: Path, token: bool | Path) -> None:
    """Write a new token, or the token of a file, to a path. Raise `ConfigError` for a value of another type."""
    from hetero.control.security import Token, load_token, write_token

    if token is not True and not isinstance(token, Path):
        # The message does not quote the value, because it may be the secret itself.
        raise ConfigError("token has the wrong type; expected True, False, or a pathlib.Path of a token file")
    write_token(os.fspath(path), Token.generate() if token is True else load_token(os.fspath(token)))


def _wheels(folder: Path | str | None) -> Sequence[Path]:
    """Return the wheels of a folder. Raise `ConfigError` if the folder contains none."""
    if folder is None:
        return []
    found = sorted(Path(folder).glob("*.whl"))
    if not found:
        raise ConfigError(
            f"{folder} contains no wheels\n  Fill it with: pip download -d {folder} --only-binary :all: PACKAGE"
        )
    return found

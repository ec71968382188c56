"""SageMaker, which fills ``/opt/ml`` on every host before it starts the container there.

The description of the cluster is ``<base>/input/config/resourceconfig.json``. The base is ``SAGEMAKER_BASE_DIR``, or
``/opt/ml``. The ``SM_*`` variables of SageMaker's training toolkit do not describe the cluster to hetero, because under
``mpirun`` every rank has the variables of the first host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.cluster.document import load
from hetero.cluster.platforms.platform import ClusterDescription, Folders, JobParameters, Platform
from hetero.cluster.spec import ClusterSpec
from hetero.documents.files import read_bounded
from hetero.errors import ClusterError, ConfigError

__all__ = [
    "BASE_DIR",
    "BASE_DIR_VARIABLE",
    "CHANNELS",
    "CONFIG",
    "JOB_NAME_VARIABLE",
    "SageMaker",
    "entry_arguments",
    "folders_below",
    "job_parameters",
    "script_variables",
    "unquoted",
]

BASE_DIR = "/opt/ml"
"""Base folder of a job's files on every host. `BASE_DIR_VARIABLE` can name another folder."""
BASE_DIR_VARIABLE = "SAGEMAKER_BASE_DIR"
JOB_NAME_VARIABLE = "TRAINING_JOB_NAME"
CONFIG = "input/config"
"""Folder with the descriptions of the job, relative to the base folder."""
CHANNELS = "input/data"
"""Folder with one folder for each input channel, relative to the base folder."""

_OF_THE_TOOLKIT = ("sagemaker_", "default_user_module_name", "_tuning_objective_metric")
"""Prefixes of hyperparameters that the toolkit does not pass to the entry point."""


class SageMaker(Platform):
    """A training job of SageMaker, or a simulated host with the same folders."""

    name = "sagemaker"
    variables = ("SM_", "SAGEMAKER_")
    kill_after_s = 120.0

    @property
    def folders(self) -> Folders:
        """The folders below the base folder."""
        return folders_below(Path(self.environ.get(BASE_DIR_VARIABLE) or BASE_DIR))

    def is_here(self) -> bool:
        """Return whether ``resourceconfig.json`` exists."""
        return _exists(self._file)

    def describe(self) -> ClusterDescription:
        """Return the content of ``resourceconfig.json``."""
        if self.is_here():
            return ClusterDescription(document=load(self._file), source=str(self._file))
        raise ClusterError(
            f"no description of the cluster: {self._file} does not exist\n"
            "  on a training platform: start this as the job's entry point\n"
            "  on one machine: use hetero simulate\n"
            "  on any other cluster: give --cluster-file FILE --host NAME"
        )

    def job_name(self) -> str:
        """Return the name of the training job.

        Under mpirun, all hosts except the first know it only from the toolkit's ``SM_TRAINING_ENV``.
        """
        if self.environ.get(JOB_NAME_VARIABLE):
            return self.environ[JOB_NAME_VARIABLE]
        try:
            content = json.loads(self.environ.get("SM_TRAINING_ENV") or "{}")
        except (ValueError, RecursionError):
            return ""
        return str(content.get("job_name") or "") if isinstance(content, dict) else ""

    def parameters(self) -> JobParameters | None:
        """Return the hyperparameters of ``hyperparameters.json``. None if the file does not exist."""
        path = self.folders.root / CONFIG / "hyperparameters.json"
        if not _exists(path):
            return None
        source = str(path)
        return job_parameters(_decode(read_bounded(path, source), source), source)

    def num_gpus(self) -> int | None:
        """Return the number of accelerators that the toolkit counted."""
        declared = self.environ.get("SM_NUM_GPUS", "")
        return int(declared) if declared.isdigit() else None

    def own_variables(self, cluster: ClusterSpec) -> dict[str, str]:
        """Return the variables that identify this host, as the toolkit sets them."""
        return {
            "SM_CURRENT_HOST": cluster.current_host,
            "SM_CURRENT_INSTANCE_GROUP": cluster.current_group.name,
            "SM_CURRENT_INSTANCE_TYPE": cluster.current_group.instance_type,
        }

    @property
    def _file(self) -> Path:
        return self.folders.root / CONFIG / "resourceconfig.json"


def folders_below(base: Path) -> Folders:
    """Return the folders of a job.

    Args:
        base: The folder that is ``/opt/ml`` on SageMaker.
    """
    return Folders(
        root=base,
        output=base / "output" / "data",
        failure=base / "output" / "failure",
        model=base / "model",
        checkpoints=base / "checkpoints",
        code=base / "code",
    )


def channel_variable(name: str) -> str:
    """Return the variable that has the folder of an input channel."""
    return f"SM_CHANNEL_{name.upper()}"


def script_variables(base: Path, host: str, channels: Sequence[str]) -> dict[str, str]:
    """Return the variables that training scripts read.

    Args:
        base: The folder that is ``/opt/ml`` on SageMaker.
        host: Name of the host.
        channels: Names of the host's input channels.
    """
    folders = folders_below(base)
    return {
        BASE_DIR_VARIABLE: str(base),
        "SM_MODEL_DIR": str(folders.model),
        "SM_OUTPUT_DATA_DIR": str(folders.output),
        "SM_CURRENT_HOST": host,
        **{channel_variable(name): str(base / CHANNELS / name) for name in channels},
    }


def job_parameters(hyperparameters: Mapping[str, object], source: str) -> JobParameters:
    """Return the parameters of a job with these hyperparameters.

    Args:
        hyperparameters: Texts, in the encoding of either SDK.
        source: Origin of the hyperparameters, for messages.
    """
    others = {name: value for name, value in hyperparameters.items() if not name.startswith("hetero_")}
    return JobParameters(
        values={name: unquoted(value) for name, value in hyperparameters.items()},
        source=source,
        script_arguments=entry_arguments(others),
    )


def entry_arguments(hyperparameters: Mapping[str, object]) -> list[str]:
    """Return the arguments that SageMaker gives an entry point.

    The toolkit of SDK 2 sorts the arguments, writes values as Python does, and puts one dash before a name of one
    letter. The drivers of SDK 3 write values as JSON. Both remove the JSON quotes around texts.
    """
    # SDK 2 adds hyperparameters with this prefix, such as sagemaker_program.
    is_toolkit = any(name.startswith("sagemaker_") for name in hyperparameters)
    arguments: list[str] = []
    for name in sorted(hyperparameters) if is_toolkit else hyperparameters:
        if name.startswith(_OF_THE_TOOLKIT):
            continue
        value = _decoded(hyperparameters[name])
        dashes = "-" if is_toolkit and len(name) == 1 else "--"
        arguments += [f"{dashes}{name}", _as_toolkit(value) if is_toolkit else _as_driver(value)]
    return arguments


def _decoded(text: Any) -> Any:
    """Return the value of a text that is JSON. Return any other value unchanged."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def unquoted(value: object) -> object:
    """Return a value of a hyperparameter without the JSON quotes that SDK 2 puts around texts."""
    found = _decoded(value)
    return found if isinstance(found, str) else value


def _as_toolkit(value: Any) -> str:
    """Return a value as the toolkit of SDK 2 writes it in an argument."""
    if isinstance(value, dict):
        return ",".join(f"{name}={item}" for name, item in sorted(value.items()))
    return "" if value is None else str(value)


def _as_driver(value: Any) -> str:
    """Return a value as the drivers of SDK 3 write it in an argument."""
    return value if isinstance(value, str) else json.dumps(value)


def _decode(content: bytes, source: str) -> dict[str, object]:
    """Return the JSON object in a file's content. Raise `ConfigError` if the content is anything else."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {str(error)[:300]}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source} holds {type(document).__name__}; expected an object")
    return document


def _exists(path: Path) -> bool:
    """Return whether the file exists. Also return True if that cannot be checked, because reading raises the error."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True

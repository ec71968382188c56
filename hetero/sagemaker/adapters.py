"""What `prepare` reads from an estimator and writes to it, for either version of SageMaker's SDK."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.launch.staged import STAGED_FOLDER
from hetero.sagemaker.limits import limits
from hetero.sagemaker.recording import sdk_version

__all__ = ["Adapter", "Code", "adapter_of"]

logger = logging.getLogger(__name__)

_OWN_REQUIREMENTS = f"{STAGED_FOLDER}/requirements.txt"
"""SDK 3 installs from the file that it is told of only: the user's stays alone where it is told of none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Where an estimator's code is."""

    folder: Path | None
    """The source folder; None if there is but the script."""
    script: str = ""
    """The entry point, relative to the folder; empty: none."""
    requirements: str = "requirements.txt"
    """The file that pip installs from, relative to the folder; there need be none yet."""
    ignored: tuple[str, ...] = ()
    """Patterns of names that are left out."""


class Adapter(ABC):
    """An estimator of either SDK."""

    @abstractmethod
    def code(self) -> Code:
        """Return where its code is.

        Raises:
            ConfigError: If that is not on this machine, or what it starts is no script.
        """

    @abstractmethod
    def hyperparameters(self) -> Mapping[str, Any]:
        """Return the user's, and ours of the last time; values as Python has them or as texts."""

    @abstractmethod
    def image(self) -> str:
        """Return what is known about its image: its name, or the tag of its Python."""

    @abstractmethod
    def is_isolated(self) -> bool:
        """Tell whether its containers have no network but each other."""

    @abstractmethod
    def trains_with_tensorflow(self) -> bool:
        """Tell whether its image is one for TensorFlow."""

    @abstractmethod
    def apply(
        self,
        folder: Path,
        entry_point: str,
        *,
        requirements: str,
        parameters: Mapping[str, Any],
        metrics: Sequence[Mapping[str, str]],
    ) -> None:
        """Point it at a staged folder, and add hyperparameters and definitions of metrics to its own.

        Args:
            folder: The code.
            entry_point: The file in it that every host starts.
            requirements: The file in it that pip installs first.
            parameters: Hyperparameters; they replace its own of the same name.
            metrics: With Name and Regex; its own of the same name stay.
        """


def adapter_of(estimator: Any) -> Adapter:
    """Return the adapter of an estimator.

    Raises:
        ConfigError: If it is none.
    """
    return _Trainer(estimator) if sdk_version(estimator) == 3 else _Estimator(estimator)


class _Estimator(Adapter):
    """Of SDK 2."""

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def code(self) -> Code:
        estimator = self._estimator
        if getattr(estimator, "container_entry_point", None):
            raise ConfigError(
                "the estimator has a container_entry_point, which starts without the code; leave it out where the "
                "image has the training toolkit, or put hetero and the launcher into the image"
            )
        if estimator.git_config:
            raise ConfigError("the estimator has a git_config; clone the repository and give source_dir instead")
        if "requirements.txt" in {Path(path).name for path in estimator.dependencies or ()}:
            raise ConfigError(
                "dependencies has a requirements.txt, which would replace the staged one; move it into source_dir"
            )
        return Code(folder=_local_folder(estimator.source_dir), script=_text(estimator.entry_point, "entry_point"))

    def hyperparameters(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._estimator._hyperparameters or {}
        return found

    def image(self) -> str:
        return str(getattr(self._estimator, "py_version", None) or _tag(getattr(self._estimator, "image_uri", None)))

    def is_isolated(self) -> bool:
        return self._estimator.enable_network_isolation() is True

    def trains_with_tensorflow(self) -> bool:
        estimator = self._estimator
        return getattr(estimator, "_framework_name", None) == "tensorflow" or _is_for_tensorflow(
            getattr(estimator, "image_uri", None)
        )

    def apply(
        self,
        folder: Path,
        entry_point: str,
        *,
        requirements: str,
        parameters: Mapping[str, Any],
        metrics: Sequence[Mapping[str, str]],
    ) -> None:
        estimator = self._estimator
        estimator.source_dir = str(folder)
        estimator.entry_point = entry_point
        estimator._hyperparameters = dict(estimator._hyperparameters or {})  # it may be the user's own dict
        if hasattr(type(estimator), "_framework_name"):  # encodes all of them when asked for them
            estimator._hyperparameters.update(parameters)
        else:
            estimator.set_hyperparameters(**parameters)
        own = list(estimator.metric_definitions or ())
        estimator.metric_definitions = own + _missing(metrics, [each["Name"] for each in own])


class _Trainer(Adapter):
    """``ModelTrainer`` of SDK 3."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def code(self) -> Code:
        trainer, code = self._trainer, self._trainer.source_code
        if trainer.distributed is not None:
            raise ConfigError(
                f"the trainer has distributed={type(trainer.distributed).__name__}(...), which would run on the hosts "
                "of all groups; leave it out: hetero starts the ranks, on the trainer group"
            )
        if code is None:
            return Code(folder=None, requirements=_OWN_REQUIREMENTS)
        if code.command or code.args:
            raise ConfigError(
                "source_code has a command or args, which would be run instead of the launcher; give entry_script, and "
                "its arguments as hyperparameters"
            )
        return Code(
            folder=_local_folder(code.source_dir),
            script=_text(code.entry_script, "entry_script"),
            requirements=_text(code.requirements, "requirements") or _OWN_REQUIREMENTS,
            ignored=tuple(code.ignore_patterns or ()),
        )

    def hyperparameters(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._trainer.hyperparameters or {}
        return found

    def image(self) -> str:
        return _tag(self._trainer.training_image)

    def is_isolated(self) -> bool:
        networking = self._trainer.networking
        return networking is not None and networking.enable_network_isolation is True

    def trains_with_tensorflow(self) -> bool:
        return _is_for_tensorflow(self._trainer.training_image)

    def apply(
        self,
        folder: Path,
        entry_point: str,
        *,
        requirements: str,
        parameters: Mapping[str, Any],
        metrics: Sequence[Mapping[str, str]],
    ) -> None:
        from sagemaker.core.shapes import MetricDefinition  # type: ignore[import-untyped,unused-ignore]

        trainer = self._trainer
        code = {
            "source_dir": str(folder),
            "entry_script": entry_point,
            "requirements": requirements,
            "ignore_patterns": None,  # what they leave out is not in the folder, and ours they must not meet
        }
        trainer.source_code = code if trainer.source_code is None else trainer.source_code.model_copy(update=code)
        trainer.hyperparameters = {**(trainer.hyperparameters or {}), **parameters}
        own = list(trainer._metric_definitions or ())
        more = _missing(metrics, [each.name for each in own])
        added = [MetricDefinition(name=each["Name"], regex=each["Regex"]) for each in more]
        trainer.with_metric_definitions([*own, *added])


def _missing(metrics: Sequence[Mapping[str, str]], own: Sequence[str]) -> list[dict[str, str]]:
    """Return the definitions that are not there yet, as many as a request has room for."""
    missing = [dict(each) for each in metrics if each["Name"] not in own]
    most = limits()["AlgorithmSpecification.MetricDefinitions"].high or 0
    room = max(0, most - len(own))
    if len(missing) > room:
        left_out = ", ".join(each["Name"] for each in missing[room:])
        logger.warning("a job has at most %d metric definitions; left out: %s", most, left_out)
    return missing[:room]


def _local_folder(source_dir: object) -> Path | None:
    text = _text(source_dir, "source_dir")
    if not text:
        return None
    if not Path(text).is_dir():
        raise ConfigError(f"source_dir is {text!r:.200}; expected a folder on this machine")
    return Path(text).absolute()


def _text(value: object, name: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name} is of type {type(value).__name__}; expected a text")
    return value or ""


def _tag(image: object) -> str:
    """Return the tag of an image's name."""
    return image.rpartition("/")[2].partition(":")[2] if isinstance(image, str) else ""


def _is_for_tensorflow(image: object) -> bool:
    return isinstance(image, str) and "tensorflow" in image.rpartition("/")[2].partition(":")[0]

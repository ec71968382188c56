"""Adapters that let `prepare` and `plan` read and change an estimator, one for each version of SageMaker's SDK."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hetero.errors import ConfigError
from hetero.launch.job_token import STAGED_FOLDER
from hetero.sagemaker.limits import limits
from hetero.sagemaker.recording import sdk_version
from hetero.sagemaker.request import ONLY_GROUP, RequestGroup

__all__ = ["Adapter", "Code", "adapter_of"]

logger = logging.getLogger(__name__)

_OWN_REQUIREMENTS = f"{STAGED_FOLDER}/requirements.txt"
"""Path of the requirements file that `prepare` writes if a ``ModelTrainer`` names none.

SDK 3 installs only the requirements file that the trainer names. A ``requirements.txt`` that the trainer does not name
stays unchanged, because this path is different.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Location of an estimator's code."""

    folder: Path | None
    """The source folder, or None if the estimator has only a script."""
    script: str = ""
    """The entry point, relative to the folder. Empty if the estimator does not name one."""
    requirements: str = "requirements.txt"
    """The requirements file for pip, relative to the folder. The file may not exist yet."""
    ignored: tuple[str, ...] = ()
    """Patterns of file names that the SDK does not upload."""


def adapter_of(estimator: Any) -> Adapter:
    """Return the adapter for an estimator.

    Raises:
        ConfigError: If the object is not an estimator.
    """
    return _Trainer(estimator) if sdk_version(estimator) == 3 else _Estimator(estimator)


class _Estimator:
    """Adapter for an estimator of SDK 2. `_Trainer` has the same methods."""

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def code(self) -> Code:
        """Return the location of the estimator's code.

        Raises:
            ConfigError: If the code is not on this machine, if the estimator starts a command instead of a script, or
                if one of its settings conflicts with the staged code.
        """
        estimator = self._estimator
        if getattr(estimator, "container_entry_point", None):
            raise ConfigError(
                "the estimator has a container_entry_point, which starts without the uploaded code; leave it out if "
                "the image has the training toolkit, or put hetero and the launcher into the image"
            )
        if estimator.git_config:
            raise ConfigError("the estimator has a git_config; clone the repository and give source_dir instead")
        if "requirements.txt" in {Path(path).name for path in estimator.dependencies or ()}:
            raise ConfigError(
                "dependencies has a requirements.txt, which would replace the staged one; move it into source_dir"
            )
        return Code(folder=_local_folder(estimator.source_dir), script=_text(estimator.entry_point, "entry_point"))

    def hyperparameters(self) -> Mapping[str, Any]:
        """Return the estimator's hyperparameters, as Python values or as texts.

        If the estimator was prepared before, they include hetero's hyperparameters.
        """
        # Read the attribute, because the method hyperparameters() of the classes of frameworks encodes all values.
        return dict(self._estimator._hyperparameters or {})

    def image(self) -> str:
        """Return the image's Python version, such as ``py310``, or else the image's tag. Empty if both are unknown."""
        return str(getattr(self._estimator, "py_version", None) or _tag(getattr(self._estimator, "image_uri", None)))

    def is_isolated(self) -> bool:
        """Return whether network isolation is on. The containers then reach only each other."""
        return self._estimator.enable_network_isolation() is True

    def trains_with_tensorflow(self) -> bool:
        """Return whether the estimator's image is for TensorFlow."""
        estimator = self._estimator
        return getattr(estimator, "_framework_name", None) == "tensorflow" or _is_for_tensorflow(
            getattr(estimator, "image_uri", None)
        )

    def groups(self) -> tuple[RequestGroup, ...]:
        """Return the instance groups. An estimator without groups has one, with the name `ONLY_GROUP`.

        Raises:
            ConfigError: If the estimator states no groups and no instance type, or one is not known yet.
        """
        estimator = self._estimator
        return _groups(estimator.instance_groups, estimator.instance_type, estimator.instance_count)

    def make_groups(self, groups: Iterable[RequestGroup]) -> list[Any]:
        """Return instance groups of the SDK's own class. The estimator does not change."""
        from sagemaker.instance_group import InstanceGroup  # type: ignore[import-untyped,unused-ignore]

        # The class has no annotations, so mypy rejects a call of it that is not through Any.
        make: Any = InstanceGroup
        return [make(group.name, group.instance_type, group.count) for group in groups]

    def apply(
        self,
        folder: Path,
        entry_point: str,
        *,
        requirements: str,
        parameters: Mapping[str, Any],
        metrics: Sequence[Mapping[str, str]],
    ) -> None:
        """Set the estimator's code to a staged folder, and add hyperparameters and metric definitions.

        Args:
            folder: The staged folder with the code.
            entry_point: The file in the folder that every host starts.
            requirements: The requirements file in the folder, which pip installs first.
            parameters: Hyperparameters to add. They replace hyperparameters of the same name.
            metrics: Metric definitions to add, with Name and Regex. They do not replace definitions of the same name.
        """
        estimator = self._estimator
        estimator.source_dir = str(folder)
        estimator.entry_point = entry_point
        # Copy the dict, because it may be the user's.
        estimator._hyperparameters = dict(estimator._hyperparameters or {})
        # The classes of frameworks encode all values when they make the request. A plain estimator does so in
        # `set_hyperparameters`.
        if hasattr(type(estimator), "_framework_name"):
            estimator._hyperparameters.update(parameters)
        else:
            estimator.set_hyperparameters(**parameters)
        self.add_metrics(metrics)

    def add_metrics(self, metrics: Sequence[Mapping[str, str]]) -> None:
        """Add metric definitions with Name and Regex. They do not replace definitions of the same name."""
        stated = list(self._estimator.metric_definitions or ())
        self._estimator.metric_definitions = stated + _missing(metrics, [each["Name"] for each in stated])


class _Trainer:
    """Adapter for a ``ModelTrainer`` of SDK 3. See `_Estimator` for its methods."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def code(self) -> Code:
        """Return the location of the trainer's code. Raise `ConfigError` if a setting conflicts with a staged copy."""
        trainer, code = self._trainer, self._trainer.source_code
        if trainer.distributed is not None:
            raise ConfigError(
                f"the trainer has distributed={type(trainer.distributed).__name__}(...), which would run on the hosts "
                "of all groups; leave it out, because hetero starts the ranks on the trainer group"
            )
        if code is None:
            return Code(folder=None, requirements=_OWN_REQUIREMENTS)
        if code.command or code.args:
            raise ConfigError(
                "source_code has a command or args, which would run instead of the launcher; give an entry_script, and "
                "its arguments as hyperparameters"
            )
        return Code(
            folder=_local_folder(code.source_dir),
            script=_text(code.entry_script, "entry_script"),
            requirements=_text(code.requirements, "requirements") or _OWN_REQUIREMENTS,
            ignored=tuple(code.ignore_patterns or ()),
        )

    def hyperparameters(self) -> Mapping[str, Any]:
        return dict(self._trainer.hyperparameters or {})

    def image(self) -> str:
        return _tag(self._trainer.training_image)

    def is_isolated(self) -> bool:
        networking = self._trainer.networking
        return networking is not None and networking.enable_network_isolation is True

    def trains_with_tensorflow(self) -> bool:
        return _is_for_tensorflow(self._trainer.training_image)

    def groups(self) -> tuple[RequestGroup, ...]:
        compute = self._trainer.compute
        if compute is None:
            # Raises the error about instance types that are not stated.
            return _groups(listed=None, instance_type=None, count=None)
        return _groups(compute.instance_groups, compute.instance_type, compute.instance_count)

    def make_groups(self, groups: Iterable[RequestGroup]) -> list[Any]:
        """Return groups as objects of the SDK's class ``InstanceGroup``."""
        from sagemaker.core.shapes import InstanceGroup  # type: ignore[import-untyped,unused-ignore]

        return [
            InstanceGroup(instance_group_name=group.name, instance_type=group.instance_type, instance_count=group.count)
            for group in groups
        ]

    def apply(
        self,
        folder: Path,
        entry_point: str,
        *,
        requirements: str,
        parameters: Mapping[str, Any],
        metrics: Sequence[Mapping[str, str]],
    ) -> None:
        """Set the trainer's code to a staged folder, and add hyperparameters and metrics. See `_Estimator.apply`."""
        trainer = self._trainer
        code = {
            "source_dir": str(folder),
            "entry_script": entry_point,
            "requirements": requirements,
            # The copy lacks these files already, and hetero's files must not be ignored.
            "ignore_patterns": None,
        }
        # The trainer validates what is assigned, and makes a ``SourceCode`` of a dict.
        trainer.source_code = code if trainer.source_code is None else trainer.source_code.model_copy(update=code)
        trainer.hyperparameters = {**(trainer.hyperparameters or {}), **parameters}
        self.add_metrics(metrics)

    def add_metrics(self, metrics: Sequence[Mapping[str, str]]) -> None:
        """Add metric definitions with new names. The trainer's own definitions stay."""
        from sagemaker.core.shapes import MetricDefinition  # type: ignore[import-untyped,unused-ignore]

        stated = list(self._trainer._metric_definitions or ())
        missing = _missing(metrics, [each.name for each in stated])
        added = [MetricDefinition(name=each["Name"], regex=each["Regex"]) for each in missing]
        self._trainer.with_metric_definitions([*stated, *added])


Adapter: TypeAlias = _Estimator | _Trainer
"""Uniform access to an estimator of either SDK."""


def _groups(listed: object, instance_type: object, count: object) -> tuple[RequestGroup, ...]:
    """Return the groups that an estimator states as a list of groups, or as a type and a number of instances."""
    if isinstance(listed, list | tuple) and listed:
        rows = [(each.instance_group_name, each.instance_type, each.instance_count) for each in listed]
    else:
        rows = [(ONLY_GROUP, instance_type, count)]
    # In a pipeline of the SDK, a value may not be known yet.
    for name, kind, number in rows:
        if not (isinstance(name, str) and isinstance(kind, str) and isinstance(number, int)):
            raise ConfigError(
                "the estimator does not state its instance types; expected instance_groups, or instance_type and "
                "instance_count, with texts and numbers"
            )
    return tuple(RequestGroup(name=name, instance_type=kind, count=number) for name, kind, number in rows)


def _missing(metrics: Sequence[Mapping[str, str]], own: Sequence[str]) -> list[dict[str, str]]:
    """Return the definitions whose names are not in ``own``, up to the number that a request may have."""
    missing = [dict(each) for each in metrics if each["Name"] not in own]
    max_definitions = limits()["AlgorithmSpecification.MetricDefinitions"].high or 0
    # The user's own definitions have priority.
    room = max(0, max_definitions - len(own))
    if len(missing) > room:
        left_out = ", ".join(each["Name"] for each in missing[room:])
        logger.warning("a job has at most %d metric definitions; left out: %s", max_definitions, left_out)
    return missing[:room]


def _local_folder(source_dir: object) -> Path | None:
    """Return the absolute path of an estimator's source folder. None if the estimator states no folder.

    Raises:
        ConfigError: If the folder is not on this machine.
    """
    text = _text(source_dir, "source_dir")
    if not text:
        return None
    if not Path(text).is_dir():
        raise ConfigError(f"source_dir is {text!r:.200}; expected a folder on this machine")
    return Path(text).absolute()


def _text(value: object, name: str) -> str:
    """Return a setting of an estimator that is a text. Empty if it is not set.

    Raises:
        ConfigError: If the setting is no text, for example one of the SDK's pipeline variables.
    """
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name} is of type {type(value).__name__}; expected a string")
    return value or ""


def _tag(image: object) -> str:
    """Return the tag in an image's name, or an empty text."""
    return image.rpartition("/")[2].partition(":")[2] if isinstance(image, str) else ""


def _is_for_tensorflow(image: object) -> bool:
    return isinstance(image, str) and "tensorflow" in image.rpartition("/")[2].partition(":")[0]

"""Reads the options of a job from all sources. Each source overrides the sources before it.

The order is: defaults, defaults of the platform, file, environment, hyperparameters, flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.cluster import JobParameters
from hetero.cluster.platforms.sagemaker import unquoted
from hetero.config.flags import flag_of
from hetero.config.options import LaunchOptions, ReportOptions, base_type, kind_text
from hetero.documents.files import parse_yaml, read_bounded
from hetero.errors import ConfigError

__all__ = ["check_hyperparameters", "resolve_options", "resolve_prices"]

_FIELDS = {field.name: field for field in dataclasses.fields(LaunchOptions)}
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def resolve_options(
    namespace: argparse.Namespace, env: Mapping[str, str], parameters: JobParameters | None
) -> LaunchOptions:
    """Return the options of a job.

    Later sources override earlier ones: the field's default, the platform's default, ``--config FILE`` (YAML),
    ``HETERO_<NAME>``, the platform's parameter ``hetero_<name>``, the flag. A list in a text is JSON, or separated by
    commas. Script arguments are quoted as in a shell.

    Args:
        namespace: Result of a parser that `add_launch_arguments` has prepared.
        env: The process environment.
        parameters: The parameters of the job on its platform, if it has any.

    Raises:
        ConfigError: If a name is unknown or a value is malformed. The message names the source of the option.
    """
    # The order of these blocks is the documented one: each source overrides the sources before it.
    values: dict[str, object] = {} if parameters is None else dict(parameters.defaults)
    if getattr(namespace, "config", None):
        values |= _from_file(Path(namespace.config))
    for name, field in _FIELDS.items():
        variable = f"HETERO_{name.upper()}"
        # An empty variable counts as one that is not set.
        if env.get(variable):
            values[name] = _convert(field, env[variable], variable)
    if parameters is not None:
        values |= _options_in(_of_hetero(parameters.values), parameters.source, prefix="hetero_")
    values |= _from_flags(namespace, LaunchOptions)
    if "script" not in values:
        raise ConfigError(
            "no training script is given; expected: hetero launch [OPTIONS] SCRIPT [ARGUMENTS]\n"
            "  to do: give its path on the command line, as HETERO_SCRIPT or as the hyperparameter hetero_script"
        )
    return LaunchOptions(**values)  # type: ignore[arg-type]


def resolve_prices(namespace: argparse.Namespace) -> ReportOptions:
    """Return the options about prices.

    Args:
        namespace: Result of a parser that `add_price_arguments` has prepared.

    Raises:
        ConfigError: If a value is malformed.
    """
    return ReportOptions(**_from_flags(namespace, ReportOptions))  # type: ignore[arg-type]


def check_hyperparameters(parameters: Mapping[str, object], source: str) -> LaunchOptions:
    """Return the options in a job's hyperparameters named ``hetero_<name>``. Other hyperparameters are the script's.

    Args:
        parameters: Values as Python objects or as texts.
        source: Origin of the hyperparameters, for messages.

    Raises:
        ConfigError: If a name is unknown, a value is malformed or out of its bounds, or ``hetero_script`` is missing.
    """
    decoded = {name: unquoted(value) for name, value in parameters.items()}
    values = _options_in(_of_hetero(decoded), source, prefix="hetero_")
    if "script" not in values:
        raise ConfigError(f"{source} has no 'hetero_script'; expected the path of the training script")
    return LaunchOptions(**values)  # type: ignore[arg-type]


def _of_hetero(parameters: Mapping[Any, object]) -> dict[str, object]:
    """Return the parameters whose names begin with ``hetero_``. The others belong to the script."""
    return {name: value for name, value in parameters.items() if str(name).startswith("hetero_")}


def _from_flags(namespace: argparse.Namespace, kind: type[ReportOptions]) -> dict[str, object]:
    """Return the options of a class that the command line states."""
    values = {field: getattr(namespace, field.name, None) for field in dataclasses.fields(kind)}
    # argparse has None or an empty list for a flag that was not given.
    return {
        field.name: _convert(field, value, flag_of(field))
        for field, value in values.items()
        if value not in (None, [], ())
    }


def _from_file(path: Path) -> dict[str, object]:
    """Read options from YAML."""
    content = read_bounded(path, f"the configuration file {path}", to_do="check the path given to --config")
    document = parse_yaml(content, str(path))
    # An empty file states no options.
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds {type(document).__name__}; expected options by name, such as port: 17170")
    return _options_in(document, str(path), prefix="")


def _options_in(document: Mapping[Any, object], source: str, *, prefix: str) -> dict[str, object]:
    """Return the options in a document by name.

    Args:
        document: Values by key. A key is the name of an option after a prefix. A dash may replace an underscore.
        source: Origin of the document, for messages.
        prefix: The prefix.

    Raises:
        ConfigError: If a name is unknown or a value is malformed.
    """
    values = {}
    for key, value in document.items():
        name = str(key).removeprefix(prefix).replace("-", "_")
        if name not in _FIELDS:
            close = difflib.get_close_matches(name, _FIELDS, n=1)
            hint = f"did you mean {prefix + close[0]!r}?" if close else "see hetero launch --help"
            raise ConfigError(f"unknown option {str(key)[:80]!r} in {source}; {hint}")
        if value is not None:
            values[name] = _convert(_FIELDS[name], value, f"{str(key)!r} in {source}")
    return values


def _convert(field: dataclasses.Field[Any], value: object, source: str) -> object:
    """Convert a text or a decoded value to the type of its field."""
    try:
        # Some options allow a word, such as auto, beside the values of their type.
        if isinstance(value, str) and value.strip().lower() in field.metadata["words"]:
            return value.strip().lower()
        if base_type(field).startswith("tuple"):
            return _to_tuple(value, quoted=field.name == "script_args")
        return _to_scalar(base_type(field), value)
    except (ValueError, TypeError, OverflowError) as error:
        shown = repr(value)[:100]
        raise ConfigError(f"{source} is {shown}; expected {kind_text(field)}") from error


def _to_scalar(name: str, value: object) -> object:
    """Convert a value to the type with this name. Raise `TypeError` or `ValueError` if the value does not fit."""
    # Reject bool for numbers, because True is an int in Python.
    is_wrong_bool = isinstance(value, bool) and name in ("int", "float")
    if is_wrong_bool or not isinstance(value, (str, int, float, Path)):
        raise TypeError
    text = str(value).strip()
    match name:
        case "bool":
            if text.lower() not in _BOOLEANS:
                raise ValueError
            return _BOOLEANS[text.lower()]
        case "int":
            return int(text)
        case "float":
            return float(text)
        case "Path":
            return Path(text).expanduser()
        case _:
            return text


def _to_tuple(value: object, *, quoted: bool) -> tuple[str, ...]:
    """Convert a list, or a text that lists several items, to a tuple of texts.

    Args:
        value: A list, a text that is a JSON list, or a text with items.
        quoted: Whether the items of a text are quoted as in a shell. If not, they are separated by commas.
    """
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("["):
            value = json.loads(text)
        else:
            value = shlex.split(text) if quoted else [item.strip() for item in text.split(",")]
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, (str, int, float)) for item in value):
        raise TypeError
    return tuple(str(item) for item in value)

"""Reads STUDY.yaml: what a study varies, what it keeps, and how its runs are executed.

The file is data. Everything that needs arithmetic is in constraints.py, and everything about the order of runs is in
designs.py.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hetero.config import LaunchOptions, resolve_options, stated_flags
from hetero.config.flags import flag_of
from hetero.decide.studies.file_values import (
    check_keys,
    choice_of,
    level_of,
    mapping,
    plain_of,
    scalar_text,
    sequence,
    text_of,
    texts_of,
    whole_of,
)
from hetero.decide.studies.placeholders import placeholders
from hetero.decide.studies.runs import Level
from hetero.documents.files import parse_yaml, read_bounded
from hetero.documents.records import decode, limits
from hetero.documents.text import printable
from hetero.errors import ConfigError
from hetero.metrics.logged import MetricPattern, is_metric_name
from hetero.simulate.simulate import parse_group

__all__ = [
    "LEARNING_RATE_RULES",
    "MAX_RUNS",
    "PRICE_OPTIONS",
    "RESERVED",
    "Budget",
    "Constraints",
    "Design",
    "ExecutorChoice",
    "Factor",
    "Metric",
    "Settings",
    "Study",
    "check_group",
    "check_options",
    "parse_study",
    "read_study",
]

LEARNING_RATE_RULES = ("kept", "sqrt", "linear")
PRICE_OPTIONS = ("region", "price_profile", "price_file", "prices")
"""Launch options that say what hosts cost. They change no run."""
_NO_VALUES = {
    "seed": "the seed as seed of the study, or as a factor",
    "fix": "it in the constraints",
    "measured": "it in the constraints",
    "train_share": "it in the constraints",
}
"""Names that values cannot have, and where they are expected."""
MAX_RUNS = 10_000
"""Limit of the runs of a study."""
RESERVED = frozenset(
    (
        *("run_id", "replicate", "state", "exit_code", "cause", "started_at", "wall_s", "usd"),
        *("compute_s", "data_wait_s", "other_s", "samples_per_s"),
        *("step_time_s", "step_time_least_s", "data_wait_per_step_s"),
        *("cpu_percent", "memory_bytes", "gpu_percent", "gpu_memory_bytes", "communication_over_computation"),
        *("base_steps", "base_learning_rate"),
    )
)
"""Columns of the results that no factor and no further quantity may have as its name."""
_MAX_LEVELS = 1000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_EXECUTORS = ("simulate", "launch", "sagemaker")
_SETTINGS_KEYS = ("groups", "channels", "environment", "options", "values", "expected_minutes", "ranks")
_STUDY_KEYS = (
    *("name", "script", "args", "factors", "design", "order", "constraints", "replicates", "seed", "metrics"),
    *("budget", "executor", *(name for name in _SETTINGS_KEYS if name != "ranks")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the study keeps while its factors vary. A quantity that is a factor or a level's value overrides it."""

    fix: str | None = field(default=None, metadata=limits(choices=("steps", "global_batch")))
    """``steps``: epochs follow from the steps. ``global_batch``: the batch per device follows from it."""
    train_share: float = field(default=1.0, metadata=limits(minimum=1e-9, maximum=1.0))
    """Share of the samples that train."""
    samples: int | None = field(default=None, metadata=limits(minimum=1))
    steps: int | None = field(default=None, metadata=limits(minimum=1))
    """Steps of a run with the smallest global batch of the study."""
    epochs: float | None = field(default=None, metadata=limits(minimum=1e-9))
    batch_per_device: int | None = field(default=None, metadata=limits(minimum=1))
    global_batch: int | None = field(default=None, metadata=limits(minimum=1))
    learning_rate: float | None = None
    """Learning rate at the smallest global batch of the study."""
    learning_rate_rule: str = field(default="kept", metadata=limits(choices=LEARNING_RATE_RULES))
    """``kept``, ``linear`` (times global batch / smallest global batch) or ``sqrt`` (times the root of this ratio)."""
    memory_gb_per_sample: float | None = None
    """Memory of a device for each sample of its batch, in 10^9 bytes."""
    memory_gb_fixed: float = 0.0
    """Memory of a device that does not depend on the batch, in 10^9 bytes: parameters, gradients, optimizer."""
    measured: str = ""
    """Report of an earlier run, or its folder. Its peak of accelerator memory is compared with the memory that each run
    needs."""
    data_gb: float | None = None
    """Size of the training data on a host's disk, in 10^9 bytes."""
    volume_gb: float | None = None
    """Size of the volume that is attached to each host, in 10^9 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a level, or the whole study, states about runs besides a value."""

    groups: tuple[str, ...] = ()
    """``NAME=TYPE:COUNT``, in a file also with placeholders."""
    channels: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    """Launch options by name."""
    values: Mapping[str, Level] = field(default_factory=dict)
    """Further quantities for placeholders and checks."""
    expected_minutes: float | None = None
    ranks: int | None = None
    """Ranks of the job, if they do not follow from groups and ``nproc_per_node``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A factor with its levels, in their order."""

    name: str
    levels: tuple[Level, ...]
    settings: Mapping[Level, Settings] = field(default_factory=dict)
    """Settings of each level, if the file states them."""

    @property
    def is_numeric(self) -> bool:
        """Whether all levels are numbers."""
        return all(isinstance(level, (int, float)) and not isinstance(level, bool) for level in self.levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Which combinations of levels run."""

    kind: str
    """``full``, ``fraction`` or ``table``."""
    num_runs: int = 0
    """Runs of a fraction, without replicates."""
    table: tuple[Mapping[str, Level], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of quality."""

    name: str = field(metadata=limits(accepts=is_metric_name, expected="a name without spaces and ="))
    goal: str = field(default="max", metadata=limits(choices=("max", "min")))
    """Whether a larger or a smaller value is better."""
    target: float | None = field(default=None, metadata=limits(minimum=-(2.0**63)))
    """Value to reach, for the time to quality."""
    after_s: tuple[float, ...] = field(default=(), metadata=limits(minimum=0.001, max_items=20))
    """Seconds since the start of the run, for the quality after a time."""
    regex: str = ""
    """Expression with one group that finds the value in a line of the log. Empty if the script calls log_metric.

    It runs on the user's own machine. A repetition of a repetition, such as ``(a+)+``, may search a line for hours, and
    nothing ends it.
    """

    def reaches(self, value: float) -> bool:
        """Return whether a value has reached the target. False without a target."""
        if self.target is None:
            return False
        return value >= self.target if self.goal == "max" else value <= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a study may spend. None: no limit."""

    usd: float | None = None
    hours: float | None = None
    """Sum of the wall times of all runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorChoice:
    """Who executes the runs."""

    kind: str
    """``simulate``, ``launch`` or ``sagemaker``."""
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A parsed STUDY.yaml."""

    path: Path
    name: str
    script: str
    """Path of the script, relative to the file or absolute."""
    args: tuple[str, ...]
    factors: tuple[Factor, ...]
    design: Design
    order: str
    """``random`` or ``given``."""
    constraints: Constraints
    replicates: int
    seed: int
    settings: Settings
    metrics: tuple[Metric, ...]
    budget: Budget
    executor: ExecutorChoice
    document: Mapping[str, Any]
    """The whole file, for comparison with the ledger of an earlier start."""

    @property
    def script_path(self) -> Path:
        """The training script."""
        return (self.path.parent / self.script).resolve()

    @property
    def patterns(self) -> tuple[MetricPattern, ...]:
        """Expressions that find metrics in lines of the log."""
        return tuple(MetricPattern(name=each.name, regex=each.regex) for each in self.metrics if each.regex)


def read_study(path: Path) -> Study:
    """Read a study.

    Raises:
        ConfigError: If the file cannot be read, or a value is unknown, malformed or out of range. The message names the
            file and the key.
    """
    document = parse_yaml(read_bounded(path, f"the study {path}", to_do="give the path of STUDY.yaml"), str(path))
    try:
        return parse_study(document, path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_study(document: object, path: Path) -> Study:
    """Return the study in a parsed file.

    Args:
        document: The content.
        path: The file. Paths in it are relative to its folder.

    Raises:
        ConfigError: If a value is unknown, malformed or out of range. The message names the key.
    """
    found = mapping(document, "the study")
    check_keys(found, _STUDY_KEYS, path="")
    for name in ("name", "script", "factors"):
        if name not in found:
            raise ConfigError(f"{name}: missing, expected {'factors with levels' if name == 'factors' else 'a text'}")
    factors = tuple(_factor(name, value) for name, value in mapping(found["factors"], "factors").items())
    if not factors:
        raise ConfigError("factors: found none, expected at least one, for example samples: [1000, 2000]")
    metrics = sequence(found.get("metrics", []), "metrics")
    study = Study(
        path=path,
        name=text_of(found["name"], "name"),
        script=text_of(found["script"], "script"),
        args=tuple(scalar_text(each, f"args[{at}]") for at, each in enumerate(sequence(found.get("args", []), "args"))),
        factors=factors,
        design=_design(found.get("design", "full"), factors),
        order=choice_of(found.get("order", "random"), "order", ("random", "given")),
        constraints=decode(Constraints, plain_of(found.get("constraints", {})), path="constraints"),
        replicates=whole_of(found.get("replicates", 1), "replicates", least=1, most=MAX_RUNS),
        seed=whole_of(found.get("seed", 1), "seed", least=0, most=2**32 - 1),
        settings=_settings({key: found[key] for key in _SETTINGS_KEYS if key in found}, path=""),
        metrics=tuple(decode(Metric, plain_of(each), path=f"metrics[{at}]") for at, each in enumerate(metrics)),
        budget=decode(Budget, plain_of(found.get("budget", {})), path="budget"),
        executor=_executor(found.get("executor", "simulate")),
        document=found,
    )
    # Reading this property compiles the regular expressions, so a wrong one is found here.
    _ = study.patterns
    if len({metric.name for metric in study.metrics}) < len(study.metrics):
        raise ConfigError("metrics: two have the same name, expected distinct names")
    return study


def _factor(name: object, value: object) -> Factor:
    """Return a factor: a list of levels, or levels with settings."""
    path = f"factors.{printable(str(name), max_chars=60)}"
    name = _name(name, path)
    if isinstance(value, Mapping):
        # Use levels as keys of the settings. With the keys of the file, the level 5e-5 once lost its settings.
        levels = tuple(level_of(key, f"{path}.{key}") for key in value)
        settings = {
            level: _settings(mapping(each or {}, f"{path}.{key}"), f"{path}.{key}.")
            for level, (key, each) in zip(levels, value.items(), strict=True)
        }
    else:
        levels = tuple(level_of(each, f"{path}[{at}]") for at, each in enumerate(sequence(value, path)))
        settings = {}
    if not 1 <= len(levels) <= _MAX_LEVELS:
        raise ConfigError(f"{path}: found {len(levels)} levels, expected 1 to {_MAX_LEVELS}")
    # True and 1 are two levels, although they are equal in Python.
    if len(set(map(_exact, levels))) < len(levels):
        raise ConfigError(f"{path}: two levels are equal, expected distinct levels")
    if name == "learning_rate_rule":
        for level in levels:
            choice_of(level, path, LEARNING_RATE_RULES)
    return Factor(name=name, levels=levels, settings=settings)


def _name(value: object, path: str) -> str:
    """Return the name of a factor or of a further quantity, which becomes a column of the results."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{path}: expected a name of letters, digits and _ that does not start with a digit")
    # A factor with such a name once replaced the column.
    if value in RESERVED:
        raise ConfigError(
            f"{path}: {value} is a column of the results, expected another name\n"
            "  to do: rename it, also in placeholders"
        )
    return value


def _exact(level: Level) -> tuple[str, Level]:
    """Return a key that tells the level true from the level 1, which are equal in Python."""
    return ("bool" if isinstance(level, bool) else "", level)


def _design(value: object, factors: Sequence[Factor]) -> Design:
    """Return the design: ``full``, a fraction or a table."""
    if value == "full":
        return Design(kind="full")
    found = mapping(value, "design", expected="full, {fraction: RUNS} or {table: [...]}")
    check_keys(found, ("fraction", "table"), "design.")
    if len(found) != 1:
        raise ConfigError("design: expected full, {fraction: RUNS} or {table: [...]}")
    if "fraction" in found:
        return Design(kind="fraction", num_runs=whole_of(found["fraction"], "design.fraction", least=1, most=MAX_RUNS))
    rows = sequence(found["table"], "design.table")
    if not 1 <= len(rows) <= MAX_RUNS:
        raise ConfigError(f"design.table: found {len(rows)} rows, expected 1 to {MAX_RUNS}")
    return Design(kind="table", table=tuple(_row(row, f"design.table[{at}]", factors) for at, row in enumerate(rows)))


def _row(value: object, path: str, factors: Sequence[Factor]) -> Mapping[str, Level]:
    """Return a row of a table design, which has one level of each factor."""
    stated = mapping(value, path)
    check_keys(stated, [factor.name for factor in factors], f"{path}.")
    row = {name: level_of(level, f"{path}.{name}") for name, level in stated.items()}
    for factor in factors:
        if factor.name not in row:
            raise ConfigError(f"{path}.{factor.name}: missing, expected a level of the factor")
        # `_exact` tells the level true from the level 1, which are equal in Python.
        if _exact(row[factor.name]) not in map(_exact, factor.levels):
            known = ", ".join(map(str, factor.levels))
            raise ConfigError(f"{path}.{factor.name}: found {row[factor.name]!r}, expected one of {known}")
    return {factor.name: row[factor.name] for factor in factors}


def _settings(found: Mapping[str, Any], path: str) -> Settings:
    """Return the settings of the study, or of a level.

    Args:
        found: The settings as the file states them.
        path: Key of the level with a dot at its end, for messages. Empty for the study.
    """
    check_keys(found, _SETTINGS_KEYS, path)
    groups = tuple(
        _group(each, f"{path}groups[{at}]")
        for at, each in enumerate(sequence(found.get("groups", []), f"{path}groups"))
    )
    options = _options(mapping(found.get("options", {}), f"{path}options"), f"{path}options")
    price_option = next((name for name in options if name in PRICE_OPTIONS), None)
    if path and price_option is not None:
        raise ConfigError(
            f"{path}options.{price_option}: found in a level, expected in the options of the study, because all runs "
            "have the same prices"
        )
    minutes = found.get("expected_minutes")
    if minutes is not None and not (isinstance(minutes, (int, float)) and 0 < minutes < math.inf):
        raise ConfigError(f"{path}expected_minutes: found {minutes!r}, expected a number above 0")
    ranks = found.get("ranks")
    return Settings(
        groups=groups,
        channels=texts_of(found.get("channels", {}), f"{path}channels"),
        environment=_environment(found.get("environment", {}), f"{path}environment"),
        options=options,
        values=_values(mapping(found.get("values", {}), f"{path}values"), f"{path}values"),
        expected_minutes=None if minutes is None else float(minutes),
        ranks=None if ranks is None else whole_of(ranks, f"{path}ranks", least=1, most=1_000_000),
    )


def _values(found: Mapping[str, Any], path: str) -> Mapping[str, Level]:
    """Return the further quantities that placeholders may name."""
    values = {}
    for key, value in found.items():
        own = f"{path}.{printable(str(key), max_chars=60)}"
        if key in _NO_VALUES:
            raise ConfigError(f"{own}: expected {_NO_VALUES[key]}")
        values[_name(key, own)] = (
            choice_of(value, own, LEARNING_RATE_RULES) if key == "learning_rate_rule" else level_of(value, own)
        )
    return values


def _group(value: object, path: str) -> str:
    """Return the text of a group. A text with placeholders is checked later, when they are replaced."""
    text = text_of(value, path)
    if not placeholders([text]):
        check_group(text, path)
    return text


def check_group(text: str, path: str) -> None:
    """Raise `ConfigError` unless the text of a group is ``NAME=TYPE:COUNT``. Messages name ``path``, not the flag."""
    try:
        parse_group(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).replace('--group ', '')}") from error


def _options(found: Mapping[str, Any], path: str) -> Mapping[str, object]:
    """Return launch options by the names of a configuration file. The file may use the names of the flags too."""
    known = {each.name: each for each in fields(LaunchOptions)}
    name_of_flag = {flag_of(each).removeprefix("--").replace("-", "_"): name for name, each in known.items()}
    options: dict[str, object] = {}
    try:
        for key, value in found.items():
            name = str(key).replace("-", "_")
            name = name_of_flag.get(name, name)
            if name in options:
                raise ConfigError(f"{name} is stated twice, expected one of both names")
            options[name] = tuple(value) if isinstance(value, list) else value
            stated_flags({name: value})  # raises for an unknown name
            # Check the value as a job does, because nproc_per_node with the value 0 once ended in a ZeroDivisionError.
            # Some options are allowed only with one data service. The study may state this service elsewhere, for
            # example for a level (a value of a factor). So check such an option together with its service.
            needed_service = known[name].metadata["data_service"] or known["data_service"].default
            resolved_options = _resolved({"data_service": needed_service, name: options[name]})
            resolved = getattr(resolved_options, name)
            # Replace a text by the value that a job reads from it, such as the number in "2". A path stays a text,
            # because it is relative to the study.
            if isinstance(value, str) and not isinstance(resolved, Path):
                options[name] = resolved
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return options


def check_options(options: Mapping[str, object]) -> None:
    """Raise `ConfigError` if a launch option of a run cannot be used with another one."""
    try:
        _resolved(options)
    except ConfigError as error:
        raise ConfigError(f"options: {error}") from error


def _resolved(options: Mapping[str, object]) -> LaunchOptions:
    """Return launch options as a job would read them from flags, with any script."""
    return resolve_options(argparse.Namespace(script="-", **options), {}, None)


def _environment(value: object, path: str) -> Mapping[str, str]:
    """Return variables by name. Raise `ConfigError` for a name that no variable can have."""
    found = texts_of(value, path)
    for name in found:
        # Reject the name here, because it would fail only when the first run starts.
        if not name or "=" in name or "\0" in name:
            shown = printable(repr(name), max_chars=60)
            raise ConfigError(f"{path}: found the name {shown}, expected a name of a variable, without =")
    return found


def _executor(value: object) -> ExecutorChoice:
    """Return the executor: its name, or its name with settings."""
    if isinstance(value, str):
        return ExecutorChoice(kind=choice_of(value, "executor", _EXECUTORS))
    found = mapping(value, "executor", expected=f"one of {', '.join(_EXECUTORS)}, with its settings")
    check_keys(found, _EXECUTORS, "executor.")
    if len(found) != 1:
        raise ConfigError(f"executor: found {len(found)} entries, expected one of {', '.join(_EXECUTORS)}")
    ((kind, settings),) = found.items()
    # `launch: FILE` is short for `launch: {cluster_file: FILE}`.
    if kind == "launch" and isinstance(settings, str):
        settings = {"cluster_file": settings}
    return ExecutorChoice(kind=kind, settings=mapping(settings or {}, f"executor.{kind}"))

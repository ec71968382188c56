"""Derives the quantities of each run from the factors' levels and from the study's constraints. Exact arithmetic.

======================  =================================================================================
ranks, hosts            from the trainer groups and ``nproc_per_node``
global_batch            batch_per_device x ranks, unless the study fixes the global batch
batch_per_device        global_batch / ranks
training_samples        samples x train_share
steps                   if the study fixes them: stated steps x smallest global batch / global_batch, rounded
epochs                  steps before rounding x global_batch / training_samples
learning_rate           stated rate x a factor, which the rule computes from the ratio
                        global_batch / smallest global batch of the study
======================  =================================================================================

The stated steps change with the global batch, and the stated learning rate changes by its rule. In these cases
``base_steps`` and ``base_learning_rate`` keep the stated values. If any other quantity is stated and a different value
follows for it, this is an error.

If a quantity should be whole and is not, such as 2.5 epochs, it stays as it is. `hetero.decide.studies.checks` reports
it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from hetero.cluster import Role
from hetero.cluster.roles import assign_roles
from hetero.decide.studies.placeholders import filled
from hetero.decide.studies.runs import Level
from hetero.decide.studies.study_file import Constraints, Settings, Study, check_group, check_options
from hetero.errors import ConfigError
from hetero.pricing import Catalogue
from hetero.simulate.simulate import parse_group

__all__ = ["Cell", "derive", "merged_settings", "num_hosts", "num_ranks", "trainer_groups"]

_INPUTS = ("samples", "steps", "epochs", "batch_per_device", "global_batch", "learning_rate", "learning_rate_rule")
_BASE = "base_"
_MAY_CHANGE = ("steps", "learning_rate")
_SOURCES = {
    "ranks": "groups and nproc_per_node",
    "hosts": "groups",
    "training_samples": "samples and train_share",
    "global_batch": "batch_per_device and ranks",
    "batch_per_device": "global_batch and ranks",
    "steps": "epochs, training samples and global_batch",
    "epochs": "steps, global_batch and training samples",
}
"""Where each quantity comes from if it is not stated, for messages."""
_TO_CHECK = ("memory_gb_per_sample", "memory_gb_fixed", "data_gb", "volume_gb")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of levels, with everything that follows from it."""

    levels: Mapping[str, Level]
    settings: Settings
    """Settings of the study and of the levels together, with the levels among their values."""
    quantities: dict[str, Level]
    """Levels, further values of the settings, and derived quantities."""


def merged_settings(study: Study, levels: Mapping[str, Level]) -> Settings:
    """Return the settings of a run: those of the study and of its levels.

    A setting of a level replaces the same setting of the study. The groups of a level replace all groups of the study.
    The run's level of each factor becomes a value with the factor's name, and replaces any other value of this name.
    Placeholders in the groups are replaced by the values. Placeholders in other texts are replaced by `plan_study`,
    which knows the quantities that follow from the groups.

    Raises:
        ConfigError: If the options of different levels cannot be used together, or a group is malformed.
    """
    found = study.settings
    for factor in study.factors:
        level = factor.settings.get(levels[factor.name])
        if level is not None:
            found = Settings(
                groups=level.groups or found.groups,
                channels={**found.channels, **level.channels},
                environment={**found.environment, **level.environment},
                options={**found.options, **level.options},
                values={**found.values, **level.values},
                expected_minutes=found.expected_minutes if level.expected_minutes is None else level.expected_minutes,
                ranks=found.ranks if level.ranks is None else level.ranks,
            )
    check_options(found.options)
    values = {**found.values, **levels}
    groups = tuple(filled(text, values, f"groups[{at}]") for at, text in enumerate(found.groups))
    for at, text in enumerate(groups):
        check_group(text, f"groups[{at}]")
    return dataclasses.replace(found, values=values, groups=groups)


def trainer_groups(settings: Settings) -> list[tuple[str, int]]:
    """Return instance type and number of hosts of each group that trains.

    Raises:
        ClusterError: If the role of a group is unclear.
    """
    groups = [parse_group(text) for text in settings.groups]
    if not groups:
        return []
    stated = settings.options.get("roles", ())
    role_flags = [str(each) for each in stated] if isinstance(stated, (list, tuple)) else []
    names_and_types = [(group.name, group.instance_type) for group in groups]
    roles = assign_roles(names_and_types, role_flags, source="groups of the study")
    return [
        (group.instance_type, group.count) for group, role in zip(groups, roles, strict=True) if role is Role.TRAINER
    ]


def num_ranks(settings: Settings, catalogue: Catalogue) -> int:
    """Return the ranks of the job.

    Without ``nproc_per_node``, a host has one rank per accelerator that the catalogue states. It has one rank without
    accelerators, or if TensorFlow trains. A study without groups has one host, unless a level states ``ranks`` or
    ``hosts``.
    """
    if settings.ranks is not None:
        return settings.ranks
    if not settings.groups and "ranks" in settings.values:
        return _whole("ranks", settings.values)
    stated_per_host = settings.options.get("nproc_per_node")
    with_tensorflow = settings.options.get("framework") == "tensorflow" or settings.options.get("data_service") == "tf"
    number = 0
    # Without groups, the type of the hosts is unknown.
    for instance_type, count in trainer_groups(settings) or [("", num_hosts(settings))]:
        info = catalogue.find(instance_type)
        default_per_host = 1 if with_tensorflow or info is None else info.num_accelerators or 1
        number += count * (stated_per_host if isinstance(stated_per_host, int) else default_per_host)
    return number


def num_hosts(settings: Settings) -> int:
    """Return the hosts of the job that train."""
    if settings.groups:
        return sum(count for _, count in trainer_groups(settings))
    # Read a level ``hosts`` too. In a SageMaker study without groups, its levels 1, 2 and 4 once gave one host in all
    # runs.
    return _whole("hosts", settings.values) if "hosts" in settings.values else 1


def derive(study: Study, rows: Sequence[Mapping[str, Level]], catalogue: Catalogue) -> list[Cell]:
    """Return the cells of a study, one for each row of levels.

    A study states its steps and its learning rate for the smallest global batch of these rows, see `Constraints`. In
    cells with larger batches they change, and ``base_steps`` and ``base_learning_rate`` keep the stated values.

    Raises:
        ConfigError: If a quantity is missing or is not a number, or if two statements contradict each other.
        ClusterError: If the role of a group is unclear.
    """
    constraints = study.constraints
    settings_of_rows = [merged_settings(study, levels) for levels in rows]
    stated_of_rows = [_stated(constraints, settings.values) for settings in settings_of_rows]
    ranks_of_rows = [num_ranks(settings, catalogue) for settings in settings_of_rows]
    batches = [
        _global_batch(constraints, stated, ranks) for stated, ranks in zip(stated_of_rows, ranks_of_rows, strict=True)
    ]
    smallest = min((batch for batch in batches if batch is not None), default=None)
    cells: list[Cell] = []
    for levels, settings, stated, ranks, batch in zip(
        rows, settings_of_rows, stated_of_rows, ranks_of_rows, batches, strict=True
    ):
        derived = {"ranks": ranks, "hosts": num_hosts(settings), **_derived(study, stated, ranks, batch, smallest)}
        quantities = _merged_quantities(constraints, settings, stated, derived)
        cells.append(Cell(levels=levels, settings=settings, quantities=quantities))
    # If a quantity changes in one cell, give all cells its base value. Its column in the results then has no gaps.
    changed = [name for name in _MAY_CHANGE if any(_BASE + name in cell.quantities for cell in cells)]
    for cell, name in itertools.product(cells, changed):
        if name in cell.quantities:
            cell.quantities.setdefault(_BASE + name, cell.quantities[name])
    return cells


def _merged_quantities(
    constraints: Constraints, settings: Settings, stated: Mapping[str, Level], derived: Mapping[str, Level]
) -> dict[str, Level]:
    """Return the stated and the derived quantities of a cell.

    If the steps or the learning rate change with the global batch, ``base_NAME`` keeps the stated value.

    Raises:
        ConfigError: If any other quantity is stated and a different value is derived for it.
    """
    # The results have a column for each quantity. The amounts in `_TO_CHECK` serve only the checks. So an amount that
    # is missing or 0 gets no column.
    unstated = {name for name in _TO_CHECK if not stated.get(name)}
    given = {**{name: value for name, value in stated.items() if name not in unstated}, **settings.values}
    # Without ``fix``, the steps follow from the epochs, so stated steps that differ contradict the epochs.
    may_change = _MAY_CHANGE if constraints.fix else ("learning_rate",)
    changed = {}
    for name, value in derived.items():
        if name in given and given[name] != value:
            # Raise an error, because a derived quantity once replaced a stated one without a message.
            if name not in may_change:
                raise ConfigError(
                    f"{name}: found {given[name]}, but {value} follows from {_SOURCES[name]}\n"
                    f"  to do: remove {name}, or one of those from which it follows"
                )
            changed[f"{_BASE}{name}"] = given[name]
    return {**given, **changed, **derived}


def _stated(constraints: Constraints, values: Mapping[str, Level]) -> dict[str, Level]:
    """Return the quantities that a run's values or the constraints state. A value counts before a constraint."""
    found = {name: values.get(name, getattr(constraints, name)) for name in (*_INPUTS, *_TO_CHECK)}
    return {name: value for name, value in found.items() if value is not None}


def _global_batch(constraints: Constraints, stated: Mapping[str, Level], ranks: int) -> Fraction | None:
    """Return the global batch of a cell, or None if nothing states a batch."""
    if constraints.fix == "global_batch":
        if "global_batch" not in stated:
            raise ConfigError("constraints.global_batch: missing, needed by fix: global_batch")
        return _number("global_batch", stated)
    if "batch_per_device" in stated:
        return _number("batch_per_device", stated) * ranks
    return _number("global_batch", stated) if "global_batch" in stated else None


def _derived(
    study: Study,
    stated: Mapping[str, Level],
    ranks: int,
    batch: Fraction | None,
    smallest: Fraction | None,
) -> dict[str, Level]:
    """Return the quantities of a cell that follow from the stated ones.

    Args:
        study: The study.
        stated: The stated quantities of the cell.
        ranks: Its ranks.
        batch: Its global batch. None if nothing states a batch.
        smallest: The smallest global batch of the study.

    Raises:
        ConfigError: If no sample is left to train with, or a learning rate is missing for its rule.
    """
    found: dict[str, Level] = {}
    samples = None
    if "samples" in stated:
        # Use the decimal digits as written: 0.9 is nine tenths here, not the nearest binary number.
        share = study.constraints.train_share
        samples = Fraction(math.floor(_number("samples", stated) * Fraction(str(share))))
        # Reject a train_share that leaves no sample, because it would be a ZeroDivisionError later.
        if samples < 1:
            raise ConfigError(
                f"samples: found {stated['samples']} with train_share {share:g}, which leaves no sample to train with\n"
                "  to do: use more samples"
            )
        found["training_samples"] = int(samples)
    if batch is not None and smallest is not None:
        found["global_batch"] = _level(batch)
        found["batch_per_device"] = _level(batch / ranks)
        if "learning_rate" in stated:
            found["learning_rate"] = _learning_rate(stated, batch / smallest)
        elif stated.get("learning_rate_rule", "kept") != "kept":
            raise ConfigError(
                f"learning_rate_rule: found {stated['learning_rate_rule']} without learning_rate, so no rate changes\n"
                "  to do: state learning_rate, that of the smallest global batch, and use {learning_rate} in args"
            )
    elif stated.get("learning_rate_rule", "kept") != "kept":
        raise ConfigError(
            f"learning_rate_rule: found {stated['learning_rate_rule']} without a global batch, so no rate changes\n"
            "  to do: state batch_per_device or global_batch, or remove the rule"
        )
    found |= _duration(study.constraints, stated, samples, batch, smallest)
    return found


def _duration(
    constraints: Constraints,
    stated: Mapping[str, Level],
    samples: Fraction | None,
    batch: Fraction | None,
    smallest: Fraction | None,
) -> dict[str, Level]:
    """Return steps and epochs. Fixed steps give the epochs. Otherwise the epochs give the steps.

    Empty if neither can be computed. ``samples`` are those to train with. `_derived` explains the other arguments.
    """
    if constraints.fix == "steps" or (constraints.fix == "global_batch" and "steps" in stated):
        # The message shows these names, so they are those of the constraints.
        needed = {"steps": stated.get("steps"), "samples": samples, "batch_per_device": batch}
        missing = [name for name, value in needed.items() if value is None]
        if missing or samples is None or batch is None or smallest is None:
            raise ConfigError(f"constraints.{missing[0]}: missing, needed to fix the number of steps")
        # The stated steps belong to the smallest batch. For the same samples, the published study makes 84,375 steps on
        # one GPU and 2,637 steps on 32 GPUs.
        steps = _number("steps", stated) * smallest / batch
        # Half a step is rounded up. Python's `round` would give 2 for 2.5.
        return {"steps": math.floor(steps + Fraction(1, 2)), "epochs": _level(steps * batch / samples)}
    if "epochs" in stated and samples is not None and batch is not None:
        epochs = _number("epochs", stated)
        return {"steps": math.floor(epochs * samples / batch + Fraction(1, 2)), "epochs": _level(epochs)}
    return {}


def _learning_rate(stated: Mapping[str, Level], ratio: Fraction) -> float:
    """Return the learning rate of a cell whose global batch is ``ratio`` times the smallest one."""
    rule = str(stated.get("learning_rate_rule", "kept"))
    # The published study has sqrt(32) x 5e-5 = 2.83e-4 on 32 GPUs.
    factor = {"kept": 1.0, "sqrt": math.sqrt(ratio), "linear": float(ratio)}[rule]
    return float(_number("learning_rate", stated)) * factor


def _number(name: str, stated: Mapping[str, Level]) -> Fraction:
    value = stated[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"{name}: found {value!r}, expected a number above 0")
    # Convert the number as it is written in the file: 0.1 is a tenth here, not the nearest binary number.
    return Fraction(str(value))


def _whole(name: str, stated: Mapping[str, Level]) -> int:
    number = _number(name, stated)
    if number.denominator != 1:
        raise ConfigError(f"{name}: found {stated[name]!r}, expected a whole number above 0")
    return int(number)


def _level(value: Fraction) -> Level:
    """Return a whole number as int, and any other number as float."""
    return int(value) if value.denominator == 1 else float(value)

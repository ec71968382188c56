"""Finds mistakes in a study before it costs money. Earlier studies of distributed training made each of these mistakes.

========  =====================================================================================
ST-01     the global batch grows and the learning rate does not
ST-02     the volume, or the local storage, is smaller than the data
ST-03     the batch per device needs more memory than was measured, or than the device has
ST-04     epochs that are not whole
ST-05     a batch per device that is not whole
ST-06     several hosts where one larger host of the family would do: scale up before you scale out
ST-07     a factor that no run uses
ST-08     factors that a design does not separate
ST-09     more samples in a step than in an epoch
ST-10     checks that need the instance types of the runs, which the study does not state
ST-11     a budget that the runs together are expected to exceed
========  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from hetero.decide.studies.cells.constraints import Cell, num_ranks, trainer_groups
from hetero.decide.studies.placeholders import level_text, placeholders
from hetero.decide.studies.plan import StudyPlan
from hetero.decide.studies.study_file import Study
from hetero.documents.findings import ERROR, WARNING, Finding
from hetero.documents.text import counted
from hetero.errors import ConfigError
from hetero.pricing import Catalogue, InstanceTypeInfo, family_of
from hetero.report.model import Report, load_report
from hetero.simulate.simulate import parse_group

__all__ = ["CHECKS", "MAX_CORRELATION", "check_study"]

MAX_CORRELATION = 0.2
"""Largest absolute correlation between factors of an orthogonal design, as the source of these checks states it."""
_DEFAULT_VOLUME_GB = 30 * 2**30 / 1e9
"""Volume of a SageMaker host without a stated size: 30 GiB."""
_MEMORY_SHARE = 0.95
"""Share of a device's memory that a job can use. The rest belongs to the driver and the framework."""
_MOST_NAMED = 4


def check_study(plan: StudyPlan, catalogue: Catalogue, *, selected: StudyPlan | None = None) -> list[Finding]:
    """Return the findings about a study, in the order of their numbers. Empty if all checks pass.

    Args:
        plan: The plan.
        catalogue: Instance types and their prices.
        selected: The plan with the runs that are to be executed, for the budget. Default: all.

    Raises:
        ConfigError: If the report in ``constraints.measured`` cannot be read.
    """
    return [
        Finding(number=number, severity=severity, found=found, fix=fix)
        # The check of the budget gets only the runs that are to be executed. The other checks get the whole design.
        for number, check in CHECKS.items()
        for severity, found, fix in check((selected or plan) if number == "ST-11" else plan, catalogue)
    ]


_Found = Iterator[tuple[str, str, str]]


def _learning_rate_is_kept(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-01 if global batches differ and the learning rate stays the same."""
    batches_of: dict[object, set[float]] = {}  # by learning rate, which is None if the study states none
    for cell in plan.cells:
        batch = cell.quantities.get("global_batch")
        if isinstance(batch, (int, float)):
            batches_of.setdefault(cell.quantities.get("learning_rate"), set()).add(float(batch))
    for rate, batches in batches_of.items():
        least, most = min(batches), max(batches)
        if most > least:
            stated = "the study states no learning rate" if rate is None else f"the learning rate is {rate:g} in all"
            # Without a rate, a learning_rate_rule would be rejected, so the advice begins with the rate.
            rate_first = (
                "state learning_rate, that of the smallest global batch, and give {learning_rate} to the script. Then "
                if rate is None
                else ""
            )
            yield (
                WARNING,
                (
                    f"the global batch grows from {least:g} to {most:g}, {most / least:g} times, and {stated}. A step "
                    "then averages over more samples but moves the weights no further. So runs with the same epochs "
                    "learn less, and a difference in quality is due to the batch, not to the cluster"
                ),
                (
                    f"{rate_first}add learning_rate_rule: sqrt (Adam, LAMB) or linear (SGD) to the constraints or as a "
                    "factor, or keep the batch with fix: global_batch, or go on if this is what the study is about"
                ),
            )


def _volume_is_too_small(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-02 for each instance type whose volume or local storage is smaller than the data."""
    default_gb = _DEFAULT_VOLUME_GB if plan.study.executor.kind == "sagemaker" else None
    seen: set[tuple[str, float, float]] = set()
    for cell in plan.cells:
        data_gb = cell.quantities.get("data_gb")
        if not isinstance(data_gb, (int, float)):
            continue
        for instance_type, _ in trainer_groups(cell.settings):
            info = catalogue.find(instance_type)
            # A type with local storage gets no volume, whatever size is stated.
            local_gb = None if info is None else info.instance_storage_gb
            room_gb = local_gb or cell.quantities.get("volume_gb", default_gb)
            if not isinstance(room_gb, (int, float)) or room_gb >= data_gb or (instance_type, room_gb, data_gb) in seen:
                continue
            seen.add((instance_type, room_gb, data_gb))
            what = "local storage" if local_gb else "volume"
            # A volume needs more room than the data takes, because the job also writes its model.
            yield (
                ERROR,
                (
                    f"the {what} of {instance_type} holds {room_gb:.0f} GB and the data has {data_gb:g} GB. The job "
                    "fails after its download, or when it writes its model"
                ),
                "use input mode FastFile, or a type with more local storage"
                if local_gb
                else f"set volume_gb to at least {math.ceil(1.2 * data_gb)}, and volume_size of the estimator",
            )


def _memory_is_exceeded(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-03 if a batch per device needs more memory than the device has, or than a report measured."""
    report = _measured(plan.study)
    seen: set[tuple[object, ...]] = set()
    for cell in plan.cells:
        batch = cell.quantities.get("batch_per_device")
        if not isinstance(batch, (int, float)):
            continue
        per_sample = cell.quantities.get("memory_gb_per_sample")
        fixed_gb = _as_float(cell.quantities.get("memory_gb_fixed", 0.0))
        for instance_type, _ in trainer_groups(cell.settings):
            # Cells that differ in another factor would give the same finding again.
            key = (instance_type, batch, per_sample, fixed_gb)
            if key in seen:
                continue
            seen.add(key)
            info = catalogue.find(instance_type)
            room_gb = None if info is None else _device_gb(info, cell, catalogue)
            if report is not None:
                yield from _beyond_report(report, instance_type, float(batch), room_gb)
            if room_gb is None or not isinstance(per_sample, (int, float)) or per_sample <= 0:
                continue
            needed_gb = fixed_gb + per_sample * float(batch)
            if needed_gb > _MEMORY_SHARE * room_gb:
                max_batch = math.floor((_MEMORY_SHARE * room_gb - fixed_gb) / per_sample)
                yield (
                    ERROR,
                    (
                        f"a batch of {batch:g} per device needs {needed_gb:.1f} GB ({fixed_gb:g} GB "
                        f"and {per_sample:g} GB per sample), and a device of {instance_type} has {room_gb:.1f} GB. The "
                        "run would end without memory"
                    ),
                    f"use at most {max_batch} per device there"
                    if max_batch >= 1
                    else "use a type with more memory per device, because not even one sample fits",
                )


def _measured(study: Study) -> Report | None:
    stated = study.constraints.measured
    return load_report(study.path.parent / Path(stated)) if stated else None


def _device_gb(info: InstanceTypeInfo, cell: Cell, catalogue: Catalogue) -> float | None:
    """Return the memory of one device in 10^9 bytes: of an accelerator, or a rank's share of its host."""
    if info.num_accelerators:
        return None if info.accelerator_memory_gib is None else info.accelerator_memory_gib * 2**30 / 1e9
    if info.memory_gib is None:
        return None
    hosts = sum(count for _, count in trainer_groups(cell.settings)) or 1
    per_host = max(1, num_ranks(cell.settings, catalogue) // hosts)
    return info.memory_gib * 2**30 / 1e9 / per_host


def _beyond_report(report: Report, instance_type: str, batch: float, room_gb: float | None) -> _Found:
    """Yield ST-03 if a batch may need more memory than a device has, by the memory peak of an earlier run.

    The whole peak is assumed to be proportional to the batch. A part of it is fixed, so a batch that is larger than the
    measured one needs at most the computed memory. A smaller batch may need more, so it is not compared.
    """
    batches = [loader.batch_samples for rank in report.run.ranks for loader in rank.loaders if loader.num_steps]
    peaks_gb = [
        (usage.gpu_memory_peak_bytes or 0) / usage.num_gpus / 1e9 for usage in report.run.hosts if usage.num_gpus
    ]
    if not batches or not peaks_gb or batch <= max(batches) or room_gb is None:
        return
    measured_batch, peak_gb = max(batches), max(peaks_gb)
    needed_gb = peak_gb * batch / measured_batch
    if needed_gb > _MEMORY_SHARE * room_gb:
        yield (
            WARNING,
            (
                f"a batch of {batch:g} per device may need up to {needed_gb:.1f} GB, because the run "
                f"{report.run.run_id} used {peak_gb:.1f} GB with {measured_batch}, and a device of {instance_type} has "
                f"{room_gb:.1f} GB"
            ),
            "run one short job with this batch first, or state memory_gb_per_sample and memory_gb_fixed",
        )


def _epochs_are_not_whole(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-04 if the steps of a run are not a whole number of epochs."""
    found: dict[float, Cell] = {}
    for cell in plan.cells:
        epochs = cell.quantities.get("epochs")
        # Without samples or a batch, the script alone decides what an epoch is.
        is_derived = {"steps", "global_batch", "training_samples"} <= cell.quantities.keys()
        if is_derived and isinstance(epochs, float) and not epochs.is_integer():
            found.setdefault(epochs, cell)
    if not found:
        return
    shown = []
    for epochs, cell in list(found.items())[:_MOST_NAMED]:
        steps, batch, samples = (cell.quantities[name] for name in ("steps", "global_batch", "training_samples"))
        shown.append(f"{steps} steps of {batch} samples are {epochs:.6g} epochs of {samples} ({_levels_text(cell)})")
    more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    # A script that rounds its number of epochs trains for at least one epoch.
    worst = max(abs(max(1, round(epochs)) / epochs - 1) for epochs in found)
    suggestion = _whole_steps(plan)
    yield (
        WARNING,
        (
            f"epochs are not whole: {'; '.join(shown)}{more}. A script that takes whole epochs would reject them, or "
            f"train up to {worst:.1%} more or less"
        ),
        f"set steps to {suggestion}, which makes all epochs whole, or let the script end after {{steps}} steps"
        if suggestion
        else "change the epochs, or let the script end after {steps} steps",
    )


def _whole_steps(plan: StudyPlan) -> int | None:
    """Return the number of steps nearest to the stated one that makes all epochs whole.

    None if the study does not fix one number of steps, or its smallest batch is not whole.
    """
    if not plan.study.constraints.fix or any(factor.name == "steps" for factor in plan.study.factors):
        return None
    quantities = [cell.quantities for cell in plan.cells]
    batches = [each["global_batch"] for each in quantities]
    smallest, stated = min(map(_as_float, batches)), plan.study.constraints.steps
    if stated is None or not smallest.is_integer():
        return None
    # A run with a larger batch makes fewer steps, so all runs train equally many samples: steps x smallest batch. All
    # epochs are whole if this product is a multiple of the samples of each run.
    samples = math.lcm(*(int(_as_float(each["training_samples"])) for each in quantities))
    # The fewest steps that make all epochs whole. Each multiple of them does so too.
    fewest = samples // math.gcd(samples, int(smallest))
    return max(1, round(stated / fewest)) * fewest


def _batch_is_not_whole(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-05 if the ranks of a run do not divide its global batch."""
    seen: set[object] = set()
    for cell in plan.cells:
        batch = cell.quantities.get("batch_per_device")
        key = cell.quantities.get("global_batch"), cell.quantities["ranks"]
        if isinstance(batch, float) and not batch.is_integer() and key not in seen:
            seen.add(key)
            total, ranks = key
            next_whole = math.ceil(_as_float(total) / _as_float(ranks)) * int(_as_float(ranks))
            yield (
                ERROR,
                (
                    f"a global batch of {total} over {ranks} ranks is {batch:g} samples per device, which is not whole "
                    f"({_levels_text(cell)})"
                ),
                f"choose a global batch that all numbers of ranks divide, for example {next_whole} for this one",
            )


def _scales_out_before_up(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-06 if several hosts have no more accelerators than one larger host of their family."""
    seen: set[tuple[str, int]] = set()
    for cell in plan.cells:
        for instance_type, count in trainer_groups(cell.settings):
            info = catalogue.find(instance_type)
            if count < 2 or info is None or not info.num_accelerators or (instance_type, count) in seen:
                continue
            seen.add((instance_type, count))
            needed = count * info.num_accelerators
            larger = [
                other
                for other in catalogue.types()
                if family_of(other.instance_type) == family_of(info.instance_type)
                and other.accelerator == info.accelerator
                and (other.num_accelerators or 0) >= needed
            ]
            if larger:
                # The smallest type that suffices, and of equally large ones the cheapest.
                best = min(larger, key=lambda other: (other.num_accelerators or 0, other.hourly_usd or math.inf))
                yield (
                    WARNING,
                    (
                        f"{count} x {instance_type} have {counted(needed, 'accelerator')}, and one "
                        f"{best.instance_type} has {best.num_accelerators}. Gradients then stay within one machine, "
                        "and errors are easier to find"
                    ),
                    f"add a level with {best.instance_type}:1, or use it instead",
                )


def _factor_is_unused(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-07 for each factor whose levels change nothing in a run."""
    study = plan.study
    texts = [*study.args, *(text for cell in plan.cells for text in cell.settings.environment.values())]
    texts += [text for cell in plan.cells for text in cell.settings.channels.values()]
    # The groups of a cell have no placeholders left, so take the groups of the file.
    all_settings = [study.settings, *(each for factor in study.factors for each in factor.settings.values())]
    texts += [text for settings in all_settings for text in settings.groups]
    used_names = placeholders(texts)
    # A factor also acts through the quantities that follow from it.
    derived_from = {
        "learning_rate_rule": {"learning_rate"},
        "samples": {"samples", "training_samples", "epochs", "steps"},
        "steps": {"steps", "epochs"},
        "epochs": {"steps", "epochs"},
        "batch_per_device": {"batch_per_device", "global_batch", "epochs", "steps", "learning_rate"},
        "global_batch": {"batch_per_device", "global_batch", "epochs", "steps", "learning_rate"},
    }
    for factor in study.factors:
        # Levels with settings change a run by these. With SageMaker, a function of the user makes the jobs, and may use
        # any factor.
        if len(factor.levels) < 2 or factor.settings or study.executor.kind == "sagemaker":
            continue
        if not used_names & ({factor.name} | derived_from.get(factor.name, set())):
            yield (
                WARNING,
                f"no argument and no variable of a run uses the factor {factor.name}, so its levels are the same run",
                f"add {{{factor.name}}} to args, or settings to its levels",
            )


def _factors_are_not_separated(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-08 for the two factors with the largest correlation, if it is too large."""
    largest = None if plan.correlations is None else plan.correlations.largest
    if largest is not None and largest[0] >= MAX_CORRELATION:
        value, one, other = largest
        yield (
            WARNING,
            (
                f"{one} and {other} have a correlation of {value:.2f} in this design (below {MAX_CORRELATION} is "
                "wanted), so an effect of one of them may be due to the other"
            ),
            "use more runs, or design: full",
        )


def _step_exceeds_epoch(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-09 for the first run whose step takes more samples than an epoch has."""
    for cell in plan.cells:
        batch, samples = (cell.quantities.get(name) for name in ("global_batch", "training_samples"))
        if isinstance(batch, (int, float)) and isinstance(samples, int) and batch > samples:
            yield (
                ERROR,
                f"a step takes {batch:g} samples and there are {samples} training samples ({_levels_text(cell)})",
                "use more samples, fewer ranks, or a smaller batch per device",
            )
            return


def _types_are_unknown(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-10 if runs state no groups, because other checks need their instance types."""
    if any(not cell.settings.groups for cell in plan.cells):
        is_sagemaker = plan.study.executor.kind == "sagemaker"
        about_estimators = " The estimators of SageMaker are made later." if is_sagemaker else ""
        # The page of a study puts a full stop behind each finding, so a finding has none at its end.
        yield (
            WARNING,
            (
                "ST-02, ST-03, ST-06 and the cost in ST-11 were not checked for runs without groups, because their "
                f"instance types are unknown.{about_estimators}"
            ).removesuffix("."),
            'state the groups of the jobs, for example groups: ["trainer=ml.g5.xlarge:2"]',
        )


def _budget_is_too_small(plan: StudyPlan, catalogue: Catalogue) -> _Found:
    """Yield ST-11 if all runs together are expected to exceed the budget."""
    known = [(run, plan.expected_s[run.run_id] / 3600) for run in plan.runs if run.run_id in plan.expected_s]
    total_h = sum(hours for _, hours in known)
    total_usd = 0.0
    for run, hours in known:
        hosts = [(group.instance_type, group.count) for group in map(parse_group, run.groups)]
        # A missing price counts as 0 here, because a budget in USD is then rejected later.
        total_usd += (catalogue.hourly_usd(hosts) or 0.0) * hours
    # Runs without an expected duration may add to the sums.
    at_least = "at least " if len(known) < len(plan.runs) else ""
    for key, limit, total, unit in (
        ("hours", plan.study.budget.hours, total_h, "hours"),
        ("usd", plan.study.budget.usd, total_usd, "USD"),
    ):
        # A budget that is exactly the sum suffices, whatever the rounding of the sum.
        if limit is not None and total > limit * (1 + 1e-9):
            yield (
                ERROR,
                (
                    f"by expected_minutes, all {counted(len(plan.runs), 'run')} take {at_least}{total:,.2f} {unit}, "
                    f"and the budget is {limit:g}. The last runs would not start"
                ),
                (
                    f"set budget.{key} to at least {math.ceil(total)}, or plan fewer runs. With --ignore ST-11, the "
                    "study runs until the budget is spent"
                ),
            )


def _levels_text(cell: Cell) -> str:
    return ", ".join(f"{name} {level_text(level)}" for name, level in cell.levels.items())


def _as_float(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise ConfigError(f"found {value!r}, expected a number")
    return float(value)


CHECKS: dict[str, Callable[[StudyPlan, Catalogue], _Found]] = {
    "ST-01": _learning_rate_is_kept,
    "ST-02": _volume_is_too_small,
    "ST-03": _memory_is_exceeded,
    "ST-04": _epochs_are_not_whole,
    "ST-05": _batch_is_not_whole,
    "ST-06": _scales_out_before_up,
    "ST-07": _factor_is_unused,
    "ST-08": _factors_are_not_separated,
    "ST-09": _step_exceeds_epoch,
    "ST-10": _types_are_unknown,
    "ST-11": _budget_is_too_small,
}
"""The checks by number. A number never changes its meaning."""

"""Makes the runs of a study: rows of the design, quantities, replicates, arguments, and their order.

The order is random by default, because a machine that slows down over the day would otherwise look like an effect of a
factor.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero.config import resolve_prices
from hetero.decide.studies.cells.constraints import Cell, derive
from hetero.decide.studies.cells.designs import Correlations, correlations, rows_of
from hetero.decide.studies.placeholders import filled, level_text
from hetero.decide.studies.runs import Level, PlannedRun
from hetero.decide.studies.study_file import MAX_RUNS, PRICE_OPTIONS, Study
from hetero.errors import ConfigError
from hetero.pricing import Catalogue

__all__ = ["StudyPlan", "catalogue_of", "level_text", "only", "plan_study"]

_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=-]+")
_MAX_ID_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """A study with everything that follows from its file."""

    study: Study
    cells: tuple[Cell, ...]
    """The rows of the design, in its order. A row that occurs twice is two cells."""
    runs: tuple[PlannedRun, ...]
    """All runs, in the order of their execution."""
    cell_of: Mapping[str, Cell]
    """Cell of each run by the run's id."""
    expected_s: Mapping[str, float]
    """Stated duration of runs by their id."""
    correlations: Correlations | None
    """None for a study with one factor."""


def catalogue_of(options: Mapping[str, object]) -> Catalogue:
    """Return the catalogue with the prices that launch options state.

    Raises:
        ConfigError: If a price or a price list is malformed or unknown.
    """
    # `resolve_prices` takes what a parser of the command line returns.
    stated = {name: options.get(name) for name in PRICE_OPTIONS}
    return resolve_prices(argparse.Namespace(**stated)).catalogue()


def plan_study(study: Study, catalogue: Catalogue) -> StudyPlan:
    """Return the runs of a study.

    Raises:
        ConfigError: If a placeholder is unknown, a quantity is missing, or there are too many runs. The message names
            the file.
        ClusterError: If the role of a group is unclear.
    """
    try:
        return _plan_study(study, catalogue)
    except ConfigError as error:
        raise ConfigError(f"{study.path}: {error}") from error


def _plan_study(study: Study, catalogue: Catalogue) -> StudyPlan:
    """Return the runs of a study, see `plan_study`. Messages do not name the file."""
    rows = rows_of(study.design, study.factors, seed=study.seed)
    if len(rows) * study.replicates > MAX_RUNS:
        raise ConfigError(f"the study has {len(rows) * study.replicates} runs; expected at most {MAX_RUNS}")
    cells = tuple(derive(study, rows, catalogue))
    runs: list[PlannedRun] = []
    cell_of: dict[str, Cell] = {}
    expected_s: dict[str, float] = {}
    num_replicates: dict[tuple[object, ...], int] = {}
    for cell in cells:
        # If a table or a fraction has a combination twice, the second one counts as a replicate. The type is part of
        # the combination, because True equals 1.
        combination = tuple((name, type(level).__name__, level) for name, level in sorted(cell.levels.items()))
        for _ in range(study.replicates):
            num_replicates[combination] = num_replicates.get(combination, 0) + 1
            run = _run(study, cell, number=len(runs), replicate=num_replicates[combination])
            runs.append(run)
            cell_of[run.run_id] = cell
            if cell.settings.expected_minutes is not None:
                expected_s[run.run_id] = 60 * cell.settings.expected_minutes
    if study.order == "random":
        random.Random(study.seed).shuffle(runs)
    return StudyPlan(
        study=study,
        cells=cells,
        runs=tuple(runs),
        cell_of=cell_of,
        expected_s=expected_s,
        correlations=correlations(rows, study.factors) if len(study.factors) > 1 else None,
    )


def _run(study: Study, cell: Cell, *, number: int, replicate: int) -> PlannedRun:
    """Return the run of a cell with all placeholders filled in."""
    # Replicates differ in their seed, unless the seed is a factor.
    seed = cell.levels.get("seed", study.seed + replicate - 1)
    values: dict[str, Level] = {**cell.levels, **cell.quantities, "seed": seed, "replicate": replicate}
    shown = [f"{name}={level_text(level)}" for name, level in cell.levels.items()]
    # The id is the name of a folder, which may have at most 255 bytes.
    label = _UNSAFE.sub("_", "-".join(shown))[:_MAX_ID_CHARS]
    run_id = f"{number:03d}-{label}-r{replicate}"
    values["run_id"] = run_id
    settings = cell.settings
    folder = study.path.parent.resolve()
    options = dict(settings.options)
    if settings.groups and isinstance(values["ranks"], int) and study.executor.kind != "sagemaker":
        # State the ranks per host, because simulated hosts lack accelerators, and the launcher would start one rank per
        # host. On SageMaker, the user's function decides this.
        ranks, hosts = values["ranks"], int(values["hosts"])
        ranks_per_host = options.setdefault("nproc_per_node", max(1, ranks // hosts))
        num_started = ranks_per_host * hosts if isinstance(ranks_per_host, int) else 0
        # The quantities of the run, such as its global batch, hold only for the planned number of ranks.
        if num_started != ranks:
            raise ConfigError(
                f"ranks: found {ranks} for {', '.join(shown)}, but {ranks_per_host} on each of "
                f"{hosts} hosts are {num_started}\n"
                "  to do: state ranks that all hosts share equally, or nproc_per_node in the options"
            )
    return PlannedRun(
        run_id=run_id,
        levels={name: value for name, value in values.items() if name not in ("run_id", "replicate")},
        replicate=replicate,
        script=str(study.script_path),
        script_args=tuple(filled(text, values, f"args[{at}]") for at, text in enumerate(study.args)),
        groups=settings.groups,
        channels={
            name: str((folder / filled(path, values, f"channels.{name}")).resolve())
            for name, path in settings.channels.items()
        },
        options=options,
        environment={name: filled(text, values, f"environment.{name}") for name, text in settings.environment.items()},
    )


def only(plan: StudyPlan, levels: Mapping[str, str]) -> StudyPlan:
    """Return the plan with the runs that have these levels.

    Args:
        plan: The plan.
        levels: Level of some factors, as text.

    Raises:
        ConfigError: If a factor or a level is unknown.
    """
    factors = {factor.name: factor for factor in plan.study.factors}
    for name, text in levels.items():
        if name not in factors:
            raise ConfigError(f"--only {name}={text}: expected a factor, one of {', '.join(factors)}")
        known = [level_text(level) for level in factors[name].levels]
        if text not in known:
            raise ConfigError(f"--only {name}={text}: expected a level of {name}, one of {', '.join(known)}")
    runs = [
        run
        for run in plan.runs
        if all(level_text(plan.cell_of[run.run_id].levels[name]) == text for name, text in levels.items())
    ]
    return replace(plan, runs=tuple(runs))

"""Runs a study from its file to its results: plan, checks, runs, table and page."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetero.cluster import ClusterSpec, slug
from hetero.decide.studies.cells.constraints import Cell
from hetero.decide.studies.checks import CHECKS, check_study
from hetero.decide.studies.conduct import Progress, conduct, read_results
from hetero.decide.studies.executors import LaunchExecutor, SimulateExecutor, check_groups, groups_of, read_cluster
from hetero.decide.studies.file_values import whole_of
from hetero.decide.studies.ledger import LEDGER_FILE_NAME, digest_of_script
from hetero.decide.studies.output.page import PAGE_FILE_NAME, cell_table, correlation_text, notes, study_page
from hetero.decide.studies.output.table import (
    CSV_FILE_NAME,
    PARQUET_FILE_NAME,
    csv_text,
    rows,
    write_parquet,
)
from hetero.decide.studies.plan import StudyPlan, catalogue_of, level_text, only, plan_study
from hetero.decide.studies.runs import FAILED, STOPPED, Executor, PlannedRun, RunResult
from hetero.decide.studies.study_file import MAX_RUNS, Settings, Study, read_study
from hetero.documents.files import write_text
from hetero.documents.findings import ERROR, Finding
from hetero.documents.tables import MAX_ROWS
from hetero.documents.text import counted
from hetero.errors import ConfigError, ExitCode
from hetero.pricing import Catalogue
from hetero.system.scripts import find_script

__all__ = [
    "Preparation",
    "default_folder",
    "exit_code_of",
    "identity_of",
    "make_executor",
    "prepare_study",
    "preview_text",
    "progress_text",
    "results_text",
    "run_study",
    "write_results",
]

logger = logging.getLogger(__name__)

_SAME = (
    *("args", "factors", "design", "order", "constraints", "replicates", "seed", "groups", "channels", "options"),
    *("environment", "values"),
)
"""Keys of the file that must stay the same for the runs of a study to be comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A study before its first run."""

    plan: StudyPlan
    """The runs to execute."""
    whole: StudyPlan
    """All runs of the study. The results are of all that have ended."""
    catalogue: Catalogue
    findings: tuple[Finding, ...]

    def check(self, ignored: Sequence[str] = ()) -> None:
        """Raise `ConfigError` if there is an error that is not ignored.

        Args:
            ignored: Numbers of checks.
        """
        unknown = next((number for number in ignored if number not in CHECKS), None)
        if unknown is not None:
            raise ConfigError(f"--ignore {unknown}: unknown check; expected one of {', '.join(CHECKS)}")
        errors = [each for each in self.findings if each.severity == ERROR and each.number not in ignored]
        if errors:
            listed = "\n  ".join(str(each) for each in errors)
            numbers = " ".join(dict.fromkeys(f"--ignore {each.number}" for each in errors))
            raise ConfigError(
                f"the study has {counted(len(errors), 'error')}; nothing was run\n  {listed}\n  or: {numbers}"
            )

    def check_start(self) -> None:
        """Raise `ConfigError` if a run cannot start on this host, for example because its script does not exist."""
        # Without this check, a missing file was found when its run began, perhaps after hours.
        missing = list(dict.fromkeys(_missing(self.plan)))
        if missing:
            listed = "\n  ".join(missing[:MAX_ROWS])
            raise ConfigError(f"the runs of the study cannot start; nothing was run\n  {listed}")


def prepare_study(path: Path, *, levels: Mapping[str, str] | None = None, replicates: int | None = None) -> Preparation:
    """Read, plan and check a study.

    Args:
        path: STUDY.yaml.
        levels: Levels of factors. Runs with other levels are not executed.
        replicates: Runs per combination of levels. None for the number that the file states.

    Raises:
        ConfigError: If the file is malformed, a price or an earlier report cannot be read, or groups are not those of
            the cluster file.
        ClusterError: If the role of a group is unclear, or a cluster file is malformed.
    """
    # Read the file and plan all runs.
    study = _with_clusters(read_study(path))
    if replicates is not None:
        study = replace(study, replicates=whole_of(replicates, "--replicates", least=1, most=MAX_RUNS))
    options = dict(study.settings.options)
    if options.get("price_file"):
        # Paths in the file are relative to its folder.
        options["price_file"] = str(path.parent / str(options["price_file"]))
    catalogue = catalogue_of(options)
    whole = plan_study(study, catalogue)
    whole = replace(whole, runs=tuple(_with_folder(run, study) for run in whole.runs))
    _check_clusters(study, whole.cells)
    # Select the runs to execute. The budget is checked for these runs, and all else for the whole study.
    selected = only(whole, levels) if levels else whole
    findings = tuple(check_study(whole, catalogue, selected=selected))
    return Preparation(plan=selected, whole=whole, catalogue=catalogue, findings=findings)


def _missing(plan: StudyPlan) -> Iterator[str]:
    """Yield a sentence for each script and channel that the runs need and this host does not have."""
    # The channels of SageMaker are URIs, which the estimator's function uses.
    are_folders = plan.study.executor.kind != "sagemaker"
    for run in plan.runs:
        try:
            find_script(run.script, is_module=bool(run.options.get("module")))
        except ConfigError as error:
            yield str(error)
        for name, path in run.channels.items():
            if are_folders and not Path(path).is_dir():
                yield f"channels.{name}: {path} does not exist, expected a folder"


def _with_folder(run: PlannedRun, study: Study) -> PlannedRun:
    """Return a run with the folder of its study."""
    # A module is found by its name as the file states it, and not by a path in the study's folder.
    script = study.script if run.options.get("module") else run.script
    return replace(run, script=script, study_folder=str(study.path.parent.resolve()))


def _with_clusters(study: Study) -> Study:
    """Return the study. With ``hetero launch``, its cluster files give the groups that it does not state.

    A level may have its own cluster file in its options. The executor's cluster file gives the groups of the study.
    """
    if study.executor.kind != "launch":
        return study

    def with_groups(settings: Settings, path: object) -> Settings:
        """Return settings with the groups of a cluster file, if there is one and the settings state no groups."""
        if settings.groups or not isinstance(path, str):
            return settings
        roles = settings.options.get("roles", study.settings.options.get("roles"))
        return replace(settings, groups=groups_of(_read_cluster(study, path, roles)))

    factors = [
        replace(
            factor,
            settings={
                level: with_groups(settings, settings.options.get("cluster_file"))
                for level, settings in factor.settings.items()
            },
        )
        for factor in study.factors
    ]
    study_settings = with_groups(study.settings, _cluster_file(study, study.settings))
    return replace(study, settings=study_settings, factors=tuple(factors))


def _check_clusters(study: Study, cells: Sequence[Cell]) -> None:
    """Raise `ConfigError` if a cell has other groups than the cluster file that it is launched on."""
    if study.executor.kind != "launch":
        return
    for settings in (cell.settings for cell in cells):
        path = _cluster_file(study, settings)
        # A missing or malformed path is reported when the executor is made.
        if isinstance(path, str):
            cluster = _read_cluster(study, path, settings.options.get("roles"))
            check_groups(settings.groups, cluster, study.path.parent / path)


def _cluster_file(study: Study, settings: Settings) -> object:
    return settings.options.get("cluster_file") or study.executor.settings.get("cluster_file")


def _read_cluster(study: Study, path: str, roles: object) -> ClusterSpec:
    """Return the cluster in a file relative to the study's folder, as the host that the executor states sees it."""
    host = study.executor.settings.get("host")
    return read_cluster(study.path.parent / path, host=None if host is None else str(host), roles=roles)


def default_folder(study: Study) -> Path:
    """Return the folder of a study without ``--output-dir``."""
    return Path("studies") / slug(study.name)


def make_executor(study: Study, catalogue: Catalogue) -> Executor:
    """Return the executor that a study states, ``simulate`` or ``launch``.

    Raises:
        ConfigError: If its settings are malformed, or the study states another executor.
    """
    settings, kind = study.executor.settings, study.executor.kind
    known = {"simulate": (), "launch": ("cluster_file", "start", "host")}
    if kind not in known:
        raise ConfigError(f"executor: {kind} cannot be used here; expected simulate or launch")
    unknown = next((name for name in settings if name not in known[kind]), None)
    if unknown is not None:
        raise ConfigError(f"executor.{kind}.{unknown}: unknown key, expected one of {', '.join(known[kind]) or 'none'}")
    if kind == "simulate":
        return SimulateExecutor(catalogue=catalogue, patterns=study.patterns)
    if not isinstance(settings.get("cluster_file"), str):
        raise ConfigError("executor.launch.cluster_file: missing, expected the path of a cluster file")
    start = settings.get("start", [])
    if not isinstance(start, list) or not all(isinstance(word, str) for word in start):
        raise ConfigError(f'executor.launch.start: found {start!r}, expected a command such as ["ssh", "{{host}}"]')
    return LaunchExecutor(
        cluster_file=study.path.parent / str(settings["cluster_file"]),
        folder=study.path.parent,
        start=start,
        host=str(settings.get("host", "")),
        catalogue=catalogue,
        patterns=study.patterns,
    )


def identity_of(study: Study) -> dict[str, Any]:
    """Return what must stay the same for the runs of a study to be comparable.

    The budget, expected durations and targets of metrics may change between two starts.
    """
    found: dict[str, Any] = {name: study.document[name] for name in _SAME if name in study.document}
    found["factors"] = {name: _without_expectation(value) for name, value in found["factors"].items()}
    found["metrics"] = [{"name": metric.name, "regex": metric.regex} for metric in study.metrics]
    found["executor"] = study.executor.kind
    all_settings = [study.settings, *(each for factor in study.factors for each in factor.settings.values())]
    is_module = any(settings.options.get("module") for settings in all_settings)
    # If the script is a module, the file states the name of the module and not a path.
    script = find_script(study.script, is_module=True) if is_module else study.script_path
    # Runs before and after an edit of the script are not comparable. A canary's forecast once used both.
    return {"script": study.script, "content of the script": digest_of_script(script), **found}


def _without_expectation(levels: Any) -> Any:
    """Return the levels of a factor, as the file states them, without their expected durations."""
    # Levels in a list are values without settings.
    if not isinstance(levels, Mapping):
        return levels
    return {
        str(level): {key: value for key, value in (settings or {}).items() if key != "expected_minutes"}
        for level, settings in levels.items()
    }


def run_study(
    preparation: Preparation,
    folder: Path,
    *,
    executor: Executor,
    fresh: bool = False,
    retry_failed: bool = False,
    on_progress: Callable[[Progress], object] | None = None,
) -> list[RunResult]:
    """Execute the runs that are left, and write the table and the page, also if the study ends early.

    The table and the page have all runs that have ended, also those that `prepare_study` leaves out.

    Args:
        preparation: The study.
        folder: Its folder.
        executor: Executes the runs.
        fresh: Whether to forget the ledger of an earlier start. Folders of runs are replaced as their runs begin.
        retry_failed: Whether runs that failed run again.
        on_progress: Called when a run begins and when it ends.

    Raises:
        BudgetError: If the budget does not allow a run, or a run passed it.
        ConfigError: If the ledger is of another study, or a run cannot be started.
    """
    plan = preparation.plan
    identity = identity_of(plan.study)
    try:
        results = conduct(
            plan.runs,
            executor,
            folder,
            budget=plan.study.budget,
            on_progress=on_progress,
            expected_s=plan.expected_s,
            identity=identity,
            retry_failed=retry_failed,
            fresh=fresh,
        )
    # Catch Ctrl-C and SIGTERM too, because they once ended a study without results.
    except BaseException:
        if (folder / LEDGER_FILE_NAME).is_file():
            # If the results cannot be read or written, the first error already says why, or matters more.
            with contextlib.suppress(ConfigError):
                write_results(preparation, read_results(preparation.whole.runs, folder, identity=identity), folder)
        raise
    # Write the results of the whole study. A start with --only once left only its own runs in the table and the page.
    write_results(preparation, read_results(preparation.whole.runs, folder, identity=identity), folder)
    return results


def write_results(preparation: Preparation, results: Sequence[RunResult], folder: Path) -> None:
    """Write ``runs.csv``, ``runs.parquet`` and ``study.html``.

    Raises:
        ConfigError: If a file cannot be written.
    """
    table = rows(results, metrics=preparation.whole.study.metrics)
    try:
        write_text(folder / CSV_FILE_NAME, csv_text(table))
        if not write_parquet(folder / PARQUET_FILE_NAME, table):
            logger.info("%s is not written, because pyarrow is not installed", PARQUET_FILE_NAME)
        write_text(folder / PAGE_FILE_NAME, study_page(preparation.whole, results, table, preparation.findings))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}; give another --output-dir") from error


def exit_code_of(results: Sequence[RunResult]) -> int:
    """Return the exit code of a study whose runs all ended: 0, or the code of a failed script if runs failed."""
    return int(ExitCode.SCRIPT_FAILED if any(result.state == FAILED for result in results) else ExitCode.OK)


def results_text(plan: StudyPlan, results: Sequence[RunResult]) -> str:
    """Return the table of combinations as text, the causes of runs that failed, and what the results lack."""
    header, cells = cell_table(plan.study, results)
    lines = _aligned([header, *cells])
    lines += [f"failed: {result.run_id}: {result.cause}" for result in results if result.state == FAILED]
    lines += notes(plan.study, results)
    return "\n".join(lines) + "\n"


def preview_text(preparation: Preparation, executor: Executor | None) -> str:
    """Return what a study would do: its runs, its findings, and what it is expected to cost.

    Args:
        preparation: The study.
        executor: Knows prices. None if it cannot be made here.
    """
    plan = preparation.plan
    lines = [f"study {plan.study.name}: {counted(len(plan.runs), 'run')} in this order"]
    lines += _aligned(_run_rows(plan.runs, plan))
    if correlation_text(plan):
        lines.append(correlation_text(plan))
    lines += ["", *(str(each) for each in preparation.findings)]
    lines.append(_expected_text(plan, executor))
    return "\n".join(lines) + "\n"


def _run_rows(runs: Sequence[PlannedRun], plan: StudyPlan) -> list[list[str]]:
    """Return the rows of the table of runs: number, factors, the quantities that vary, and always ranks and epochs."""
    names = [factor.name for factor in plan.study.factors]
    quantities = dict.fromkeys(name for run in runs for name in run.levels if name not in names)
    shown = [
        name for name in quantities if name in ("ranks", "epochs") or len({run.levels.get(name) for run in runs}) > 1
    ]
    table = [["run", *names, *shown]]
    for run in runs[:MAX_ROWS]:
        cell = plan.cell_of[run.run_id]
        levels = [level_text(cell.levels[name]) for name in names]
        # The id of a run begins with its number.
        table.append([run.run_id.partition("-")[0], *levels, *(level_text(run.levels.get(name, "")) for name in shown)])
    if len(runs) > MAX_ROWS:
        table.append(["...", *[""] * (len(table[0]) - 1)])
    return table


def _expected_text(plan: StudyPlan, executor: Executor | None) -> str:
    """Return the expected time and cost of all runs, and the budget, as one line."""
    hours = {run.run_id: plan.expected_s[run.run_id] / 3600 for run in plan.runs if run.run_id in plan.expected_s}
    if not hours:
        return "expected time and cost: unknown, because the study states no expected_minutes"
    text = f"expected: {sum(hours.values()):.2f} h"
    prices = [None if executor is None else executor.hourly_usd(run) for run in plan.runs if run.run_id in hours]
    if None in prices:
        text += ", cost unknown because a price is missing"
    else:
        usd = sum((price or 0.0) * each for price, each in zip(prices, hours.values(), strict=True))
        text += f", USD {usd:,.2f}"
    if len(hours) < len(plan.runs):
        text += f", without {counted(len(plan.runs) - len(hours), 'run')} whose duration is unknown"
    budget = plan.study.budget
    limits = [f"USD {budget.usd:g}"] if budget.usd is not None else []
    limits += [f"{budget.hours:g} h"] if budget.hours is not None else []
    return f"{text}; budget: {', '.join(limits) or 'none'}"


def progress_text(progress: Progress) -> str:
    """Return one line about the progress of a study."""
    run, result = progress.run, progress.result
    failed = f"; {progress.num_failed} failed" if progress.num_failed else ""
    if result is None:
        head = f"run {progress.num_done + 1} of {progress.num_total}: {run.run_id}"
    else:
        cost = "" if result.usd is None else f", USD {result.usd:.4f}"
        # A stopped run runs again, so it does not count as done.
        number = run.run_id if result.state == STOPPED else f"{progress.num_done} of {progress.num_total}"
        head = f"run {number} {result.state} after {result.wall_s:.0f} s{cost}"
        head += f": {result.cause}" if result.cause else ""
    if progress.num_done == progress.num_total:
        return f"{head}; left: nothing{failed}"
    # ``left`` is never empty here. Runs are left, so `conduct` knows a time or counts runs of unknown duration.
    left = []
    if progress.left_s is not None:
        left.append(_duration_text(progress.left_s))
    if progress.left_usd is not None:
        left.append(f"USD {progress.left_usd:.2f}")
    if progress.num_unknown:
        left.append(f"{counted(progress.num_unknown, 'run')} of unknown duration")
    return f"{head}; left: {', '.join(left)}{failed}"


def _duration_text(seconds: float) -> str:
    if seconds < 120:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 7200 else f"about {seconds / 3600:.1f} h"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]

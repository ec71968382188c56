"""Executes the runs of a canary study through `hetero.decide.studies`, and forecasts the whole from them."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetero.decide.canary.comparison import decide
from hetero.decide.canary.design import CanaryRequest, Cluster, PlannedCanary, how_text, plan_canaries
from hetero.decide.canary.forecast import ForecastOptions, forecast
from hetero.decide.canary.identity import identity_of
from hetero.decide.canary.model import CANARY_FILE_NAME, SCHEMA_VERSION, CanaryReport, Candidate
from hetero.decide.canary.observations import point_of, read_observed
from hetero.decide.canary.output.page import PAGE_FILE_NAME, canary_page
from hetero.decide.canary.output.text import canary_text
from hetero.decide.canary.points import CanaryPoint
from hetero.decide.studies.cells.constraints import trainer_groups
from hetero.decide.studies.conduct import Progress, conduct, read_results
from hetero.decide.studies.runs import STOPPED, Billing, Executor, PlannedRun, RunResult
from hetero.decide.studies.study_file import PRICE_OPTIONS, Budget, Settings
from hetero.documents.files import evict, write_text
from hetero.documents.quantities import GIB
from hetero.documents.records import json_text
from hetero.errors import BudgetError, ConfigError
from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE
from hetero.pricing import Catalogue
from hetero.report.overruns import upper_bounds_note
from hetero.simulate.simulate import parse_group

__all__ = [
    "TEXT_FILE_NAME",
    "execute_canaries",
    "level_2_bytes",
    "memory_limit_of",
    "raise_over_budget",
    "run_canaries",
    "write_report",
]

logger = logging.getLogger(__name__)

TEXT_FILE_NAME = "canary.md"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class _PreparingExecutor:
    """Links the files of each run and drops them from the page cache. Then lets another executor execute the run.

    Args:
        inner: Executes the runs.
        planned: The runs.
        request: What was asked for.
        folder: Folder of the study.
        is_cold: Whether to drop the files from the page cache.
    """

    def __init__(
        self,
        inner: Executor,
        planned: Sequence[PlannedCanary],
        request: CanaryRequest,
        folder: Path,
        *,
        is_cold: bool,
    ) -> None:
        self._inner = inner
        self._planned = {each.run.run_id: each for each in planned}
        # The planned runs lack the options with prices, see `execute`.
        self._prices = {name: value for name, value in request.options.items() if name in PRICE_OPTIONS}
        self._folder = folder
        self._is_cold = is_cold
        self.max_parallel = inner.max_parallel
        # Any executor with this method counts as a `Billing`. So this executor has the method only if ``inner`` has it.
        if isinstance(inner, Billing):
            self.billed_s = inner.billed_s

    def hourly_usd(self, run: PlannedRun) -> float | None:
        """Return the price of all hosts of the run per hour, or None if a price is unknown."""
        return self._inner.hourly_usd(run)

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        """Run the job, see `hetero.decide.studies.runs.Executor.execute`."""
        planned = self._planned[run.run_id]
        # Link the files only now, because a second start of the study must not touch the data of runs that are being
        # executed.
        planned.link(self._folder)
        if self._is_cold:
            evict(path for linked in planned.links for path in linked.paths)
            linked_folders = {str(linked.target.resolve()) for linked in planned.links}
            # Channels that every run gets whole are read without links.
            for whole_folder in sorted(set(run.channels.values()) - linked_folders):
                evict(Path(root, name) for root, _, names in os.walk(whole_folder) for name in names)
        observations = Path(run.environment[CANARY_DIR_VARIABLE])
        observations.mkdir(parents=True, exist_ok=True)
        # Delete old observations, because a repeated run must not have the observations of its first attempt.
        for old in observations.glob("rank-*.json"):
            old.unlink()
        # Add the prices. The planned run lacks them, because they do not change what it does.
        return self._inner.execute(replace(run, options={**run.options, **self._prices}), folder)

    def stop(self) -> None:
        """Ask the runs that are being executed to stop."""
        self._inner.stop()


def execute_canaries(
    runs: Sequence[PlannedRun],
    executor: Executor,
    folder: Path,
    *,
    budget: Budget,
    on_progress: Callable[[Progress], object] | None,
    identity: Mapping[str, object],
    accepts_failures: bool,
    fresh: bool = False,
) -> tuple[list[RunResult], BudgetError | None]:
    """Execute the runs that the ledger in ``folder`` does not have yet.

    If a run fails, the forecast of its cluster is refused, whatever the other runs show. So no more runs of the cluster
    begin, unless ``accepts_failures``.

    Args:
        runs: The runs.
        executor: Executes the runs.
        folder: Folder of the study.
        budget: Limits of all runs together.
        on_progress: Called when a run begins and when it ends.
        identity: What the study is, for comparison with the ledger.
        accepts_failures: Whether a forecast is made although runs failed. If not, runs that failed at an earlier start
            run again.
        fresh: Whether to forget the runs of earlier starts.

    Returns:
        The results, and the error if the budget does not allow all runs.
    """
    over_budget = None
    try:
        conduct(
            runs,
            executor,
            folder,
            budget=budget,
            on_progress=on_progress,
            identity=identity,
            retry_failed=not accepts_failures,
            fresh=fresh,
            skips_failed_groups=not accepts_failures,
        )
    except BudgetError as error:
        over_budget = error
    return read_results(runs, folder), over_budget


def run_canaries(
    request: CanaryRequest,
    folder: Path,
    *,
    executor: Executor,
    catalogue: Catalogue,
    memory_gib: Mapping[str, float] | None = None,
    options: ForecastOptions | None = None,
    budget: Budget | None = None,
    is_cold: bool = True,
    fresh: bool = False,
    on_progress: Callable[[Progress], object] | None = None,
) -> CanaryReport:
    """Execute the canary runs that the ledger in ``folder`` does not have yet, and write the forecast.

    Args:
        request: What to run.
        folder: Folder of the study. It gets ``canary.json``, ``canary.md`` and ``canary.html``.
        executor: Executes the runs.
        catalogue: Prices and memory of instance types.
        memory_gib: Memory of a host by instance type. It replaces the memory that the catalogue states.
        options: Options of the forecast.
        budget: Limits of all runs together. None sets no limit.
        is_cold: Whether to drop the files of a run from the page cache before it.
        fresh: Whether to forget the runs of earlier starts.
        on_progress: Called when a run begins and when it ends.

    Raises:
        BudgetError: If the budget does not allow a run. The forecast from the runs that ended is written.
        ConfigError: If the data cannot be divided, the ledger is of other runs, or another study writes to the folder.
        KeyboardInterrupt: After the runs were stopped, and the forecast from those that ended was written.
    """
    options = options or ForecastOptions()
    _check_types(request, memory_gib or {})
    planned, data_bytes = plan_canaries(request, folder)
    runs = [each.run for each in planned]

    def write_forecast(results: Sequence[RunResult]) -> CanaryReport:
        """Forecast each cluster from the runs that have ended, and write the report."""
        by_id = {result.run_id: result for result in results}
        forecasts = []
        for cluster in request.clusters:
            candidate, own_options = _candidate(cluster, request, planned, by_id, executor=executor, options=options)
            limit_bytes = memory_limit_of(cluster, catalogue, memory_gib or {})
            candidate = replace(candidate, memory_limit_bytes=limit_bytes, data_bytes=data_bytes)
            forecasts.append(forecast(candidate, own_options))
        report = CanaryReport(
            schema_version=SCHEMA_VERSION,
            command=shlex.join([request.script, *request.script_args]),
            how=how_text(request),
            candidates=tuple(each.candidate for each in forecasts),
            decision=decide(forecasts),
        )
        write_report(report, folder)
        return report

    try:
        results, over_budget = execute_canaries(
            runs,
            _PreparingExecutor(executor, planned, request, folder, is_cold=is_cold),
            folder,
            budget=budget or Budget(),
            on_progress=on_progress,
            identity=identity_of(request, data_bytes, is_cold=is_cold),
            accepts_failures="failed" in options.accept,
            fresh=fresh,
        )
    except KeyboardInterrupt:
        # Write the forecast of the runs that have ended, because Ctrl-C once lost it.
        write_forecast([result for result in read_results(runs, folder) if result.state != STOPPED])
        raise
    report = write_forecast(results)
    raise_over_budget(over_budget, folder, "--budget-hours")
    return report


def raise_over_budget(error: BudgetError | None, folder: Path, option: str) -> None:
    """If the budget ended the study, raise its error with the file of the forecast and the option to change.

    Args:
        error: The error of the study. None if the budget allowed all runs.
        folder: Folder of the study.
        option: Name of the option with the budget.
    """
    if error is not None:
        # The message advises to raise the budget in the study. Leave this advice out, because a canary study has its
        # budget from an option of the command.
        reason = str(error).partition("\n  to do")[0]
        raise BudgetError(
            f"{reason}\n  {folder / TEXT_FILE_NAME} has the forecast from the runs that ended\n"
            f"  to do: raise {option} and start again, which keeps these runs"
        ) from error


def _check_types(request: CanaryRequest, memory_gib: Mapping[str, float]) -> None:
    """Raise `ConfigError` if an option names an instance type that no candidate has."""
    types = sorted({kind for cluster in request.clusters for kind in _types_of(cluster)})
    for flag, names in (("--memory", memory_gib), ("--as-fast-as", sorted(request.as_fast_as))):
        unknown = next((name for name in names if name not in types), None)
        if unknown is not None:
            raise ConfigError(f"{flag} {unknown}: no candidate has such hosts; expected one of {', '.join(types)}")


def _types_of(cluster: Cluster) -> list[str]:
    """Return the instance types of a cluster."""
    return list(dict.fromkeys(parse_group(text).instance_type for text in cluster.groups))


def _candidate(
    cluster: Cluster,
    request: CanaryRequest,
    planned: Sequence[PlannedCanary],
    results: Mapping[str, RunResult],
    *,
    executor: Executor,
    options: ForecastOptions,
) -> tuple[Candidate, ForecastOptions]:
    """Return a cluster with the points of its runs that have ended, and the options of its forecast.

    Args:
        cluster: The cluster.
        request: The request.
        planned: The runs of all clusters.
        results: Results of the runs that have ended, by id.
        executor: Knows the price of the hosts.
        options: Options of all forecasts.
    """
    ended = [each for each in planned if each.cluster == cluster and each.run.run_id in results]
    reports = {each.run.run_id: report for each in ended if (report := results[each.run.run_id].report) is not None}
    # If simulated hosts have the speed of this machine, the report of the run has an objection to its cost. The times
    # are then those of the cluster only if the user says that this machine is as fast as each type of its hosts.
    objections = dict.fromkeys(report.cost.objection for report in reports.values() if report.cost.objection)
    unlike_types = " and ".join(kind for kind in _types_of(cluster) if kind not in request.as_fast_as)
    has_cost = ended and not (objections and unlike_types)
    # Other work of this machine may have made runs longer. The note names these runs.
    notes = [note] if (note := upper_bounds_note(reports)) else []
    if not has_cost:
        notes += [_note(objection, unlike_types) for objection in objections]
    candidate = Candidate(
        name=cluster.name,
        groups=cluster.groups,
        points=tuple(_point(each, results[each.run.run_id], by_samples=request.by_samples) for each in ended),
        hourly_usd=executor.hourly_usd(ended[0].run) if has_cost else None,
        # The canaries ran on this machine, so its caches count.
        cache_bytes=level_2_bytes(),
        notes=tuple(notes),
    )
    # A forecast from simulated hosts must not be labelled ``measured``.
    is_simulated = any(report.run.simulated for report in reports.values())
    return candidate, replace(options, basis="simulated") if is_simulated else options


def _note(objection: str, types: str) -> str:
    """Return an objection to costs, and what the user can do about it."""
    return (
        f"{objection} The forecast is therefore of this machine. If it is as fast as a host of {types}, give "
        f"--as-fast-as TYPE for {types}."
    )


def _point(planned: PlannedCanary, result: RunResult, *, by_samples: bool) -> CanaryPoint:
    """Return the point of a run that has ended.

    Args:
        planned: The run.
        result: Its result.
        by_samples: Whether the loaders used a fraction of their samples. Each loader rounds its number of samples, so
            the real fraction is then that of the largest loader.
    """
    observed = read_observed(Path(planned.run.environment[CANARY_DIR_VARIABLE]))
    point = point_of(result, fraction=planned.fraction, observed=observed)
    if not by_samples:
        return point
    whole_and_part = [
        (loader.dataset_samples, loader.pass_samples)
        for loader in point.loaders
        if loader.dataset_samples and loader.pass_samples
    ]
    # Take the loader with the most samples, because rounding changes its fraction least. Without a loader that counts
    # its samples, the planned fraction stays.
    whole_samples, part_samples = max(whole_and_part, default=(1, planned.fraction))
    # Ranks get equally many samples, so a pass may have a few more than the data set.
    return replace(point, fraction=min(1.0, part_samples / whole_samples))


def memory_limit_of(cluster: Cluster, catalogue: Catalogue, memory_gib: Mapping[str, float]) -> float | None:
    """Return the memory of the smallest trainer host in bytes, or None if it is not known.

    Args:
        cluster: The cluster.
        catalogue: Facts of the instance types.
        memory_gib: Memory by instance type, which replaces the memory of the catalogue.
    """
    limits_bytes = []
    for kind, _ in trainer_groups(Settings(groups=cluster.groups)):
        info = catalogue.find(kind)
        gib = memory_gib.get(kind, info.memory_gib if info is not None else None)
        # The smallest host decides, so one unknown type leaves the limit unknown.
        if gib is None:
            return None
        limits_bytes.append(gib * GIB)
    return min(limits_bytes, default=None)


def write_report(report: CanaryReport, folder: Path) -> None:
    """Write ``canary.json``, ``canary.md`` and ``canary.html``.

    Raises:
        ConfigError: If a file cannot be written.
    """
    try:
        write_text(folder / CANARY_FILE_NAME, json_text(report))
        write_text(folder / TEXT_FILE_NAME, canary_text(report))
        write_text(folder / PAGE_FILE_NAME, canary_page(report))
    except OSError as error:
        raise ConfigError(f"cannot write the forecast to {folder}: {error.strerror or error}") from error


def level_2_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> float | None:
    """Return the size of the level 2 caches of all CPUs together, or None if the system does not say.

    Level 3 caches do not count, because a virtual machine often sees the whole level 3 cache of its host.

    Args:
        folder: The folder where the kernel describes the CPUs.
    """
    sizes: dict[str, int] = {}
    try:
        for path in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
            if (path / "level").read_text(encoding="ascii").strip() != "2":
                continue
            text = (path / "size").read_text(encoding="ascii").strip()
            # Each CPU describes its cache. CPUs that share a cache have the same list here, so the cache counts once.
            shared_cpus = (path / "shared_cpu_list").read_text(encoding="ascii").strip()
            sizes[shared_cpus] = int(text.rstrip("KMG")) * _UNITS.get(text[-1:], 1)
    except (OSError, ValueError):
        return None
    # A kernel that describes no caches leaves the size unknown.
    return float(sum(sizes.values())) or None

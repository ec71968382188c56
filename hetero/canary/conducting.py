"""Executes the runs of a canary study through `hetero.studies`, and forecasts the whole from them."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetero.canary.comparison import decide
from hetero.canary.design import CanaryRequest, Cluster, PlannedCanary, how_text, plan_canaries
from hetero.canary.files import evict
from hetero.canary.forecast import Candidate, ForecastOptions, forecast
from hetero.canary.model import CANARY_FILE_NAME, SCHEMA_VERSION, CanaryReport, CandidateForecast
from hetero.canary.observations import point_of, read_observed
from hetero.canary.page import PAGE_FILE_NAME, canary_page
from hetero.canary.points import CanaryPoint
from hetero.canary.text import canary_text
from hetero.cluster import Role
from hetero.cluster.roles import assign_roles
from hetero.errors import ConfigError
from hetero.launch.ranks.observed import CANARY_DIR_VARIABLE
from hetero.pricing import Catalogue
from hetero.studies.conduct import Progress, conduct
from hetero.studies.ledger import LEDGER_FILE_NAME, digest_of_script
from hetero.studies.runs import Executor, PlannedRun, RunResult
from hetero.studies.study_file import Budget
from hetero.system.documents import write_text

__all__ = ["TEXT_FILE_NAME", "memory_limit_of", "report_of", "run_canaries", "write_report"]

logger = logging.getLogger(__name__)

TEXT_FILE_NAME = "canary.md"
_GIB = 2**30
_NUM_FIRST = 4
"""Runs of each cluster before the first forecast, if a forecast may end the study."""
_FINAL = ("early-stop", "fixed-steps", "passes", "failed")
"""Rules that refuse whatever further runs of the same fractions show."""


class _ColdExecutor:
    """Drops the files of a run from the page cache before it starts. Otherwise it is another executor."""

    def __init__(self, inner: Executor, files: Mapping[str, Sequence[Path]]) -> None:
        self._inner = inner
        self._files = files
        self.max_parallel = inner.max_parallel

    def hourly_usd(self, run: PlannedRun) -> float | None:
        """Return the price of all hosts of the run per hour, or None if a price is unknown."""
        return self._inner.hourly_usd(run)

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        """Run the job, see `hetero.studies.runs.Executor.execute`."""
        evict(self._files.get(run.run_id, ()))
        for old in Path(run.environment[CANARY_DIR_VARIABLE]).glob("rank-*.json"):
            old.unlink()
        return self._inner.execute(run, folder)

    def stop(self) -> None:
        """Ask the runs that are being executed to stop."""
        self._inner.stop()


def run_canaries(
    request: CanaryRequest,
    folder: Path,
    *,
    executor: Executor,
    catalogue: Catalogue,
    memory_gib: Mapping[str, float] | None = None,
    options: ForecastOptions | None = None,
    enough: float | None = None,
    budget_hours: float | None = None,
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
        memory_gib: Memory of a host by instance type. It replaces that of the catalogue.
        options: Options of the forecast.
        enough: Half-width of the interval of the time, as a share of its value, at which no more runs begin. None
            executes all runs.
        budget_hours: Longest time of all runs together.
        is_cold: Whether to drop the files of a run from the page cache before it.
        fresh: Whether to forget the runs of earlier starts.
        on_progress: Called when a run begins and when it ends.

    Raises:
        BudgetError: If the budget does not allow a run.
        ConfigError: If the data cannot be divided, or the ledger is of other runs.
    """
    planned, data_bytes = plan_canaries(request, folder)
    if fresh:
        (folder / LEDGER_FILE_NAME).unlink(missing_ok=True)
    files = {each.run.run_id: each.files for each in planned} if is_cold else {}
    cold = _ColdExecutor(executor, files)
    num_runs = len(planned) if enough is None else min(len(planned), _NUM_FIRST * len(request.clusters))
    while True:
        results = conduct(
            [each.run for each in planned[:num_runs]],
            cold,
            folder,
            budget=Budget(hours=budget_hours),
            on_progress=on_progress,
            identity=_identity(request, data_bytes),
        )
        report = report_of(
            request,
            planned,
            results,
            executor=executor,
            catalogue=catalogue,
            memory_gib=memory_gib or {},
            data_bytes=data_bytes,
            options=options or ForecastOptions(),
        )
        if num_runs >= len(planned) or all(_is_enough(each, enough) for each in report.candidates):
            break
        num_runs = min(len(planned), num_runs + len(request.clusters))
    write_report(report, folder)
    return report


def _is_enough(candidate: CandidateForecast, enough: float | None) -> bool:
    """Return whether no more runs of a candidate are needed: its interval is narrow enough, or no run can change it."""
    time = candidate.figure("time")
    if any(refusal.rule in _FINAL for refusal in candidate.refusals):
        return True
    return enough is not None and time is not None and not candidate.refused("time") and time.half_width <= enough


def report_of(
    request: CanaryRequest,
    planned: Sequence[PlannedCanary],
    results: Sequence[RunResult],
    *,
    executor: Executor,
    catalogue: Catalogue,
    memory_gib: Mapping[str, float],
    data_bytes: float | None,
    options: ForecastOptions,
) -> CanaryReport:
    """Return the forecast from the results of the runs."""
    by_id = {result.run_id: result for result in results}
    forecasts = []
    for cluster in request.clusters:
        own = [each for each in planned if each.cluster == cluster and each.run.run_id in by_id]
        points = tuple(_point(each, by_id[each.run.run_id]) for each in own)
        reports = [report for each in own if (report := by_id[each.run.run_id].report) is not None]
        notes = dict.fromkeys(report.cost.objection for report in reports if report.cost.objection)
        candidate = Candidate(
            name=cluster.name,
            groups=cluster.groups,
            points=points,
            hourly_usd=executor.hourly_usd(own[0].run) if own else None,
            memory_limit_bytes=memory_limit_of(cluster, catalogue, memory_gib),
            data_bytes=data_bytes,
            notes=tuple(_note(text) for text in notes),
        )
        basis = "simulated" if any(report.run.simulated for report in reports) else options.basis
        forecasts.append(forecast(candidate, replace(options, basis=basis)))
    return CanaryReport(
        schema_version=SCHEMA_VERSION,
        command=shlex.join([request.script, *request.script_args]),
        how=how_text(request),
        candidates=tuple(each.shown for each in forecasts),
        decision=decide(forecasts),
    )


def _note(objection: str) -> str:
    return (
        f"{objection} The forecast is therefore of this machine. Its costs hold if a host of the type is as fast as "
        "this machine."
    )


def _point(planned: PlannedCanary, result: RunResult) -> CanaryPoint:
    observed = read_observed(Path(planned.run.environment[CANARY_DIR_VARIABLE]))
    return point_of(result, fraction=planned.fraction, observed=observed)


def memory_limit_of(cluster: Cluster, catalogue: Catalogue, memory_gib: Mapping[str, float]) -> float | None:
    """Return the memory of the smallest trainer host in bytes, or None if it is not known.

    Args:
        cluster: The cluster.
        catalogue: Facts of the instance types.
        memory_gib: Memory by instance type, which replaces that of the catalogue.
    """
    parts = [text.partition("=")[::2] for text in cluster.groups]
    types = [(name, rest.rpartition(":")[0]) for name, rest in parts]
    roles = assign_roles(types, (), "the candidate's groups")
    trainers = [kind for (_, kind), role in zip(types, roles, strict=True) if role is Role.TRAINER]
    found = []
    for kind in trainers:
        info = catalogue.find(kind)
        gib = memory_gib.get(kind, info.memory_gib if info is not None else None)
        if gib is None:
            return None
        found.append(gib * _GIB)
    return min(found, default=None)


def write_report(report: CanaryReport, folder: Path) -> None:
    """Write ``canary.json``, ``canary.md`` and ``canary.html``.

    Raises:
        ConfigError: If a file cannot be written.
    """
    try:
        write_text(folder / CANARY_FILE_NAME, json.dumps(report.to_json(), indent=2) + "\n")
        write_text(folder / TEXT_FILE_NAME, canary_text(report))
        write_text(folder / PAGE_FILE_NAME, canary_page(report))
    except OSError as error:
        raise ConfigError(f"cannot write the forecast to {folder}: {error.strerror or error}") from error


def _identity(request: CanaryRequest, data_bytes: float | None) -> dict[str, object]:
    """Return what must be the same if a killed study goes on."""
    script = request.script_path
    return {
        "script": request.script,
        "content of the script": None if script is None else digest_of_script(script),
        "bytes of the channels": data_bytes,
        "args": list(request.script_args),
        "clusters": [list(cluster.groups) for cluster in request.clusters],
        "fractions": list(request.fractions),
        "channels": {name: str(path.resolve()) for name, path in sorted(request.channels.items())},
        "seed": request.seed,
    }

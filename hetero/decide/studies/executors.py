"""Executes runs as child processes of this one: on simulated hosts, or on the hosts of a cluster file.

The output of a run goes to ``log.txt`` in its folder. Each line gets the time of its arrival. A metric that an
expression finds in the line gets the same time.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero.cluster import ClusterSpec, find_platform
from hetero.cluster.platforms.sagemaker import channel_variable
from hetero.config import stated_flags
from hetero.decide.studies.child_job import Job, Line
from hetero.decide.studies.ledger import report_in
from hetero.decide.studies.runs import FAILED, FINISHED, PlannedRun, RunResult
from hetero.documents.text import shortened
from hetero.errors import ConfigError
from hetero.launch.failure import stated_code
from hetero.metrics.logged import LoggedMetric, MetricPattern, read_metric_line, thinned
from hetero.pricing import Catalogue
from hetero.report.model import MAX_METRICS, REPORT_FILE_NAME, Report
from hetero.simulate.simulate import parse_group
from hetero.system.process import describe_exit_status
from hetero.system.scripts import find_script

__all__ = [
    "LOG_FILE_NAME",
    "LaunchExecutor",
    "SimulateExecutor",
    "check_groups",
    "groups_of",
    "phases_of",
    "read_cluster",
    "result_of",
]

LOG_FILE_NAME = "log.txt"
_TAIL_LINES = 200
_CAUSE = re.compile(r"\bHET-\d\d .*")
_RANK = re.compile(r"\brank (\d{1,6}): ")
_MAX_CAUSE_CHARS = 500


class _ChildExecutor:
    """Base of both executors. It executes one run at a time, as child processes."""

    max_parallel = 1

    def __init__(self, *, catalogue: Catalogue, patterns: Sequence[MetricPattern] = ()) -> None:
        self._catalogue = catalogue
        self._patterns = tuple(patterns)
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._is_stopped = False

    def hourly_usd(self, run: PlannedRun) -> float | None:
        """Return the price of all hosts of the run per hour, or None if a price is unknown."""
        return self._catalogue.hourly_usd(self._types(run))

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        """Run the job, see `hetero.decide.studies.runs.Executor.execute`."""
        commands = self._commands(run, folder)
        for name in (REPORT_FILE_NAME, "report.md"):
            # If this attempt writes no report, the run must not get the report of its earlier attempt.
            (folder / name).unlink(missing_ok=True)
        started_at = dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")
        started_s = time.monotonic()
        logged = _Logged(self._patterns)
        with (folder / LOG_FILE_NAME).open("w", encoding="utf-8") as log:
            log.write("".join(f"$ {shlex.join(command)}\n" for command in commands))
            job = Job(commands, self._environment(run), log)
            # Under the lock, because `stop` runs on another thread and asks only the job that it finds.
            with self._lock:
                self._job = job
                # The request to stop may have come before there was a job, so repeat it for this job.
                if self._is_stopped:
                    job.stop()
            try:
                for line in job.lines():
                    logged.read(line)
                statuses = job.wait()
                wall_s = time.monotonic() - started_s
            finally:
                job.close()
                with self._lock:
                    self._job = None
        return result_of(
            run,
            folder,
            # A process that ended well has the status 0.
            status=next((status for status in statuses if status), 0),
            started_at=started_at,
            wall_s=wall_s,
            hourly_usd=self.hourly_usd(run),
            logged=logged,
        )

    def stop(self) -> None:
        """Ask the run that is being executed, and later ones, to stop. Thread-safe, idempotent."""
        with self._lock:
            self._is_stopped = True
            if self._job is not None:
                self._job.stop()

    def _environment(self, run: PlannedRun) -> Mapping[str, str]:
        return run.environment

    def _types(self, run: PlannedRun) -> list[tuple[str, int]]:
        """Return instance type and number of hosts of each group of a run."""
        raise NotImplementedError

    def _commands(self, run: PlannedRun, folder: Path) -> list[list[str]]:
        """Return the command of each process that this machine starts for a run."""
        raise NotImplementedError


class SimulateExecutor(_ChildExecutor):
    """Executes runs with ``hetero simulate``, one at a time.

    Args:
        catalogue: Prices of the instance types.
        patterns: Expressions that find metrics in the log.
    """

    def _types(self, run: PlannedRun) -> list[tuple[str, int]]:
        groups = [parse_group(text) for text in run.groups]
        return [(group.instance_type, group.count) for group in groups]

    def _commands(self, run: PlannedRun, folder: Path) -> list[list[str]]:
        """Return the one command that simulates all hosts of a run."""
        if not run.groups:
            raise ConfigError(
                f"run {run.run_id}: groups are missing\n"
                '  to do: state for example groups: ["trainer=ml.m5.xlarge:1"] in the study or in the levels'
            )
        # If the script is missing, end the study with an error. Otherwise each run would start and fail.
        find_script(run.script, is_module=bool(run.options.get("module")))
        command = [*_HETERO, "simulate", *(f"--group={group}" for group in run.groups)]
        command += [f"--channel={name}={path}" for name, path in run.channels.items()]
        command += [f"--output-dir={folder}", *_flags(run)]
        return [_with_script(command, run)]


class LaunchExecutor(_ChildExecutor):
    """Executes runs with ``hetero launch`` on the hosts of a cluster file, one at a time.

    This process starts the launcher of this host. The command ``start``, for example ``["ssh", "{host}"]``, starts the
    launchers of the other hosts. It gets the launcher's command line as one more argument. The folder of the study, the
    script and the channels must have the same path on all hosts. The script finds a channel by its variable, for
    example ``SM_CHANNEL_TRAINING``.

    Args:
        cluster_file: The file. A launch option ``cluster_file`` of a run overrides it.
        folder: Folder that a relative ``cluster_file`` of a run is in.
        start: Command that runs a command line on another host, with ``{host}`` for its name. Empty if the file has
            only this host.
        host: Name of this host in the file. Empty: the machine's own name.
        catalogue: Prices of the instance types.
        patterns: Expressions that find metrics in the log.
    """

    def __init__(
        self,
        *,
        cluster_file: Path,
        folder: Path = Path(),
        start: Sequence[str] = (),
        host: str = "",
        catalogue: Catalogue,
        patterns: Sequence[MetricPattern] = (),
    ) -> None:
        super().__init__(catalogue=catalogue, patterns=patterns)
        self._cluster_file = cluster_file
        self._folder = folder
        self._start = tuple(start)
        self._host = host or None

    def _environment(self, run: PlannedRun) -> Mapping[str, str]:
        return {**{channel_variable(name): path for name, path in run.channels.items()}, **run.environment}

    def _types(self, run: PlannedRun) -> list[tuple[str, int]]:
        cluster = self._cluster(run)
        return [(group.instance_type, len(group.hosts)) for group in cluster.groups]

    def _cluster(self, run: PlannedRun) -> ClusterSpec:
        """Return the cluster of a run, as its file describes it. Raise `ConfigError` if the run states other groups."""
        path = self._path(run)
        cluster = read_cluster(path, host=self._host, roles=run.options.get("roles"))
        check_groups(run.groups, cluster, path)
        return cluster

    def _path(self, run: PlannedRun) -> Path:
        """Return the cluster file of a run: the one in its options, or the executor's."""
        stated = run.options.get("cluster_file")
        return (self._folder / str(stated) if stated else self._cluster_file).resolve()

    def _commands(self, run: PlannedRun, folder: Path) -> list[list[str]]:
        """Return a command per host of a run. It starts the launcher here, or on another host by ``start``."""
        cluster = self._cluster(run)
        path = self._path(run)
        hosts = [host.name for host in cluster.hosts]
        others = [host for host in hosts if host != cluster.current_host]
        if others and not self._start:
            raise ConfigError(
                f"{path} has the hosts {', '.join(hosts)}, and this is {cluster.current_host}\n"
                "  to do: state how a command runs on another host, for example executor: {launch: {cluster_file: "
                f'{path.name}, start: ["ssh", "{{host}}"]}}}}'
            )
        reporter = cluster.trainer_hosts[0].name
        # If the script is missing, end the study with an error. Otherwise each run would start and fail.
        find_script(run.script, is_module=bool(run.options.get("module")))
        commands = []
        for host in hosts:
            # The first trainer host writes the report into the folder of the run. The other hosts write into folders
            # below it.
            output = folder if host == reporter else folder / "hosts" / host
            command = [
                *_HETERO,
                "launch",
                f"--cluster-file={path}",
                f"--host={host}",
                f"--output-dir={output.resolve()}",
            ]
            command = _with_script([*command, *_flags(run, without=("cluster_file", "host"))], run)
            if host != cluster.current_host:
                variables = [f"{name}={value}" for name, value in self._environment(run).items()]
                # State the folder and the variables, because by ssh a command begins in the home folder, without this
                # process's variables.
                line = shlex.join(["cd", str(Path.cwd())]) + " && " + shlex.join(["env", *variables, *command])
                command = [*(word.replace("{host}", host) for word in self._start), line]
            commands.append(command)
        return commands


def read_cluster(path: Path, *, host: str | None, roles: object = None) -> ClusterSpec:
    """Return the cluster that a file describes.

    Args:
        path: The file.
        host: Name of this host in it. None: the machine's own name.
        roles: The launch option ``roles``.

    Raises:
        ClusterError: If the file cannot be read, is malformed or does not have this host.
    """
    platform = find_platform(os.environ, cluster_file=str(path))
    return platform.read_cluster(host=host, roles=tuple(roles) if isinstance(roles, (list, tuple)) else ())


def groups_of(cluster: ClusterSpec) -> tuple[str, ...]:
    """Return the groups of a cluster as ``NAME=TYPE:COUNT``."""
    return tuple(f"{group.name}={group.instance_type}:{len(group.hosts)}" for group in cluster.groups)


def check_groups(stated: Sequence[str], cluster: ClusterSpec, path: Path) -> None:
    """Check that stated groups are those of a cluster file.

    Raises:
        ConfigError: If groups are stated and differ, because a run would be recorded with hosts that it does not have.
    """
    found = groups_of(cluster)
    if stated and sorted(stated) != sorted(found):
        raise ConfigError(
            f"the groups are {', '.join(stated)}, but {path} has {', '.join(found)}\n"
            "  to do: leave out groups, which follow from the cluster file, or give each level the file of its own "
            "cluster: options: {cluster_file: FILE}"
        )


class _Logged:
    """The metrics in the lines of a run, and its last lines."""

    def __init__(self, patterns: Sequence[MetricPattern]) -> None:
        self._patterns = patterns
        self.by_patterns: list[LoggedMetric] = []
        """Values that the study's expressions found."""
        self.by_log_metric: list[LoggedMetric] = []
        """Values of lines that `hetero.log_metric` wrote. The result has them if there is no report."""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def read(self, line: Line) -> None:
        """Read one line, which may have values of metrics."""
        self.tail.append(line.text)
        # The launcher puts the name of the rank at the start of a rank's line, so search only there.
        match = _RANK.search(line.text[:200])
        rank = 0 if match is None else int(match[1])

        def metric(name: str, value: float, step: int | None = None) -> LoggedMetric:
            return LoggedMetric(name=name, value=value, step=step, at_s=line.at_s, unix_s=line.unix_s, rank=rank)

        for pattern in self._patterns:
            found = pattern.read(line.text)
            if found is not None:
                _add(self.by_patterns, metric(pattern.name, found))
        logged = read_metric_line(line.text)
        if logged is not None:
            _add(self.by_log_metric, metric(*logged))


def _add(values: list[LoggedMetric], value: LoggedMetric) -> None:
    """Add a value. Every second value of the longest series is dropped if there are too many."""
    values.append(value)
    if len(values) > MAX_METRICS:
        # Thin the series instead of cutting its end. Once only the first 100,000 values were kept, and the final loss
        # was missing.
        values[:] = thinned(values, MAX_METRICS)


def result_of(
    run: PlannedRun,
    folder: Path,
    *,
    status: int,
    started_at: str,
    wall_s: float,
    hourly_usd: float | None,
    logged: _Logged,
) -> RunResult:
    """Return the result of a job that has ended, from its report if it wrote one.

    Args:
        run: The run.
        folder: Its folder.
        status: Exit status of its first process that failed, as `subprocess` returns it.
        started_at: ISO 8601.
        wall_s: Seconds from the start of the processes to their end.
        hourly_usd: Price of all hosts.
        logged: What the lines of its log had.
    """
    report = report_in(folder)
    # The report has the time that the cluster is paid for. Without a report, take the time of the processes here.
    billed_s = wall_s if report is None else report.run.wall_s
    metrics = [*(logged.by_log_metric if report is None else report.run.metrics), *logged.by_patterns]
    # As in a shell, a process that a signal ended has 128 + the number of the signal.
    exit_code = status if status >= 0 else 128 - status
    return RunResult(
        run_id=run.run_id,
        state=FINISHED if exit_code == 0 else FAILED,
        # The ledger allows at most 255.
        exit_code=min(exit_code, 255),
        cause="" if exit_code == 0 else _cause(status, logged.tail),
        started_at=started_at,
        wall_s=billed_s,
        usd=None if hourly_usd is None else hourly_usd * billed_s / 3600,
        metrics=tuple(sorted(metrics, key=lambda value: value.at_s)),
        phases={} if report is None else phases_of(report),
        report=report,
    )


def phases_of(report: Report) -> dict[str, float]:
    """Return the parts of a run's wall time in seconds: its start, compute and data wait of its steps, and the rest.

    The start ends with the first batch of any loader. Compute and data wait are those of the loader with the longest
    total time on any rank. Steps of the warm-up, validation and the end of the job count as rest.
    """
    loaders = [loader for rank in report.run.ranks for loader in rank.loaders]
    phases = {}
    starts_s = [loader.first_batch_at_s for loader in loaders if loader.first_batch_at_s is not None]
    if starts_s:
        phases["start"] = min(starts_s)
    longest = max((each for each in loaders if each.num_steps_measured), key=lambda each: each.total_s, default=None)
    if longest is not None:
        phases |= {"compute": longest.compute_total_s, "data wait": longest.data_wait_total_s}
    return {**phases, "other": max(0.0, report.run.wall_s - sum(phases.values()))}


def _cause(status: int, tail: Sequence[str]) -> str:
    """Return why a run failed: the first error of hetero, or the last line of the output, or the exit status.

    Args:
        status: Exit status of the first process that failed.
        tail: The last lines of the output.
    """
    errors = [match.group() for line in tail if (match := _CAUSE.search(line))]
    # Take only errors with a known code, because the text HET-00 in a line of the script does not come from hetero.
    known = next((text for text in errors if stated_code(text) is not None), "")
    last_line = next((line for line in reversed(tail) if line.strip()), "")
    return shortened(known or last_line or describe_exit_status(status), _MAX_CAUSE_CHARS)


_HETERO = (sys.executable, "-m", "hetero.cli")
_PATHS = ("price_file", "tls_dir", "tf_work_dir", "plan")
"""Launch options that are paths."""


def _flags(run: PlannedRun, *, without: Sequence[str] = ()) -> list[str]:
    """Return the launch options of a run as flags, except for the options ``without``."""
    # Leave out the output folder, because the study decides where the output of a run is.
    options = {name: value for name, value in run.options.items() if name not in ("output_dir", *without)}
    # These paths are relative to the study, as all paths of its file.
    paths = {name: str(Path(run.study_folder, str(options[name]))) for name in _PATHS if options.get(name)}
    return stated_flags({**options, **paths})


def _with_script(command: Sequence[str], run: PlannedRun) -> list[str]:
    return [*command, run.script, "--", *run.script_args]

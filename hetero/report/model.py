"""The observations of a run (`RunFacts`) and the conclusions from them (`Report`).

`RunFacts` holds the observations, unchanged. Every other number in a report is a `Figure`: a value with its unit and
its basis. Therefore every number states whether it was measured, simulated or modelled.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hetero.documents.records import limits, load
from hetero.errors import ExitCode
from hetero.metrics.figures import Figure
from hetero.metrics.hosts import HostUsage
from hetero.metrics.logged import LoggedMetric
from hetero.metrics.steps import StepSummary
from hetero.pricing.catalog import MAX_HOURLY_USD

__all__ = [
    "BOTTLENECKS",
    "MAX_EVENTS",
    "MAX_METRICS",
    "PLACEMENTS",
    "REPORT_FILE_NAME",
    "ROLES",
    "SCHEMA_VERSION",
    "Cost",
    "Expectation",
    "GroupFacts",
    "Headline",
    "JoinedFacts",
    "PriceFacts",
    "RankFacts",
    "Report",
    "RunFacts",
    "TimedEvent",
    "Verdict",
    "load_report",
]

SCHEMA_VERSION = 1
REPORT_FILE_NAME = "report.json"
PLACEMENTS = ("homogeneous", "heterogeneous", "hybrid")
ROLES = ("data", "trainer")
BOTTLENECKS = ("data", "compute", "unknown")
MAX_EVENTS = 1000
MAX_METRICS = 100_000
"""Limit of the logged values in a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """One instance group of the job."""

    name: str
    role: str = field(metadata=limits(choices=ROLES))
    instance_type: str
    count: int = field(metadata=limits(minimum=1, maximum=100_000))
    """Number of hosts in the group."""
    spot_usd: float | None = field(default=None, metadata=limits(maximum=MAX_HOURLY_USD))
    """Price of a host in USD per hour that the user gave with ``--spot``. None: the list price of the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFacts:
    """A data host that joined the running job."""

    host: str
    group: str
    instance_type: str
    """Empty if the host did not state it."""
    present_s: float
    """Seconds from its admission until it left, or until the job ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEvent:
    """An event of the run, at the time when the first trainer host heard of it."""

    at_s: float
    """Seconds since the start of the run."""
    host: str
    what: str
    """The event in words that follow the host's name or a colon, for example ``an endpoint restarted``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Measurements of one trainer rank."""

    rank: int = field(metadata=limits(maximum=1e6))
    host: str
    loaders: tuple[StepSummary, ...]
    """One summary per loader of the script, for example train and validation."""

    @property
    def labelled(self) -> list[tuple[str, StepSummary]]:
        """Loaders with steps, each with its label: the name, or ``photos (2)`` for the second of the same name."""
        num_of_name: Counter[str] = Counter()
        found = []
        for summary in self.loaders:
            if summary.num_steps:
                num_of_name[summary.name] += 1
                number = num_of_name[summary.name]
                found.append((summary.name if number == 1 else f"{summary.name} ({number})", summary))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a plan predicted for the cluster of the run."""

    step_time_s: float
    step_time_low_s: float
    """End of the 90 % interval."""
    step_time_high_s: float
    usd_per_1k_steps: float | None
    """None if a price was unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Observations of one run, collected by the launcher."""

    run_id: str
    command: str
    """The training script and its arguments."""
    started_at: str
    """ISO 8601 with time zone."""
    wall_s: float
    """Seconds from the first launcher's start to the last launcher's exit, which is the billed time."""
    exit_code: int = field(metadata=limits(minimum=-255, maximum=255))
    placement: str = field(metadata=limits(choices=PLACEMENTS))
    """``homogeneous``: no data group. ``heterogeneous``: endpoints on data hosts. ``hybrid``: also on trainer hosts."""
    groups: tuple[GroupFacts, ...]
    joined_hosts: tuple[JoinedFacts, ...] = ()
    """Data hosts that joined the running job, in addition to the hosts of the groups."""
    ranks: tuple[RankFacts, ...] = ()
    hosts: tuple[HostUsage, ...] = ()
    events: dict[str, int] = field(default_factory=dict)
    """Counters by name, for example ``endpoint restarts``, ``failovers``, ``hedges``, ``authentication failures``."""
    timeline: tuple[TimedEvent, ...] = field(default=(), metadata=limits(max_items=MAX_EVENTS))
    """When hosts came and went and processes restarted, in order. The first 1,000."""
    simulated: tuple[str, ...] = ()
    """One sentence for each thing that was emulated. Empty if everything was real."""
    decisions: tuple[str, ...] = ()
    """What ``--trainer-endpoints auto`` decided, in order, one line each."""
    versions: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    expectation: Expectation | None = None
    """Prediction of the plan that was given with ``--plan``. None without a plan, or if it lacks the cluster."""
    metrics: tuple[LoggedMetric, ...] = field(default=(), metadata=limits(max_items=MAX_METRICS))
    """Values that the script logged with `hetero.log_metric`, ordered by rank and time."""

    @property
    def basis(self) -> str:
        """Origin of this run's times, ``measured`` or ``simulated``."""
        return "simulated" if self.simulated else "measured"

    @property
    def has_ended_well(self) -> bool:
        """Whether the job finished, or ended because it was asked to stop. Its figures then count."""
        # As in a shell, 128 + the number of the signal: 143.
        return self.exit_code in (ExitCode.OK, 128 + signal.SIGTERM)

    @property
    def exit_text(self) -> str:
        """Exit code with its meaning in words, if it has one."""
        meaning = next((code.help_text for code in ExitCode if code == self.exit_code), "")
        return f"{self.exit_code} {meaning}".rstrip()

    @property
    def host_roles(self) -> dict[str, str]:
        """Role of each host whose role is known, by the host's name."""
        trainers = {rank.host for rank in self.ranks}
        num_trainers = sum(group.count for group in self.groups if group.role == "trainer")
        # If a trainer host lacks ranks, a host without ranks may be that trainer host or a data host.
        others = {usage.host for usage in self.hosts} - trainers if len(trainers) >= num_trainers else set()
        return {**dict.fromkeys(trainers, "trainer"), **dict.fromkeys(others, "data")}

    @property
    def trainer_usages(self) -> tuple[HostUsage, ...]:
        """Usage of the hosts with ranks, or of all hosts if it is not known which hosts have ranks."""
        trainers = {rank.host for rank in self.ranks}
        return tuple(usage for usage in self.hosts if usage.host in trainers) or self.hosts

    @property
    def num_hosts(self) -> int:
        """Number of hosts in all groups."""
        return sum(group.count for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Figures of the loader that took the most time. None: the definition of a figure does not apply.

    Times belong to the slowest rank. The step time comes from the rank with the longest mean step. Data wait and
    utilisation come from the rank with the longest mean data wait.
    """

    loader: str
    """Label of the loader, see `RankFacts.labelled`."""
    num_ranks: int
    global_batch_samples: int
    """Samples per step over all ranks. If it is equal in two runs, their steps are the same work."""
    num_steps_measured: int
    """Number of measured steps of the rank with the fewest."""
    warmup_steps: int
    slowest_step_rank: int | None
    slowest_wait_rank: int | None
    step_time_mean: Figure | None
    step_time_p50: Figure | None
    step_time_p95: Figure | None
    data_wait_mean: Figure | None
    data_wait_p50: Figure | None
    data_wait_p95: Figure | None
    utilisation: Figure | None
    samples_per_s: Figure | None
    """Samples per second of all ranks together, at the pace of the slowest rank."""
    step_time_least: Figure | None = None
    """Lower bound of ``step_time_mean`` if the real work of an emulated run never took longer than emulated, or if the
    run had its CPUs for itself. None if nothing was emulated, and others had no CPUs. See `hetero.report.overruns`."""

    @property
    def step_time_range_s(self) -> tuple[float, float] | None:
        """Lower and upper bound of the mean step time without other work. Equal if there was no other work."""
        if self.step_time_mean is None:
            return None
        high_s = self.step_time_mean.value
        return (high_s if self.step_time_least is None else min(high_s, self.step_time_least.value)), high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceFacts:
    """The price of one instance type that this report uses."""

    instance_type: str
    hourly_usd: float = field(metadata=limits(maximum=MAX_HOURLY_USD))
    region: str | None
    as_of: str | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """List prices times time, not a bill. If a price is missing, the figures are missing too."""

    prices: tuple[PriceFacts, ...]
    missing: tuple[str, ...]
    """One line per type without a price, with the option to pass."""
    hourly: Figure | None
    """Price per hour of all hosts together."""
    run: Figure | None
    """Cost of the whole wall time, including the start-up."""
    per_1k_steps: Figure | None
    per_million_samples: Figure | None
    objection: str = ""
    """Why only ``hourly`` may have a figure even if all prices are known. Empty if the other figures apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bottleneck of the run, and advice."""

    bottleneck: str = field(metadata=limits(choices=BOTTLENECKS))
    advice: str
    vcpus: int | None
    """vCPUs that preprocess. None if an instance type is unknown."""
    vcpus_needed: Figure | None
    """vCPUs that would keep the accelerators busy. None if this cannot be determined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run and the conclusions from it. Immutable. `hetero.report.build_report` creates it.

    The schema of its JSON is ``hetero/report/data/report.schema.json``.
    """

    schema_version: int = field(metadata=limits(minimum=SCHEMA_VERSION, maximum=SCHEMA_VERSION))
    run: RunFacts
    headline: Headline | None
    """None if no loader delivered a batch."""
    cost: Cost
    verdict: Verdict
    plan_error: Figure | None = None
    """Predicted step time / measured step time - 1. None without a plan or without a measured step."""

    @property
    def headline_ranks(self) -> dict[int, StepSummary]:
        """Summaries of the headline's loader by rank. Empty without a headline."""
        if self.headline is None:
            return {}
        return {
            rank.rank: summary
            for rank in self.run.ranks
            for label, summary in rank.labelled
            if label == self.headline.loader
        }


def load_report(path: str | Path) -> Report:
    """Read a report.

    Args:
        path: ``report.json``, or the directory that contains it.

    Raises:
        ConfigError: If the report is missing or malformed. The message names the file and the key path.
    """
    to_do = "pass report.json or its directory, written by this version of hetero"
    return load(Report, path, REPORT_FILE_NAME, to_do=to_do)

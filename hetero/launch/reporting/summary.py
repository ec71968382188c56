"""Writes ``report.json``, ``report.md`` and ``metrics.json`` from the statuses of the job's hosts."""

from __future__ import annotations

import collections
import datetime as dt
import json
import logging
import platform
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero import __version__
from hetero.cluster import ClusterSpec, Folders
from hetero.config import LaunchOptions, trainer_endpoints_of
from hetero.config.options import DEFAULT_DATA_SERVICE
from hetero.control.status import Cause, HostStatus
from hetero.documents.files import write_text
from hetero.documents.records import encode, json_text
from hetero.documents.text import code_span
from hetero.errors import ConfigError, HeteroError
from hetero.launch.data_services import find_service
from hetero.launch.placement import HostPlan, Placement
from hetero.launch.reporting.metric_lines import log_metrics, result_metrics
from hetero.metrics.hosts import HostUsage
from hetero.metrics.logged import LoggedMetric, thinned
from hetero.metrics.steps import StepSummary
from hetero.report.build import COMPUTED_ON_DATA_HOSTS, NOT_DELIVERED, build_report, idle_data_hosts
from hetero.report.markdown import render_report
from hetero.report.model import (
    MAX_METRICS,
    REPORT_FILE_NAME,
    Expectation,
    GroupFacts,
    JoinedFacts,
    RankFacts,
    RunFacts,
    TimedEvent,
)

__all__ = [
    "METRICS_FILE_NAME",
    "JobHistory",
    "output_folder",
    "run_facts",
    "simulated_parts",
    "write_metrics",
    "write_report",
]

logger = logging.getLogger(__name__)

METRICS_FILE_NAME = "metrics.json"


def output_folder(options: LaunchOptions, folders: Folders, host: str) -> Path:
    """Return the folder for this host's files. The default is named after the host, because hosts share the output."""
    return options.output_dir if options.output_dir is not None else folders.output / host


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """What happened while a job ran, as the first trainer host knows it."""

    decisions: tuple[str, ...] = ()
    """Decisions about endpoints on trainer hosts."""
    joined_hosts: tuple[JoinedFacts, ...] = ()
    timeline: tuple[TimedEvent, ...] = ()


def write_report(
    plan: HostPlan,
    statuses: Sequence[HostStatus],
    history: JobHistory,
    *,
    cause: Cause | None,
    exit_code: int,
    folder: Path,
) -> None:
    """Write the job's report and log its metrics. An error is logged and does not change the job's exit code."""
    try:
        facts = run_facts(plan, statuses, history, exit_code=exit_code)
        catalogue = plan.options.catalogue()
        report = build_report(facts, catalogue)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / REPORT_FILE_NAME, json_text(report))
        text = render_report(report)
        if cause is not None:
            text += f"\nThe run failed: {code_span(cause.first_line)}\n"
        write_text(folder / "report.md", text)
    # A full disk must not change the job's exit code (F27).
    except (OSError, HeteroError) as error:
        logger.error("the report could not be written to %s: %s", folder, error)
        return
    idle = idle_data_hosts(facts)
    if idle is not None:
        # A job that was stopped may not have begun to train.
        logger.log(logging.WARNING if exit_code else logging.ERROR, "%s", idle)
    logger.info("report: %s", folder / "report.md")
    log_metrics(result_metrics(report))


def write_metrics(folder: Path, cluster: ClusterSpec, own: HostStatus) -> None:
    """Write the metrics of one host into its folder. An error is logged and does not change the job's exit code.

    Args:
        folder: The host's folder, see `output_folder`.
        cluster: The cluster, which contains this host.
        own: The host's last status.
    """
    usage = _read(HostUsage, own.usage_json) if own.usage_json else None
    group = cluster.current_group
    content = {
        "host": own.host,
        "group": group.name,
        "instance_type": group.instance_type,
        "role": group.role.value,
        "usage": None if usage is None else encode(usage),
        "events": dict(sorted(own.counters.items())),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / METRICS_FILE_NAME, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        logger.error("the metrics of this host could not be written to %s: %s", folder, error)


def run_facts(plan: HostPlan, statuses: Sequence[HostStatus], history: JobHistory, *, exit_code: int) -> RunFacts:
    """Return the facts of a run, from the last status of each host."""
    options, cluster, placement = plan.options, plan.cluster, plan.placement
    ranks = tuple(_rank_facts(statuses))
    usages = (_read(HostUsage, status.usage_json) for status in statuses if status.usage_json)
    return RunFacts(
        run_id=plan.job_id,
        command=shlex.join(options.command),
        started_at=dt.datetime.fromtimestamp(plan.started_epoch_s, dt.timezone.utc).isoformat(timespec="seconds"),
        wall_s=time.monotonic() - plan.started_s,
        exit_code=exit_code,
        placement=_placement_name(options, cluster, statuses),
        decisions=history.decisions,
        timeline=history.timeline,
        groups=tuple(
            GroupFacts(
                name=group.name,
                role=group.role.value,
                instance_type=group.instance_type,
                count=len(group.hosts),
                spot_usd=options.spot_usd(group.name),
            )
            for group in cluster.groups
        ),
        joined_hosts=history.joined_hosts,
        ranks=ranks,
        hosts=tuple(usage for usage in usages if usage is not None),
        events=_events(statuses, [host.name for host in cluster.data_hosts], ranks),
        simulated=tuple(simulated_parts(options, cluster, placement)),
        versions={"hetero": __version__, "python": platform.python_version()},
        options={
            "ranks per trainer host": str(placement.num_ranks),
            "job restarts allowed": str(options.job_restarts),
            # The data service names these entries. Otherwise runs with different numbers of tf.data workers would all
            # have "endpoints per data host: default".
            **find_service(placement.data_service or DEFAULT_DATA_SERVICE).report_options(options, cluster),
            "data service": placement.data_service or "none",
            "emulate_sample_s": str(options.emulate_sample_s),
            "emulate_step_s": str(options.emulate_step_s),
        },
        expectation=_expectation(options, cluster, ranks),
        metrics=tuple(_logged_metrics(statuses)),
    )


def _expectation(options: LaunchOptions, cluster: ClusterSpec, ranks: Sequence[RankFacts]) -> Expectation | None:
    """Return what the plan predicted for this cluster. Log a warning if the plan lacks it."""
    if options.plan is None:
        return None
    from hetero.report.plan import PlannedGroup, load_plan

    groups = [
        PlannedGroup(name=group.name, role=group.role.value, instance_type=group.instance_type, count=len(group.hosts))
        for group in cluster.groups
    ]
    plan = load_plan(options.plan)
    # None if the job chooses the number of endpoints on trainer hosts. `cluster_of` then prefers the recommended
    # number.
    endpoints = trainer_endpoints_of(options, has_data_hosts=bool(cluster.data_hosts))
    # A plan may contain the same cluster with and without compression. If one loader compresses, the job counts as one
    # with compression.
    compression = next((loader.compression for rank in ranks for loader in rank.loaders if loader.compression), None)
    planned = plan.cluster_of(groups, endpoints, compression=compression)
    if planned is None:
        logger.warning("the plan %s has no cluster like this job's, so the report does not compare them", options.plan)
        return None
    return Expectation(
        step_time_s=planned.step_time.value,
        step_time_low_s=planned.step_time_low_s,
        step_time_high_s=planned.step_time_high_s,
        usd_per_1k_steps=None if planned.usd_per_1k_steps is None else planned.usd_per_1k_steps.value,
    )


def _placement_name(options: LaunchOptions, cluster: ClusterSpec, statuses: Sequence[HostStatus]) -> str:
    """Return where this job computed its batches: homogeneous, heterogeneous or hybrid."""
    if not cluster.data_hosts:
        return "homogeneous"
    trainer_endpoints = trainer_endpoints_of(options, has_data_hosts=True)
    # With auto, the number of endpoints on trainer hosts may have stayed 0 for the whole job. So look for their
    # batches.
    if trainer_endpoints is None:
        trainers = {host.name for host in cluster.trainer_hosts}
        computed = sum(status.counters.get("batches computed", 0) for status in statuses if status.host in trainers)
        return "hybrid" if computed else "heterogeneous"
    return "hybrid" if trainer_endpoints or options.trainer_tf_workers else "heterogeneous"


def _rank_facts(statuses: Sequence[HostStatus]) -> list[RankFacts]:
    """Return the summaries of each rank's loaders, by rank."""
    found = []
    for status in statuses:
        for report in status.ranks:
            loaders = (_read(StepSummary, part) for part in report.summaries_json)
            valid = tuple(loader for loader in loaders if loader is not None)
            found.append(RankFacts(rank=report.rank, host=status.host, loaders=valid))
    return sorted(found, key=lambda facts: facts.rank)


def _logged_metrics(statuses: Sequence[HostStatus]) -> list[LoggedMetric]:
    """Return the values that the script has logged on all ranks, thinned to the limit of a report."""
    reports = sorted((report for status in statuses for report in status.ranks), key=lambda report: report.rank)
    metrics_by_rank = [report.metrics for report in reports if report.metrics]
    # Each rank that has logged gets the same part of the limit.
    max_per_rank = MAX_METRICS // max(1, len(metrics_by_rank))
    return [value for metrics in metrics_by_rank for value in thinned(metrics, max_per_rank)]


def _events(statuses: Sequence[HostStatus], data_hosts: Sequence[str], ranks: Sequence[RankFacts]) -> dict[str, int]:
    """Return the counters of all hosts and ranks, added up by name."""
    events: collections.Counter[str] = collections.Counter()
    for status in statuses:
        events.update(status.counters)
        for report in status.ranks:
            events.update(report.counters)
    name = "batches computed"
    computed = {status.host: status.counters[name] for status in statuses if name in status.counters}
    # Add the total of the data hosts only if each of them has sent its count. A missing count must not read as 0,
    # because data hosts without any batch are reported as an error.
    if data_hosts and computed.keys() >= set(data_hosts):
        events[COMPUTED_ON_DATA_HOSTS] = sum(computed[host] for host in data_hosts)
    summaries = [summary for rank in ranks for summary in rank.loaders]
    events[NOT_DELIVERED] = sum(summary.num_not_delivered for summary in summaries)
    return dict(sorted(events.items()))


def simulated_parts(options: LaunchOptions, cluster: ClusterSpec, placement: Placement) -> list[str]:
    """Return one sentence for each thing that is emulated in this job."""
    found = []
    if placement.usage_scope == "tree":
        found.append(f"hosts: {len(cluster.hosts)}, as processes on one machine; their network is its loopback")
    if options.emulate_sample_s is not None:
        found.append(
            f"vCPUs: every sample costs {options.emulate_sample_s:g} s of one emulated vCPU; "
            "the real work runs within that time if it is not longer"
        )
    if options.emulate_step_s is not None:
        found.append(f"accelerators: the compute of a step is a wait of {options.emulate_step_s:g} s")
    return found


def _read(kind: Any, part: bytes) -> Any:
    """Parse a part of a host's status. If it is malformed, log a warning and return None."""
    try:
        return kind.from_json(part)
    except ConfigError as error:
        logger.warning("the report leaves out a malformed part of a host's status: %s", error)
        return None

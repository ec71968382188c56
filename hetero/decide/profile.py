"""Makes a profile from the report of a finished run. The profile has fewer figures than one of `hetero profile`.

A report does not time single samples. If the ranks waited for data, the CPUs that preprocess were the limit. So the
cost of a sample is the time of all these CPUs divided by the number of samples. A report lacks steps with batches
always ready, so the time of such a step is a step time minus its data wait. Figures that are computed in this way are
labelled ``modelled``. They have few values, which makes the intervals of a plan wide.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hetero.documents.text import counted
from hetero.errors import ConfigError
from hetero.metrics.figures import Figure
from hetero.metrics.hosts import HostUsage
from hetero.metrics.profile.profile import (
    NEARLY_BUSY,
    PROFILE_FILE_NAME,
    SCHEMA_VERSION,
    Profile,
    Spread,
    SupplyProfile,
    TrainingProfile,
    load_profile,
)
from hetero.metrics.steps import StepSummary
from hetero.pricing.catalog import Catalogue
from hetero.report.build import missing_emulation, reading_share
from hetero.report.model import REPORT_FILE_NAME, GroupFacts, Headline, Report, RunFacts, load_report
from hetero.report.overruns import excess_share, upper_bounds_note

__all__ = ["load_any_profile", "profile_of_report"]

_NOTES = (
    "No single samples were timed: a sample's cost is the time of the vCPUs that preprocessed / number of samples.",
    "No steps without waits were timed: the step time without waits is the step time minus the wait.",
)
_RUN_PROFILE = "Run hetero profile SCRIPT instead."


def load_any_profile(path: Path, catalogue: Catalogue) -> Profile:
    """Read a profile, or make one from the report of a finished run.

    Args:
        path: ``profile.json``, ``report.json``, or the folder that contains one of them. A profile is preferred.
        catalogue: Knows the vCPUs of instance types.

    Raises:
        ConfigError: As `load_profile`, `load_report` and `profile_of_report` do, or if the folder is the folder of a
            study.
    """
    has_profile, has_report = ((path / name).is_file() for name in (PROFILE_FILE_NAME, REPORT_FILE_NAME))
    runs = sorted(path.glob(f"runs/*/{REPORT_FILE_NAME}"))
    if runs and not has_profile and not has_report:
        raise ConfigError(
            f"{path} is the folder of a study with {counted(len(runs), 'run')}, expected that of one run\n"
            f"  Give for example {runs[0].parent}"
        )
    if (has_report and not has_profile) or path.name == REPORT_FILE_NAME:
        return profile_of_report(load_report(path), catalogue)
    # The error for a path without any of the files says how to make a profile.
    return load_profile(path)


def profile_of_report(report: Report, catalogue: Catalogue) -> Profile:
    """Return the profile that the figures of a run allow.

    Args:
        report: The report of a run that waited for data.
        catalogue: Knows the vCPUs of instance types.

    Raises:
        ConfigError: If the run failed, lacks a measured step, or waited for nothing, or if it is not known how many
            vCPUs preprocessed.
    """
    run, headline = report.run, report.headline
    if not run.has_ended_well:
        raise ConfigError(
            f"run {run.run_id} failed with exit code {run.exit_code}, so its figures are not those of the job\n"
            f"  Give the report of a run that succeeded. Or: {_RUN_PROFILE}"
        )
    if headline is None or headline.step_time_mean is None or headline.data_wait_mean is None:
        raise ConfigError(
            f"run {run.run_id} has no measured step\n  Train for more steps than the warm-up. Or: {_RUN_PROFILE}"
        )
    waiting_share = headline.data_wait_mean.value / headline.step_time_mean.value
    # If the ranks hardly waited, the CPUs that preprocess were not the limit, and some of their time was idle.
    if waiting_share < NEARLY_BUSY:
        raise ConfigError(
            f"run {run.run_id} waited for data in {100 * waiting_share:.1f} % of each step, so it does not show what "
            f"a sample costs\n  Its accelerators are the limit: data hosts would not make its steps shorter. To be "
            f"sure: {_RUN_PROFILE}"
        )
    summaries = list(report.headline_ranks.values())
    trainers = _one_type(run, "trainer")
    num_hosts = sum(group.count for group in run.groups if group.role == "trainer")
    num_steps = headline.num_steps_measured
    training = TrainingProfile(
        instance_type=trainers.instance_type,
        vcpus=_vcpus(run, trainers, catalogue),
        num_hosts=num_hosts,
        ranks_per_host=max(1, headline.num_ranks // num_hosts),
        batch_samples=max(1, headline.global_batch_samples // headline.num_ranks),
        has_data_hosts=run.placement != "homogeneous",
        headspace_s=_headspace(summaries),
        excess_share=excess_share(report),
        step_s=_spread(headline.step_time_mean, headline.step_time_p50, headline.step_time_p95, num_steps),
        data_wait_s=_spread(headline.data_wait_mean, headline.data_wait_p50, headline.data_wait_p95, num_steps),
    )
    return Profile(
        schema_version=SCHEMA_VERSION,
        command=run.command,
        measured_at=run.started_at,
        origin="report",
        training=training,
        supply=(_supply(report, headline, catalogue),),
        wire_bytes_per_sample=_wire_bytes(summaries, run.basis),
        simulated=run.simulated,
        notes=(*_NOTES, *filter(None, [upper_bounds_note({run.run_id: report})])),
        versions=run.versions,
    )


def _one_type(run: RunFacts, role: str) -> GroupFacts:
    """Return a group of a role. Raise `ConfigError` unless all hosts of the role are of one type."""
    groups = [group for group in run.groups if group.role == role]
    types = sorted({group.instance_type for group in groups})
    if len(types) != 1:
        raise ConfigError(
            f"the {role} hosts of run {run.run_id} are of {len(types)} types ({', '.join(types) or 'none'}), so its "
            f"figures belong to no single type\n  {_RUN_PROFILE}"
        )
    return groups[0]


def _vcpus(run: RunFacts, group: GroupFacts, catalogue: Catalogue) -> int:
    """Return the vCPUs of each host of a group: by the catalogue, or as a host of the group counted them."""
    info = catalogue.find(group.instance_type)
    if info is not None and info.vcpus is not None:
        return info.vcpus
    usages = _real_hosts(run, group)
    if not usages:
        raise ConfigError(
            f"the vCPUs of instance type {group.instance_type!r} of run {run.run_id} are not known\n  {_RUN_PROFILE}"
        )
    # All hosts of a group are of one type.
    return usages[0].num_cpus


def _real_hosts(run: RunFacts, group: GroupFacts) -> list[HostUsage]:
    """Return the usage of the hosts with the role of a group, unless they are simulated.

    Simulated hosts share one machine, so the CPUs of this machine are not their own. The scope of their usage is
    ``tree``.
    """
    return [usage for usage in run.hosts if usage.scope == "host" and run.host_roles.get(usage.host) == group.role]


def _supply(report: Report, headline: Headline, catalogue: Catalogue) -> SupplyProfile:
    """Return what a sample costs on the hosts that preprocessed, if they spent all their time on samples."""
    run, vcpus = report.run, report.verdict.vcpus
    if run.placement == "hybrid":
        raise ConfigError(
            f"run {run.run_id} preprocessed on trainer and data hosts, so it does not show what a sample costs\n"
            "  Give the report of a run that preprocesses on data hosts only (--trainer-endpoints 0). "
            f"Or: {_RUN_PROFILE}"
        )
    if missing := missing_emulation(run):
        raise ConfigError(
            f"run {run.run_id} simulated its hosts without {' and '.join(missing)}, so its samples and steps took the "
            f"time of this machine\n  Give {' and '.join(missing)}. Or: {_RUN_PROFILE}"
        )
    if vcpus is None or headline.samples_per_s is None or not headline.samples_per_s.value:
        raise ConfigError(
            f"how many vCPUs preprocessed in run {run.run_id} is not known\n"
            f"  The report must have hosts of known types. {_RUN_PROFILE}"
        )
    group = _one_type(run, "trainer" if run.placement == "homogeneous" else "data")
    rate = headline.samples_per_s.value
    values = [vcpus / rate]
    # The CPUs may have been idle for a part of the time, for example while they waited for storage. The cost by their
    # measured use is a second value, which makes the intervals wider and leaves the mean as it is.
    busy_cpus = _busy_cpus(run, group)
    if 0 < busy_cpus < vcpus:
        values.append(busy_cpus / rate)
    computing = 1 - reading_share(run)
    return SupplyProfile(
        instance_type=group.instance_type,
        vcpus=_vcpus(run, group, catalogue),
        # This cost contains the work for its batch, and the waits of the sample if endpoints did not measure them.
        sample_cpu_s=dataclasses.replace(
            Spread.of([computing * value for value in values], "s", "modelled"), mean=computing * vcpus / rate
        ),
        sample_wait_s=Spread.of([(1 - computing) * vcpus / rate], "s", "modelled"),
        batch_cpu_s=Spread.of([0.0], "s", "modelled"),
    )


def _busy_cpus(run: RunFacts, group: GroupFacts) -> float:
    """Return how many CPUs all hosts of a role kept busy on average. 0 unless each of them measured it."""
    percents = [usage.cpu_percent_mean for usage in _real_hosts(run, group)]
    # With an emulated part, the CPUs of the machine do not show what the named hosts would have used.
    if run.simulated or None in percents:
        return 0.0
    return sum(percent or 0.0 for percent in percents) / 100


def _headspace(summaries: list[StepSummary]) -> Spread:
    """Return the step time with batches always ready: step times minus data waits, of the rank with the most compute.

    A report lacks single steps. So the values are the mean and two percentiles of this rank, and the mean of each rank.
    """
    slowest = max(summaries, key=lambda summary: summary.compute_total_s / max(1, summary.num_steps_measured))
    pairs = (
        (slowest.step_time_mean_s, slowest.data_wait_mean_s),
        (slowest.step_time_p50_s, slowest.data_wait_p50_s),
        (slowest.step_time_p95_s, slowest.data_wait_p95_s),
    )
    values = [max(0.0, step - wait) for step, wait in pairs if step is not None and wait is not None]
    values += [summary.compute_total_s / summary.num_steps_measured for summary in summaries]
    spread = Spread.of(values, "s", "modelled")
    # Use the mean of all steps, because the few values above have another mean.
    mean_s = slowest.compute_total_s / slowest.num_steps_measured
    return dataclasses.replace(spread, mean=mean_s)


def _spread(mean: Figure, p50: Figure | None, p95: Figure | None, num_measured: int) -> Spread:
    """Return the distribution of step times or waits, of which a report has only the mean and two percentiles."""
    known = [figure.value for figure in (mean, p50, p95) if figure is not None]
    spread = Spread.of(known, mean.unit, "modelled")
    return dataclasses.replace(
        spread,
        num_measured=num_measured,
        mean=mean.value,
        p50=spread.p50 if p50 is None else p50.value,
        p95=spread.p95 if p95 is None else p95.value,
    )


def _wire_bytes(summaries: list[StepSummary], basis: str) -> Figure | None:
    """Return the bytes per sample that ranks received from endpoints, before compression. None without endpoints."""
    nbytes = sum(summary.batch_bytes for summary in summaries)
    samples = sum(summary.num_samples for summary in summaries)
    return Figure(value=nbytes / samples, unit="B", basis=basis) if nbytes and samples else None

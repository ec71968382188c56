"""Draws the conclusions of a report from the observations of a run: figures, cost, bottleneck and advice. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from hetero.metrics.figures import Figure
from hetero.metrics.headspace import number_for_headspace
from hetero.metrics.steps import StepSummary
from hetero.pricing import cost
from hetero.pricing.catalog import Catalogue
from hetero.report.model import (
    SCHEMA_VERSION,
    Cost,
    Headline,
    PriceFacts,
    Report,
    RunFacts,
    Verdict,
)
from hetero.report.overruns import EMULATION_FLAGS, least_step_time_s, lost_share

__all__ = [
    "BUSY_UTILISATION",
    "COMPUTED_ON_DATA_HOSTS",
    "NOT_DELIVERED",
    "build_report",
    "cost_objection",
    "idle_data_hosts",
    "missing_emulation",
    "reading_share",
]

BUSY_UTILISATION = 0.9
"""Accelerators count as busy at this utilisation or more (the pass mark of MLPerf Storage)."""
COMPUTED_ON_DATA_HOSTS = "batches computed on data hosts"
"""Event that counts the batches that data hosts computed. Missing if a data host did not report its number."""
NOT_DELIVERED = "batches requested and not delivered"
"""Event that counts requests that were discarded, or in flight at the end, see `hetero.loaders.prefetching`."""
_BUSY_CPU_SHARE = 0.7
_SHORT_WAIT_SHARE = 0.1
_USED_INSTEAD = {
    ("--emulate-sample-seconds",): "preprocess with the CPUs of this machine, not with the vCPUs of their types",
    ("--emulate-step-seconds",): "compute with this machine, not with the accelerators of their types",
    tuple(EMULATION_FLAGS.values()): "work with this machine, not with the vCPUs and accelerators of their types",
}
"""What simulated hosts use if these flags are missing."""


def build_report(facts: RunFacts, catalogue: Catalogue) -> Report:
    """Build the report of a run.

    Args:
        facts: Observations of the run.
        catalogue: Instance types with the prices to use.

    Returns:
        The report. A figure that cannot be computed is None. For example, the step time is None if no step was
        measured, and the cost is None if a price is not known.
    """
    headline = _headline(facts)
    return Report(
        schema_version=SCHEMA_VERSION,
        run=facts,
        headline=headline,
        cost=_cost(facts, headline, catalogue),
        verdict=_verdict(facts, headline, catalogue),
        plan_error=_plan_error(facts, headline),
    )


def _plan_error(facts: RunFacts, headline: Headline | None) -> Figure | None:
    """Return the planned step time / the measured step time - 1, or None if one of them is not known."""
    if facts.expectation is None or headline is None or headline.step_time_mean is None:
        return None
    actual_s = headline.step_time_mean.value
    if actual_s <= 0 or facts.expectation.step_time_s <= 0:
        return None
    return Figure(value=cost.relative_error(facts.expectation.step_time_s, actual_s), unit="1", basis=facts.basis)


def missing_emulation(run: RunFacts) -> list[str]:
    """Return the flags that are missing to make simulated hosts as fast as machines of their instance types.

    The list is empty for a run on real hosts, because they preprocess and compute with their own hardware.
    """
    # `simulated` also lists what a run on real hosts emulates, so it does not show whether the hosts are simulated.
    # Simulated hosts are measured as trees of processes, and real hosts as whole machines.
    if not run.simulated or any(usage.scope != "tree" for usage in run.hosts):
        return []
    # A report has the options as texts, so an option that was not given is the text "None".
    return [flag for option, flag in EMULATION_FLAGS.items() if run.options.get(option) == "None"]


def cost_objection(run: RunFacts) -> str:
    """Return why this run's times cannot be multiplied by the prices of its instance types. Empty if they can."""
    missing = missing_emulation(run)
    if not missing:
        return ""
    if run.options.get("data service") == "tf":
        to_do = "Run the job on the machines: TensorFlow's data service emulates no vCPUs."
    else:
        to_do = f"Give {' and '.join(missing)}, or run the job on the machines."
    return f"Costs are not known, because simulated hosts {_USED_INSTEAD[tuple(missing)]}. {to_do}"


def _headline(facts: RunFacts) -> Headline | None:
    """Return the figures of the loader that took the most time. None if no rank used a loader."""
    # A script may build several loaders of the same name. Their labels number them in the same way on every rank.
    loaders: dict[str, list[tuple[int, StepSummary]]] = defaultdict(list)
    for rank in facts.ranks:
        for label, summary in rank.labelled:
            loaders[label].append((rank.rank, summary))
    if not loaders:
        return None

    def time_and_steps(label: str) -> tuple[float, int]:
        """Return the measured seconds and the number of steps of a loader on all ranks together."""
        summaries = [summary for _, summary in loaders[label]]
        return sum(s.total_s for s in summaries), sum(s.num_steps for s in summaries)

    # Without measured time, for example within the warm-up, the loader with the most steps counts.
    label = max(loaders, key=time_and_steps)
    ranks = loaders[label]
    # A job is as slow as its slowest rank.
    step_rank, step = _slowest(ranks, lambda summary: summary.step_time_mean_s)
    wait_rank, wait = _slowest(ranks, lambda summary: summary.data_wait_mean_s)

    def figure(value: float | None, unit: str) -> Figure | None:
        return None if value is None else Figure(value=value, unit=unit, basis=facts.basis)

    # A rank's batches may differ in size (the last one), so the rate uses the mean and not the batch size.
    samples_per_step = sum(s.num_samples_measured / s.num_steps_measured for _, s in ranks if s.num_steps_measured)
    step_time_s = step.step_time_mean_s if step else None
    # With emulation, this is the measured step time minus the time that real work took in excess. Without emulation it
    # is None. Then only other programs can have made steps longer, and `lost_share` bounds the share of the time.
    lower_bound_s = least_step_time_s([summary for _, summary in ranks], facts.events)
    # Other programs may have taken a share of the time. Subtract it from the bound. If there is no bound yet, subtract
    # it from the measured time.
    if step_time_s is not None and (lost := lost_share(facts)):
        lower_bound_s = (1 - lost) * (step_time_s if lower_bound_s is None else lower_bound_s)
    return Headline(
        loader=label,
        num_ranks=len(ranks),
        global_batch_samples=sum(summary.batch_samples for _, summary in ranks),
        num_steps_measured=min(summary.num_steps_measured for _, summary in ranks),
        warmup_steps=max(summary.warmup_steps for _, summary in ranks),
        slowest_step_rank=step_rank,
        slowest_wait_rank=wait_rank,
        step_time_mean=figure(step_time_s, "s"),
        step_time_p50=figure(step.step_time_p50_s if step else None, "s"),
        step_time_p95=figure(step.step_time_p95_s if step else None, "s"),
        data_wait_mean=figure(wait.data_wait_mean_s if wait else None, "s"),
        data_wait_p50=figure(wait.data_wait_p50_s if wait else None, "s"),
        data_wait_p95=figure(wait.data_wait_p95_s if wait else None, "s"),
        utilisation=figure(wait.utilisation if wait else None, "1"),
        samples_per_s=figure(samples_per_step / step_time_s if step_time_s else None, "1/s"),
        step_time_least=figure(lower_bound_s, "s"),
    )


def _slowest(
    ranks: Sequence[tuple[int, StepSummary]], value: Callable[[StepSummary], float | None]
) -> tuple[int | None, StepSummary | None]:
    """Return the rank with the largest value, and its summary.

    Both are None if any rank lacks a value, because that rank may be the slowest.
    """
    values = {rank: value(summary) for rank, summary in ranks}
    if None in values.values():
        return None, None
    # If ranks are equally slow, the lowest rank counts.
    return max(ranks, key=lambda entry: (values[entry[0]] or 0.0, -entry[0]))


def _cost(facts: RunFacts, headline: Headline | None, catalogue: Catalogue) -> Cost:
    """Return the cost of the run, with the prices that it comes from and the prices that are missing."""
    spot_usd = {group.name: group.spot_usd for group in facts.groups if group.spot_usd is not None}
    hosts = [(group.name, group.instance_type, float(group.count)) for group in facts.groups]
    # A host that joined the running job costs only for its share of the run.
    for joined in facts.joined_hosts:
        share = min(1.0, joined.present_s / facts.wall_s) if facts.wall_s > 0 else 1.0
        hosts.append((joined.group, joined.instance_type, share))
    # Spot groups have the user's price. All others need one from the catalogue.
    types = dict.fromkeys(name for group, name, _ in hosts if group not in spot_usd)
    missing = [line for line in map(catalogue.explain, types) if line is not None]
    prices = [
        PriceFacts(
            instance_type=name,
            hourly_usd=info.price.hourly_usd,
            region=info.price.region,
            as_of=info.price.as_of,
            source=info.price.source,
        )
        for name in types
        if (info := catalogue.find(name)) is not None and info.price is not None
    ]
    hourly_usd: float | None = None
    if not missing and facts.groups:
        by_type = {price.instance_type: price.hourly_usd for price in prices}
        hourly_usd = sum(
            number * (spot_usd[group] if group in spot_usd else by_type[name]) for group, name, number in hosts
        )

    objection = cost_objection(facts)

    def figure(cost_of: Callable[[float, float], float], value: float | None, unit: str) -> Figure | None:
        """Return the cost that follows from the price per hour and a time or rate, or None if it is not known."""
        # The prices of ml.p3.2xlarge were once multiplied with the times of a laptop, and the verdict was "94 %
        # dearer". So a run with an objection has an unknown cost.
        if hourly_usd is None or not value or objection:
            return None
        return Figure(value=cost_of(hourly_usd, value), unit=unit, basis=facts.basis)

    step_time = headline.step_time_mean.value if headline and headline.step_time_mean else None
    rate = headline.samples_per_s.value if headline and headline.samples_per_s else None
    return Cost(
        prices=tuple(prices),
        missing=tuple(missing),
        # The price per hour is a sum of list prices, so it is not measured.
        hourly=None if hourly_usd is None else Figure(value=hourly_usd, unit="USD/h", basis="modelled"),
        run=figure(cost.job_cost_usd, facts.wall_s, "USD"),
        per_1k_steps=figure(cost.cost_per_1k_steps_usd, step_time, "USD"),
        per_million_samples=figure(cost.cost_per_million_samples_usd, rate, "USD"),
        objection=objection,
    )


_WITHIN_WARMUP = (
    "No step was measured, because a rank had no more steps than the warm-up, which is left out. Train for longer, or "
    "with a smaller --warmup-steps. If each rank gets a part of a data set, repeat the data set, or a rank may run "
    "out of samples."
)
_NO_STEPS = (
    "No step was measured, because no rank took a batch in a measured loop. Check that the data set has samples, and "
    "that the ranks themselves, not processes that they start, use hetero's loader. In TensorFlow, loop over "
    "data.measure(...), not over a dataset that is made from the data."
)


def idle_data_hosts(facts: RunFacts) -> str | None:
    """Return advice if a job succeeded or was stopped, and its data hosts made no batch. None otherwise.

    Only endpoints count their batches. With tf.data.service the number is not known.
    """
    num_hosts = sum(group.count for group in facts.groups if group.role == "data")
    # Batches that ranks received, and batches that the endpoints of all hosts have reported.
    num_received, num_computed = facts.events.get("batches", 0), facts.events.get("batches computed", 0)
    # Count only batches of data hosts. One batch of a trainer host's endpoint once hid that the data hosts had made
    # none.
    num_on_data_hosts = facts.events.get(COMPUTED_ON_DATA_HOSTS)
    if num_on_data_hosts is None:
        # The number of a data host is missing, so any batch may have come from a data host.
        may_have_computed = bool(num_received or num_computed)
    else:
        # If ranks received more batches than the endpoints of all hosts have reported, the reports of some batches are
        # missing. A data host may have made these batches.
        may_have_computed = num_on_data_hosts > 0 or num_received > num_computed
    if not num_hosts or may_have_computed or not facts.has_ended_well or facts.options.get("data service") != "grpc":
        return None
    hosts = "The data host" if num_hosts == 1 else f"The {num_hosts} data hosts"
    if num_computed:
        return (
            f"{hosts} computed no batch: idle, and billed. The endpoints on trainer hosts made all {num_computed}. If "
            "these are many, look in the log whether ranks could not reach the data hosts. Or leave the data group out."
        )
    return (
        f"{hosts} computed no batch: idle, and billed. If the ranks have trained, iterate over hetero's DataLoader in "
        "the ranks themselves, because torch's own loader does not use data hosts. Or leave the data group out."
    )


def _verdict(facts: RunFacts, headline: Headline | None, catalogue: Catalogue) -> Verdict:
    """Return the bottleneck, with advice and the vCPUs that would remove it."""
    idle = idle_data_hosts(facts)
    # Without --emulate-sample-seconds, simulated hosts emulate no vCPUs, and the CPUs of this machine preprocess. Then
    # the number of vCPUs is unknown.
    has_real_cpus = "--emulate-sample-seconds" in missing_emulation(facts)
    vcpus = None if has_real_cpus else _preprocessing_vcpus(facts, catalogue)
    # Without a measured utilisation the bottleneck is unknown.
    if headline is None or headline.utilisation is None:
        has_steps = any(loader.num_steps for rank in facts.ranks for loader in rank.loaders)
        advice = idle or (_WITHIN_WARMUP if has_steps else _NO_STEPS)
        return Verdict(bottleneck="unknown", advice=advice, vcpus=vcpus, vcpus_needed=None)
    busy = headline.utilisation.value
    bottleneck, needed = "compute", None
    if busy >= BUSY_UTILISATION:
        advice = _busy_advice(facts, busy)
    else:
        bottleneck = "data"
        remedy, needed = _data_advice(facts, headline, busy, vcpus)
        advice = f"The slowest rank computes only {100 * busy:.0f} % of the time and waits for data otherwise. {remedy}"
    return Verdict(
        bottleneck=bottleneck,
        # Data hosts that make no batch cost the most, so they come first.
        advice=f"{idle} {advice}" if idle is not None else advice,
        vcpus=vcpus,
        vcpus_needed=None if needed is None else Figure(value=needed, unit="vCPU", basis="modelled"),
    )


def _busy_advice(facts: RunFacts, busy: float) -> str:
    """Return the advice for accelerators that compute a share ``busy`` of the time, at least `BUSY_UTILISATION`."""
    if missing := missing_emulation(facts):
        return (
            f"The ranks compute {100 * busy:.0f} % of the time: data keeps up on this machine. Whether data keeps up "
            f"on machines of these types is not known, because {_were_not_given(missing)}."
        )
    return (
        f"The accelerators compute {100 * busy:.0f} % of the time: data keeps up. More vCPUs would not make steps "
        "shorter."
    )


def _data_advice(facts: RunFacts, headline: Headline, busy: float, vcpus: int | None) -> tuple[str, int | None]:
    """Return the advice for accelerators that wait for data, and how many vCPUs would suffice, or None.

    Args:
        facts: Observations of the run.
        headline: Figures of the run.
        busy: Share of the time that the accelerators compute.
        vcpus: vCPUs that preprocess, or None if their number is not known.
    """
    if reading := _reading_advice(facts):
        return reading, None
    if _waits_are_rare(headline):
        return (
            "Nearly all of that time is in a few long waits. Either passes are short and begin without any batch ready "
            "(longer epochs or less time per batch would help), or batches come in bursts (more vCPUs would help). "
            "This run does not show how many would suffice."
        ), None
    if missing := missing_emulation(facts):
        return f"How many vCPUs would suffice is not known, because {_were_not_given(missing)}.", None
    if vcpus is None:
        return "How many vCPUs would suffice is not known, because it is not known how many vCPUs preprocess now.", None
    if not busy:
        return f"There is no compute: every vCPU beyond the {vcpus} that preprocess now makes steps shorter.", None
    # If the CPUs are idle, more of them do not help. A slow link between data hosts and trainers once led to the advice
    # to buy more vCPUs.
    if idle_cpus := _idle_cpus(facts):
        return (
            f"{idle_cpus} Before adding hosts, find out why preprocessing waits (storage, network, too few processes)."
        ), None
    # Rates are in units of the present rate. The accelerators could use a rate of 1 / busy, and each vCPU makes a rate
    # of 1 / vcpus.
    needed = number_for_headspace(1 / busy, 1 / vcpus)
    return (
        f"{needed - vcpus} more vCPUs beside the {vcpus} that preprocess now would suffice, if preprocessing scales "
        "with vCPUs."
    ), needed


def reading_share(facts: RunFacts) -> float:
    """Return the share of the time of batches that endpoints waited, mostly for storage. 0 if it is not known."""
    # An emulated vCPU needs the emulated time, whatever the real work waits for.
    if facts.options.get("emulate_sample_s", "None") != "None":
        return 0.0
    busy_s = sum(usage.endpoints_busy_s or 0.0 for usage in facts.hosts)
    return sum(usage.endpoints_wait_s or 0.0 for usage in facts.hosts) / busy_s if busy_s else 0.0


def _reading_advice(facts: RunFacts) -> str | None:
    """Return the advice for a run whose endpoints waited for storage longer than they computed. None for others."""
    share = reading_share(facts)
    if share <= 1 / 2:
        return None
    return (
        f"The bottleneck is reading, not CPU: endpoints wait {100 * share:.0f} % of the time of a batch, "
        "mostly for storage. Use faster storage, or copy the files to local disks. More endpoints or hosts help only "
        "while the storage can give more."
    )


def _waits_are_rare(headline: Headline) -> bool:
    """Return whether 19 of 20 steps hardly wait, and a few long waits make up the mean.

    More vCPUs need not make such waits shorter. A wait counts as short if it is much shorter than the mean wait and the
    mean step. A wait that is long for a step is never short, however long the other waits are.
    """
    mean, p95, step = headline.data_wait_mean, headline.data_wait_p95, headline.step_time_mean
    if mean is None or p95 is None or step is None:
        return False
    return p95.value < _SHORT_WAIT_SHARE * min(mean.value, step.value)


def _preprocessing_vcpus(facts: RunFacts, catalogue: Catalogue) -> int | None:
    """Return the vCPUs of all hosts that preprocess. None if their number is unknown or has changed."""
    # Trainer hosts use a part of their vCPUs, and that share is not recorded.
    if facts.placement == "hybrid":
        return None
    # The number of vCPUs has changed during the run.
    if facts.joined_hosts:
        return None
    role = "trainer" if facts.placement == "homogeneous" else "data"
    total = 0
    for group in facts.groups:
        if group.role == role:
            info = catalogue.find(group.instance_type)
            if info is None or info.vcpus is None:
                return None
            total += group.count * info.vcpus
    # Without vCPUs, no host of that role is in the job.
    return total or None


def _were_not_given(flags: Sequence[str]) -> str:
    return f"{' and '.join(flags)} {'was' if len(flags) == 1 else 'were'} not given"


def _idle_cpus(facts: RunFacts) -> str | None:
    """Return a sentence for the user if more CPUs would not help, because the present ones were not busy. Else None.

    The result is also None for simulated runs, because emulated vCPUs wait instead of working, and for hybrid runs,
    because the load of preprocessing on trainer hosts is not known.
    """
    if facts.simulated or facts.placement == "hybrid":
        return None
    # In a homogeneous job, the trainer hosts preprocess. In other jobs, the hosts without ranks do.
    is_homogeneous = facts.placement == "homogeneous"
    left_out: set[str] = set() if is_homogeneous else {rank.host for rank in facts.ranks}
    num_hosts = sum(group.count for group in facts.groups if is_homogeneous or group.role == "data")
    usages = [
        usage
        for usage in facts.hosts
        if usage.scope == "host" and usage.cpu_percent_mean is not None and usage.host not in left_out
    ]
    # A host that was not measured may be the busy one.
    if not usages or len(usages) != num_hosts:
        return None
    # All of `usages` have a mean. `or 0.0` is only for the type checker.
    share = max((usage.cpu_percent_mean or 0.0) / (100 * usage.num_cpus) for usage in usages)
    if share >= _BUSY_CPU_SHARE:
        return None
    whose = "the CPUs" if is_homogeneous else "the data hosts' CPUs"
    return f"But {whose} are not busy either: {100 * share:.0f} % at most on any host."

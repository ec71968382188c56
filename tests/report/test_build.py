"""What is concluded from a run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from hetero.decide.profile import profile_of_report
from hetero.documents.records import decode, encode
from hetero.metrics.hosts import HostUsage
from hetero.metrics.steps import StepSummary
from hetero.pricing import Catalogue
from hetero.report import GroupFacts, RankFacts, Report, RunFacts, build_report, render_report
from hetero.report.build import COMPUTED_ON_DATA_HOSTS
from hetero.report.model import JoinedFacts

PRICED = Catalogue.load("seed-2022")
FactsMaker = Callable[..., RunFacts]
SummaryMaker = Callable[..., StepSummary]
UsageMaker = Callable[..., HostUsage]


@pytest.mark.parametrize(
    ("is_heterogeneous", "hourly_usd", "per_1k_steps_usd"), [(False, 3.825, 1.268), (True, 5.661, 0.289)]
)
def test_cost_of_the_published_pair_is_right(
    make_facts: FactsMaker, is_heterogeneous: bool, hourly_usd: float, per_1k_steps_usd: float
) -> None:
    cost = build_report(make_facts(is_heterogeneous=is_heterogeneous), PRICED).cost
    assert cost.hourly is not None
    assert cost.per_1k_steps is not None
    assert cost.per_million_samples is not None
    assert cost.run is not None
    assert cost.hourly.value == pytest.approx(hourly_usd)
    assert cost.per_1k_steps.value == pytest.approx(per_1k_steps_usd, abs=5e-4)
    assert cost.per_million_samples.value == pytest.approx(cost.per_1k_steps.value * 1000 / 64)
    assert cost.run.value == pytest.approx(hourly_usd * 130 / 3600)
    assert cost.missing == ()
    assert {(price.instance_type, price.as_of) for price in cost.prices} >= {("ml.p3.2xlarge", "2022")}


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({}, "Give --emulate-sample-seconds and --emulate-step-seconds, or run the job on the machines."),
        ({"emulate_step_s": "0.1"}, "Give --emulate-sample-seconds, or run"),
        ({"emulate_sample_s": "0.1"}, "Give --emulate-step-seconds, or run"),
        ({"data service": "tf"}, "Run the job on the machines: TensorFlow's data service emulates no vCPUs."),
    ],
)
def test_cost_of_a_simulated_run_without_emulation_is_unknown(
    make_facts: FactsMaker, changes: dict[str, str], objection: str
) -> None:
    options = {"emulate_sample_s": "None", "emulate_step_s": "None"} | changes
    report = build_report(make_facts(options=options), PRICED)
    cost = report.cost
    assert cost.run is cost.per_1k_steps is cost.per_million_samples is None
    assert cost.hourly is not None
    assert objection in cost.objection
    text = render_report(report)
    assert objection in text
    assert "Per 1,000 steps" not in text
    assert decode(Report, encode(report)) == report


def test_cost_of_a_run_on_real_hosts_needs_no_emulation(make_facts: FactsMaker, usage_of: UsageMaker) -> None:
    options = {"emulate_sample_s": "None", "emulate_step_s": "None"}
    measured = build_report(make_facts(options=options, simulated=()), PRICED)
    own_steps = make_facts(options=options, hosts=(usage_of("algo-1", scope="host"),), simulated=("Steps are waits.",))
    for report in (measured, build_report(own_steps, PRICED)):
        assert report.cost.per_1k_steps is not None
        assert report.cost.objection == ""


def test_verdict_on_accelerators_that_were_not_emulated_is_of_this_machine(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    ranks = (RankFacts(rank=0, host="algo-1", loaders=(summary_of(0.2, 0.95),)),)
    options = {"emulate_sample_s": "0.1", "emulate_step_s": "None"}
    verdict = build_report(make_facts(options=options, ranks=ranks), PRICED).verdict
    assert verdict.bottleneck == "compute"
    assert "data keeps up on this machine" in verdict.advice
    assert "--emulate-step-seconds was not given" in verdict.advice


def test_cost_with_an_unpriced_type_is_refused_and_says_what_to_pass(make_facts: FactsMaker) -> None:
    report = build_report(make_facts(is_heterogeneous=True), Catalogue.load(overrides=["ml.p3.2xlarge=3.825"]))
    assert report.cost.hourly is report.cost.run is report.cost.per_1k_steps is report.cost.per_million_samples is None
    assert report.cost.missing == ("no price for ml.c5.9xlarge; pass --price ml.c5.9xlarge=USD",)
    assert report.headline is not None
    assert report.headline.step_time_mean is not None


@pytest.mark.parametrize(("simulated", "basis"), [((), "measured"), (("vCPUs",), "simulated")])
def test_figures_carry_how_they_came_about(make_facts: FactsMaker, simulated: tuple[str, ...], basis: str) -> None:
    report = build_report(make_facts(simulated=simulated), PRICED)
    assert report.headline is not None
    for figure in (report.headline.step_time_mean, report.headline.utilisation, report.cost.per_1k_steps):
        assert figure is not None
        assert figure.basis == basis
    assert report.cost.hourly is not None
    assert report.cost.hourly.basis == "modelled"


def test_headline_over_ranks_is_the_slowest_rank(make_facts: FactsMaker, summary_of: SummaryMaker) -> None:
    ranks = tuple(
        RankFacts(rank=rank, host="algo-1", loaders=(summary_of(step_s, busy),))
        for rank, (step_s, busy) in enumerate([(1.00, 0.5), (1.02, 0.9), (1.01, 0.3)])
    )
    headline = build_report(make_facts(ranks=ranks), PRICED).headline
    assert headline is not None
    assert (headline.slowest_step_rank, headline.slowest_wait_rank) == (1, 2)
    assert headline.num_ranks == 3
    assert headline.global_batch_samples == 3 * 64
    assert headline.step_time_mean is not None
    assert headline.step_time_mean.value == 1.02
    assert headline.utilisation is not None
    assert headline.utilisation.value == 0.3
    assert headline.samples_per_s is not None
    assert headline.samples_per_s.value == pytest.approx(3 * 64 / 1.02)


def test_headline_is_of_the_loader_that_took_most_time(make_facts: FactsMaker, summary_of: SummaryMaker) -> None:
    loaders = (
        summary_of(0.01, name="val"),
        summary_of(1.0, name="train"),
        summary_of(None, name="unused", num_steps=0),
    )
    headline = build_report(make_facts(ranks=(RankFacts(rank=0, host="h", loaders=loaders),)), PRICED).headline
    assert headline is not None
    assert headline.loader == "train"


def test_headline_of_two_loaders_of_one_name_does_not_add_them_up(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    loaders = (summary_of(1.0), summary_of(2.0))
    ranks = tuple(RankFacts(rank=rank, host="h", loaders=loaders) for rank in range(2))
    headline = build_report(make_facts(ranks=ranks), PRICED).headline
    assert headline is not None
    assert (headline.num_ranks, headline.global_batch_samples) == (2, 128)
    assert headline.step_time_mean is not None
    assert headline.step_time_mean.value == 2.0


def test_headline_with_one_rank_unmeasured_refuses_figures(make_facts: FactsMaker, summary_of: SummaryMaker) -> None:
    ranks = (
        RankFacts(rank=0, host="h", loaders=(summary_of(1.0),)),
        RankFacts(rank=1, host="h", loaders=(summary_of(None),)),
    )
    report = build_report(make_facts(ranks=ranks), PRICED)
    assert report.headline is not None
    assert report.headline.step_time_mean is report.headline.utilisation is report.headline.samples_per_s is None
    assert report.headline.num_steps_measured == 0
    assert report.verdict.bottleneck == "unknown"
    assert report.cost.per_1k_steps is None


@pytest.mark.parametrize("ranks", [(), (RankFacts(rank=0, host="h", loaders=()),)])
def test_report_of_a_run_without_batches_has_no_headline(make_facts: FactsMaker, ranks: tuple[RankFacts, ...]) -> None:
    report = build_report(make_facts(ranks=ranks), PRICED)
    assert report.headline is None
    assert report.verdict.bottleneck == "unknown"


def with_utilisation(summary_of: SummaryMaker, utilisation: float) -> tuple[RankFacts, ...]:
    return (RankFacts(rank=0, host="algo-1", loaders=(summary_of(1.0, utilisation),)),)


@pytest.mark.fault("F7")
def test_verdict_of_the_worked_example_names_64_more_vcpus(make_facts: FactsMaker, summary_of: SummaryMaker) -> None:
    groups = (GroupFacts(name="g", role="trainer", instance_type="ml.p4d.24xlarge", count=1),)
    facts = make_facts(groups=groups, ranks=with_utilisation(summary_of, 0.6))
    verdict = build_report(facts, PRICED).verdict
    assert verdict.bottleneck == "data"
    assert verdict.vcpus == 96
    assert verdict.vcpus_needed is not None
    assert (verdict.vcpus_needed.value, verdict.vcpus_needed.basis) == (160, "modelled")
    assert "64 more vCPUs" in verdict.advice


def test_verdict_of_busy_accelerators_is_compute(make_facts: FactsMaker, summary_of: SummaryMaker) -> None:
    verdict = build_report(make_facts(ranks=with_utilisation(summary_of, 0.95)), PRICED).verdict
    assert (verdict.bottleneck, verdict.vcpus_needed) == ("compute", None)


def test_verdict_of_a_heterogeneous_run_counts_the_data_hosts(make_facts: FactsMaker, summary_of: SummaryMaker) -> None:
    facts = make_facts(is_heterogeneous=True, ranks=with_utilisation(summary_of, 0.5))
    verdict = build_report(facts, PRICED).verdict
    assert verdict.vcpus == 36
    assert verdict.vcpus_needed is not None
    assert verdict.vcpus_needed.value == 72


@pytest.mark.parametrize(
    ("changes", "utilisation", "message"),
    [
        ({"placement": "hybrid"}, 0.5, "is not known"),
        ({"groups": (GroupFacts(name="g", role="trainer", instance_type="x", count=1),)}, 0.5, "is not known"),
        ({}, 0.0, "There is no compute"),
        ({"options": {"emulate_sample_s": "None"}}, 0.5, "--emulate-sample-seconds was not given"),
    ],
)
def test_verdict_without_a_basis_gives_no_number(
    make_facts: FactsMaker, summary_of: SummaryMaker, changes: dict[str, Any], utilisation: float, message: str
) -> None:
    facts = make_facts(ranks=with_utilisation(summary_of, utilisation), **changes)
    verdict = build_report(facts, PRICED).verdict
    assert (verdict.bottleneck, verdict.vcpus_needed) == ("data", None)
    assert message in verdict.advice


def test_verdict_of_endpoints_that_read_more_than_they_compute_names_storage_and_shards(
    make_facts: FactsMaker, usage_of: UsageMaker, summary_of: SummaryMaker
) -> None:
    def report_with(wait_s: float, **changes: Any) -> Report:
        waits_s = {"s3://bucket/a.tar": wait_s / 2}
        hosts = [
            usage_of(f"algo-{number}", endpoints_busy_s=10.0, endpoints_wait_s=wait_s, shard_waits_s=waits_s)
            for number in (2, 3)
        ]
        ranks = with_utilisation(summary_of, 0.5)
        return build_report(make_facts(is_heterogeneous=True, ranks=ranks, hosts=tuple(hosts), **changes), PRICED)

    report = report_with(8.0)
    assert "The bottleneck is reading, not CPU: endpoints wait 80 % of the time of a batch" in report.verdict.advice
    assert report.verdict.vcpus_needed is None
    assert re.search(r"`s3://bucket/a.tar` \| +8000 ms", render_report(report))
    assert "8000 ms, 80 % of batches" in render_report(report)
    (supply,) = profile_of_report(report, PRICED).supply
    assert supply.sample_wait_s.mean == pytest.approx(4 * supply.sample_cpu_s.mean)
    for other in (report_with(4.0), report_with(8.0, options={"emulate_sample_s": "0.1"})):
        assert "reading" not in other.verdict.advice
        assert other.verdict.vcpus_needed is not None


def test_verdict_of_few_long_waits_gives_no_number(make_facts: FactsMaker, summary_of: SummaryMaker) -> None:
    summary = dataclasses.replace(summary_of(0.2, 0.7), data_wait_p95_s=0.0006)
    facts = make_facts(ranks=(RankFacts(rank=0, host="algo-1", loaders=(summary,)),))
    verdict = build_report(facts, PRICED).verdict
    assert (verdict.bottleneck, verdict.vcpus_needed) == ("data", None)
    assert "few long waits" in verdict.advice


@pytest.mark.parametrize(("cpu_percent_mean", "has_number"), [(100.0, False), (790.0, True)])
def test_verdict_of_a_real_run_with_idle_cpus_does_not_sell_cpus(
    make_facts: FactsMaker,
    summary_of: SummaryMaker,
    usage_of: Callable[..., HostUsage],
    cpu_percent_mean: float,
    has_number: bool,
) -> None:
    usage = usage_of("algo-1", scope="host", num_cpus=8, cpu_percent_mean=cpu_percent_mean)
    facts = make_facts(simulated=(), hosts=(usage,), ranks=with_utilisation(summary_of, 0.5))
    verdict = build_report(facts, PRICED).verdict
    assert (verdict.vcpus_needed is not None) is has_number
    assert ("not busy either" in verdict.advice) is not has_number


@pytest.mark.fault("F20")
@pytest.mark.parametrize(("cpu_percent_mean", "has_number"), [(300.0, False), (3500.0, True)])
def test_verdict_of_a_real_run_with_idle_data_hosts_points_at_the_network(
    make_facts: FactsMaker,
    summary_of: SummaryMaker,
    usage_of: Callable[..., HostUsage],
    cpu_percent_mean: float,
    has_number: bool,
) -> None:
    trainer = usage_of("algo-1", scope="host", num_cpus=8, cpu_percent_mean=10.0)
    data = usage_of("algo-2", scope="host", num_cpus=36, cpu_percent_mean=cpu_percent_mean)
    ranks = with_utilisation(summary_of, 0.5)
    facts = make_facts(is_heterogeneous=True, simulated=(), hosts=(trainer, data), ranks=ranks)
    verdict = build_report(facts, PRICED).verdict
    assert verdict.bottleneck == "data"
    assert (verdict.vcpus_needed is not None) is has_number
    assert ("the data hosts' CPUs are not busy either: 8 % at most" in verdict.advice) is not has_number
    assert ("storage, network" in verdict.advice) is not has_number


def test_verdict_of_a_real_run_that_knows_too_few_hosts_takes_none_for_idle(
    make_facts: FactsMaker, summary_of: SummaryMaker, usage_of: Callable[..., HostUsage]
) -> None:
    trainer = usage_of("algo-1", scope="host", num_cpus=8, cpu_percent_mean=10.0)
    ranks = with_utilisation(summary_of, 0.5)
    facts = make_facts(is_heterogeneous=True, simulated=(), hosts=(trainer,), ranks=ranks)
    assert "not busy" not in build_report(facts, PRICED).verdict.advice


IDLE = {"ranks": (), "options": {"data service": "grpc"}}


@pytest.mark.parametrize(
    ("changes", "is_idle"),
    [
        ({}, True),
        ({"events": {"batches": 0, "batches computed": 0, "job restarts": 1}}, True),
        ({"events": {"batches": 1}}, False),
        ({"events": {"batches computed": 1}}, False),
        ({"events": {"batches": 2, "batches computed": 3, COMPUTED_ON_DATA_HOSTS: 0}}, True),
        ({"events": {"batches": 2, "batches computed": 3, COMPUTED_ON_DATA_HOSTS: 1}}, False),
        ({"events": {"batches": 2, "batches computed": 1, COMPUTED_ON_DATA_HOSTS: 0}}, False),
        ({"exit_code": 30}, False),
        ({"exit_code": 143}, True),
        ({"options": {"data service": "tf"}}, False),
    ],
    ids=[
        "no counts",
        "zeros",
        "received",
        "computed",
        "all on trainer hosts",
        "one on data hosts",
        "one not counted",
        "failed",
        "stopped",
        "tf.data service",
    ],
)
def test_verdict_says_first_that_data_hosts_were_idle(
    make_facts: FactsMaker, changes: dict[str, Any], is_idle: bool
) -> None:
    advice = build_report(make_facts(is_heterogeneous=True, **IDLE | changes), PRICED).verdict.advice
    assert advice.startswith("The data host computed no batch: idle, and billed.") == is_idle


def test_verdict_of_a_measured_run_says_first_that_trainer_hosts_made_all_batches(make_facts: FactsMaker) -> None:
    events = {"batches": 9, "batches computed": 9, COMPUTED_ON_DATA_HOSTS: 0}
    facts = make_facts(is_heterogeneous=True, options={"data service": "grpc"}, events=events)
    advice = build_report(facts, PRICED).verdict.advice
    assert advice.startswith("The data host computed no batch: idle, and billed. The endpoints on trainer hosts made")
    assert "of the time" in advice


def test_verdict_of_a_homogeneous_run_without_steps_names_processes_that_ranks_start(make_facts: FactsMaker) -> None:
    advice = build_report(make_facts(**IDLE), PRICED).verdict.advice
    assert "no rank took a batch" in advice
    assert "not processes that they start" in advice


def test_host_that_joins_a_spot_group_has_its_price(make_facts: FactsMaker) -> None:
    groups = (
        GroupFacts(name="data", role="data", instance_type="CPU:16", count=2, spot_usd=0.2),
        GroupFacts(name="dnn", role="trainer", instance_type="ml.p3.2xlarge", count=1),
    )
    joined = (
        JoinedFacts(host="a", group="data", instance_type="CPU:16", present_s=65.0),
        JoinedFacts(host="b", group="data", instance_type="CPU:16", present_s=1e6),
    )
    alone = build_report(make_facts(groups=groups), PRICED).cost.hourly
    cost = build_report(make_facts(groups=groups, joined_hosts=joined), PRICED).cost
    assert alone is not None
    assert cost.hourly is not None
    assert cost.missing == ()  # CPU:16 has no list price and needs none
    assert cost.hourly.value - alone.value == pytest.approx(0.2 * 65 / 130 + 0.2)

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.plan import make_plan
from hetero.decide.planning.plan_page import plan_page
from hetero.decide.planning.plan_text import plan_text
from hetero.decide.planning.reasons import seconds_text, usd_text
from hetero.documents.records import json_text
from hetero.errors import ConfigError
from hetero.metrics.profile.profile import CodecProfile, ConcurrencyPoint, Profile, Spread
from hetero.pricing.catalog import Catalogue
from hetero.report.plan import Plan, load_plan
from tests.support.planning import make_profile, measured


def plan_of(catalogue: Catalogue, *, menu: tuple[str, ...] = ("ml.c5.9xlarge",), **profile: Any) -> Plan:
    return make_plan(make_profile(**profile), catalogue, PlanOptions(menu=menu))


def test_plan_of_a_starving_job_adds_data_hosts(catalogue: Catalogue) -> None:
    plan = plan_of(catalogue, headspace_s=0.18, cpu_s=0.15)
    assert plan.reason == "data hosts pay"
    assert plan.answer.startswith("Add 1 x ml.c5.9xlarge as data hosts: a step takes ")
    assert plan.speedup > plan.break_even_speedup == pytest.approx(5.661 / 3.825)  # type: ignore[operator]
    assert plan.chance_to_pay == 1
    assert plan.chosen.flags == "--group data=ml.c5.9xlarge:1 --group trainer=ml.p3.2xlarge:1 --trainer-endpoints 8"
    assert 'InstanceGroup("data", "ml.c5.9xlarge", 1)' in plan.chosen.instance_groups


def disturbed(share: float, **changes: Any) -> Profile:
    profile = make_profile(headspace_s=0.18, cpu_s=0.15)
    return replace(profile, training=replace(profile.training, excess_share=share, **changes))


def test_plan_from_times_that_others_may_have_taken_in_part_has_wider_intervals_and_says_so(
    catalogue: Catalogue,
) -> None:
    alone, beside = (make_plan(disturbed(share), catalogue, PlanOptions()) for share in (0.0, 0.3))
    widths = [plan.baseline.step_time_high_s - plan.baseline.step_time_low_s for plan in (alone, beside)]
    assert widths[1] > 3 * widths[0]
    assert beside.baseline.step_time_low_s < 0.8 * beside.baseline.step_time.value
    assert beside.answer.startswith("Up to 30 % of the measured times may be due to other work of the machine, so the")
    assert "so the intervals are wider. Add 1 x ml.c5" in beside.answer


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"share": 0.79}, "Up to 79 % of the measured times .*, so no plan follows from the profile\n  to do: run"),
        ({"share": 0.0, "step_s": Spread.of([1.0] * 9, "s", "measured")}, "has 9 measured steps; .* at least 10\n"),
    ],
)
def test_profile_of_a_machine_that_was_too_busy_gives_no_plan(
    catalogue: Catalogue, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        make_plan(disturbed(**changes), catalogue)


@pytest.mark.parametrize(
    ("job", "reason", "words"),
    [
        # The accelerator is the slowest part.
        (
            {"headspace_s": 1.16, "cpu_s": 0.1, "step_s": 1.19},
            "accelerator",
            "the accelerator is busy 97 % of each step",
        ),
        # Data hosts would help a little, for a higher price per hour.
        ({"headspace_s": 0.85, "cpu_s": 0.125}, "break-even", "but 1,000 steps would cost"),
        # 312 MB/s carry 16 samples/s of 20 MB. The host itself makes 40.
        (
            {"headspace_s": 0.01, "cpu_s": 0.2, "sample_bytes": 2e7, "batch": 2},
            "trainer network",
            "the network interface of ml.p3.2xlarge carries 312 MB/s, which 1 x ml.c5.9xlarge fill",
        ),
        # An endpoint of the data host would need 60 GiB.
        (
            {"headspace_s": 0.18, "cpu_s": 0.15, "private_bytes": 60e9},
            "memory",
            "the memory of ml.c5.9xlarge holds only 1 endpoint, and",
        ),
        # Six CPUs have nothing to do.
        ({"headspace_s": 0.18, "cpu_s": 0.02, "processes": 2}, "free CPUs", "Use 8 processes per trainer host"),
        # Eight processes wait for storage while the CPUs idle.
        (
            {"headspace_s": 0.18, "cpu_s": 0.002, "wait_s": 0.1},
            "storage",
            "processes wait for storage most of the time",
        ),
        # Data hosts cannot build the data set.
        (
            {"headspace_s": 0.18, "cpu_s": 0.15, "has_registered_dataset": False},
            "not registered",
            "no @hetero.dataset registers its factory",
        ),
    ],
)
def test_plan_against_data_hosts_states_the_reason(
    catalogue: Catalogue, job: dict[str, Any], reason: str, words: str
) -> None:
    plan = plan_of(catalogue, **job)
    assert (plan.reason, plan.answer) == (reason, plan.answer)
    assert ("The bottleneck of samples is reading, not CPU" in " ".join(plan.notes)) == (reason == "storage")
    assert words in plan.answer
    assert all(group.role == "trainer" for group in plan.chosen.groups)


def test_plan_sends_uint8_before_it_adds_hosts(catalogue: Catalogue) -> None:
    # As float32 the trainer's network carries 312 samples/s, as uint8 four times as many.
    plan = plan_of(catalogue, headspace_s=0.1, cpu_s=0.03, sample_bytes=1e6, dtype="float32", step_s=0.4)
    assert plan.chosen.form == "uint8"
    assert "return the images as uint8" in " ".join(plan.notes)


def test_plan_compresses_if_the_network_is_full(catalogue: Catalogue) -> None:
    codec = CodecProfile(name="lz4", ratio=0.3, encode_cpu_s_per_sample=1e-4, decode_cpu_s_per_sample=1e-4)
    plan = plan_of(catalogue, headspace_s=0.1, cpu_s=0.03, sample_bytes=1e6, step_s=0.4, codecs=(codec,))
    assert plan.chosen.form == "lz4"


def test_plan_trains_on_a_bigger_machine_of_the_family_if_that_is_cheaper() -> None:
    prices = ("ml.g5.xlarge=1.4", "ml.g5.4xlarge=2.0", "ml.c5.9xlarge=1.8")
    job = make_profile(headspace_s=0.1, cpu_s=0.025, vcpus=4, processes=4, trainer="ml.g5.xlarge")
    plan = make_plan(job, Catalogue.load(overrides=prices))
    assert plan.reason == "bigger machine"
    assert plan.answer.startswith("Train on ml.g5.4xlarge instead of ml.g5.xlarge")


def test_plan_for_time_spends_more(catalogue: Catalogue) -> None:
    job = make_profile(headspace_s=0.7, cpu_s=0.125)
    cheap = make_plan(job, catalogue, PlanOptions(menu=("ml.c5.18xlarge",)))
    fast = make_plan(job, catalogue, PlanOptions(menu=("ml.c5.18xlarge",), goal="time"))
    assert cheap.chosen.groups == cheap.baseline.groups
    assert fast.chosen.step_time.value < cheap.chosen.step_time.value
    limit = PlanOptions(menu=("ml.c5.18xlarge",), goal="time", max_usd_per_1k_steps=1.1)
    assert make_plan(job, catalogue, limit).chosen.groups == cheap.chosen.groups


def test_plan_with_limits_that_no_cluster_satisfies_names_the_nearest(catalogue: Catalogue) -> None:
    job = make_profile(headspace_s=0.18, cpu_s=0.15)
    with pytest.raises(ConfigError, match=r"the lowest cost is .* USD per 1,000 steps, the limit is 0.0001"):
        make_plan(job, catalogue, PlanOptions(max_usd_per_1k_steps=1e-4))
    with pytest.raises(ConfigError, match=r"the shortest step of all clusters is .* s, the limit is 0.1 s"):
        make_plan(job, catalogue, PlanOptions(max_hours=1, num_steps=36_000))


def test_plan_of_equal_draws_knows_how_likely_it_pays(catalogue: Catalogue) -> None:
    # At the break-even, the unknown speed of the data host's vCPUs decides.
    plan = make_plan(make_profile(headspace_s=0.1, cpu_s=0.22, vcpus=36, processes=36), catalogue)
    uncertain = [c for c in plan.alternatives if c.step_time_high_s > 1.3 * c.step_time_low_s]
    assert uncertain
    assert any("was not measured" in note for note in plan.notes)


def test_plan_with_a_given_vcpu_speed_has_a_narrow_interval(catalogue: Catalogue) -> None:
    job = make_profile(headspace_s=0.05, cpu_s=0.15)
    menu = ("ml.c5.9xlarge",)
    assumed = make_plan(job, catalogue, PlanOptions(menu=menu))
    given = make_plan(job, catalogue, PlanOptions(menu=menu, vcpu_speeds={"ml.c5.9xlarge": 1.0}))

    def width(plan: Plan) -> float:
        return plan.chosen.step_time_high_s / plan.chosen.step_time_low_s

    assert width(given) < 1.15 < width(assumed)
    assert not any("was not measured" in note for note in given.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": "speed"}, "goal is 'speed'; expected one of cost, time"),
        ({"max_hours": 3.0}, r"max_hours is given without num_steps.*--steps N"),
        ({"num_ranks": 0}, "num_ranks is 0; expected a number above 0"),
        ({"max_usd_per_1k_steps": float("nan")}, "max_usd_per_1k_steps is nan"),
    ],
)
def test_options_that_contradict_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"menu": ("ml.m5.4xlarge",)}, r"no price for ml\.m5\.4xlarge; pass --price ml\.m5\.4xlarge=USD"),
        ({"menu": ("ml.c5.9xlrge",)}, r"did you mean ml\.c5\.9xlarge"),
        ({"trainer_type": "ml.p4d.24xlarge"}, r"measured on ml\.p3\.2xlarge, the baseline is ml\.p4d\.24xlarge"),
        ({"num_trainer_hosts": 257}, "257 trainer hosts with 1 ranks each; expected at most 256 ranks"),
        ({"num_ranks": 3, "num_trainer_hosts": 2}, "the number of ranks is 3, the number of trainer hosts 2"),
    ],
)
def test_plan_without_a_fact_that_it_needs_is_rejected(
    catalogue: Catalogue, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(make_profile(headspace_s=0.18, cpu_s=0.15), catalogue, PlanOptions(**options))


def test_plan_without_any_price_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"no price for ml\.p3\.2xlarge"):
        make_plan(make_profile(headspace_s=0.18, cpu_s=0.15), Catalogue.load())


def test_type_without_known_vcpus_is_rejected() -> None:
    catalogue = Catalogue.load("seed-2022", overrides=("ml.x9.large=1",))
    with pytest.raises(ConfigError, match=r"the number of vCPUs of ml\.x9\.large is not known"):
        make_plan(make_profile(headspace_s=0.18, cpu_s=0.15), catalogue, PlanOptions(menu=("ml.x9.large",)))


def test_spot_hosts_are_cheaper_and_named(catalogue: Catalogue) -> None:
    options = PlanOptions(menu=("ml.c5.9xlarge",), spot_usd={"ml.c5.9xlarge": 0.6})
    plan = make_plan(make_profile(headspace_s=0.18, cpu_s=0.15), catalogue, options)
    assert plan.chosen.spending == "spot data hosts"
    assert "(spot)" in plan.answer
    assert any("spot instance" in note for note in plan.notes)


def test_plan_written_as_json_reads_the_same(catalogue: Catalogue, tmp_path: Path) -> None:
    plan = plan_of(catalogue, headspace_s=0.18, cpu_s=0.15)
    (tmp_path / "plan.json").write_text(json_text(plan))
    assert load_plan(tmp_path) == plan
    (tmp_path / "plan.json").write_text('{"schema_version": 7}')
    with pytest.raises(ConfigError, match="schema_version: found 7, expected 1; make one with hetero plan"):
        load_plan(tmp_path)


def test_plan_as_text_has_the_answer_the_table_and_what_to_paste(catalogue: Catalogue) -> None:
    plan = plan_of(catalogue, headspace_s=0.18, cpu_s=0.15)
    text = plan_text(plan)
    assert text.startswith(plan.answer)
    assert text.count("\n|") == len(plan.alternatives) + 2
    assert "| chosen" in text
    assert "Break-even: the cluster costs 1.48 times as much per hour" in text
    assert 'InstanceGroup("trainer", "ml.p3.2xlarge", 1),' in text


def test_same_profile_gives_the_same_plan(catalogue: Catalogue) -> None:
    job = make_profile(headspace_s=0.18, cpu_s=0.15)
    assert make_plan(job, catalogue) == make_plan(job, catalogue)


def test_receiving_costs_the_trainer_hosts_cpus(catalogue: Catalogue) -> None:
    # 400 s of CPU per GB: eight vCPUs receive 0.02 GB/s.
    job = make_profile(headspace_s=0.05, cpu_s=0.02, sample_bytes=1e5, batch=64)
    slow = replace(job, training=replace(job.training, receive_cpu_s_per_gb=measured(400.0, "s/GB")))
    options = PlanOptions(menu=("ml.c5.18xlarge",), goal="time")
    assert make_plan(slow, catalogue, options).chosen.step_time.value > (
        1.2 * make_plan(job, catalogue, options).chosen.step_time.value
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (12.345, "12.3 s"), (999.6, "1,000 s")],
)
def test_step_time_has_three_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(("usd", "text"), [(0.12345, "0.123"), (99.94, "99.9"), (99.96, "100"), (104_321.0, "104,321")])
def test_cost_has_three_digits_and_no_exponent(usd: float, text: str) -> None:
    assert usd_text(usd) == text


@pytest.mark.parametrize(
    ("path", "points"),
    [
        ("supply[0].concurrency[0].samples_per_s: found 0", [(1, 0.0, 0.1)]),
        ("supply[0].concurrency[0].cpu_s_per_sample: found 0", [(1, 10.0, 0.0)]),
        ("supply[0].concurrency has 2, 1 processes", [(2, 20.0, 0.1), (1, 10.0, 0.1)]),
        ("supply[0].concurrency has 1, 1 processes", [(1, 10.0, 0.1), (1, 10.0, 0.1)]),
    ],
)
def test_profile_with_an_impossible_contention_curve_is_rejected(
    catalogue: Catalogue, path: str, points: list[tuple[int, float, float]]
) -> None:
    job = make_profile(headspace_s=0.18, cpu_s=0.15)
    curve = tuple(
        ConcurrencyPoint(num_processes=number, samples_per_s=rate, cpu_s_per_sample=cpu_s)
        for number, rate, cpu_s in points
    )
    job = replace(job, supply=(replace(job.supply[0], concurrency=curve),))
    with pytest.raises(ConfigError, match=re.escape(path)):
        make_plan(job, catalogue)


def test_profile_of_steps_or_samples_of_no_time_is_rejected(catalogue: Catalogue) -> None:
    job = make_profile(headspace_s=0.18, cpu_s=0.15)
    zero = Spread.of([0.0], "s", "measured")
    with pytest.raises(ConfigError, match=r"training\.step_s\.mean is 0 s; expected 1e-09 s or more"):
        make_plan(replace(job, training=replace(job.training, step_s=zero)), catalogue)
    with pytest.raises(ConfigError, match=r"supply\[0\]\.sample_cpu_s\.mean is 0 s; expected 1e-09 s or more"):
        make_plan(replace(job, supply=(replace(job.supply[0], sample_cpu_s=zero),)), catalogue)


def test_limits_that_only_different_clusters_satisfy_are_named_as_such(catalogue: Catalogue) -> None:
    job = make_profile(headspace_s=0.18, cpu_s=0.15)
    cheapest = make_plan(job, catalogue).chosen
    fastest = make_plan(job, catalogue, PlanOptions(goal="time")).chosen
    assert cheapest.usd_per_1k_steps is not None
    assert fastest.step_time.value < cheapest.step_time.value
    options = PlanOptions(
        max_usd_per_1k_steps=cheapest.usd_per_1k_steps.value * 1.001,
        max_hours=fastest.step_time.value * 1.001 / 3.6,
        num_steps=1000,
    )
    with pytest.raises(ConfigError, match="although some satisfy each of them"):
        make_plan(job, catalogue, options)


def test_baseline_with_other_ranks_than_the_profile_is_modelled(catalogue: Catalogue) -> None:
    # 8 vCPUs make a batch in 1.2 s. For eight ranks they make eight batches.
    job = make_profile(headspace_s=0.18, cpu_s=0.15)
    own = make_plan(job, catalogue, PlanOptions(menu=("ml.c5.9xlarge",)))
    more = make_plan(job, catalogue, PlanOptions(menu=("ml.c5.9xlarge",), num_ranks=8))
    assert (own.baseline.step_time.basis, more.baseline.step_time.basis) == ("measured", "modelled")
    assert more.baseline.step_time.value == pytest.approx(8 * own.baseline.step_time.value, rel=0.05)
    assert more.reason == "data hosts pay"
    assert (
        "The profile has 1 trainer host with 1 rank each, and the plan has 1 trainer host with 8 ranks" in more.notes[0]
    )
    assert not any("The profile has 1 trainer host" in note for note in own.notes)


def served(**figures: Any) -> Profile:
    """Return a profile of a job whose batches data hosts made. Its steps are short, and the trainer host is slow."""
    profile = make_profile(processes=0, **figures)
    return replace(profile, training=replace(profile.training, has_data_hosts=True))


def test_steps_of_a_profile_with_data_hosts_are_not_those_of_the_trainer_hosts_alone(catalogue: Catalogue) -> None:
    profile = served(headspace_s=0.18, cpu_s=0.15, step_s=0.2)
    plan = make_plan(profile, catalogue, PlanOptions(menu=("ml.c5.9xlarge",)))
    assert plan.reason == "data hosts pay"
    alone = plan_of(catalogue, headspace_s=0.18, cpu_s=0.15).baseline  # measured without data hosts
    assert plan.baseline.step_time.value == pytest.approx(alone.step_time.value, rel=0.05)
    assert plan.baseline.step_time.basis == "modelled"
    assert plan.baseline.local_endpoints == 8
    assert any("with 8 loader processes per host" in note for note in plan.notes)
    resized = make_plan(profile, catalogue, PlanOptions(menu=("ml.c5.9xlarge",), num_trainer_hosts=2))
    assert resized.baseline.step_time.value == pytest.approx(alone.step_time.value, rel=0.05)


def test_plan_that_compresses_batches_says_how(catalogue: Catalogue) -> None:
    codec = CodecProfile(name="zstd", ratio=0.2, encode_cpu_s_per_sample=1e-5, decode_cpu_s_per_sample=1e-5)
    profile = make_profile(headspace_s=0.05, cpu_s=0.4, batch=4, sample_bytes=8e6, codecs=(codec,))
    plan = make_plan(profile, catalogue, PlanOptions(menu=("ml.c5.9xlarge",)))
    assert plan.chosen.form == "zstd"
    assert "as data hosts, and send batches compressed with zstd: a step takes" in plan.answer
    assert 'To compress batches, pass compression="zstd" to the loader.' in plan.notes
    groups, local = plan.chosen.groups, plan.chosen.local_endpoints
    assert plan.cluster_of(groups, local, compression="zstd") == plan.chosen
    assert plan.cluster_of(groups, local) != plan.chosen


def test_plan_repeats_the_caveats_of_its_profile(catalogue: Catalogue) -> None:
    profile = make_profile(headspace_s=0.18, cpu_s=0.15, notes=("Other work disturbed it.",))
    assert "Other work disturbed it." in make_plan(profile, catalogue, PlanOptions(menu=("ml.c5.9xlarge",))).notes


def test_answer_against_data_hosts_that_is_not_certain_says_so() -> None:
    prices = ("ml.p3.2xlarge=3.825", "ml.c5.9xlarge=9.0")
    profile = make_profile(headspace_s=0.36, cpu_s=0.15)
    plan = make_plan(profile, Catalogue.load(overrides=prices), PlanOptions(menu=("ml.c5.9xlarge",)))
    assert plan.answer.startswith("Do not add data hosts")
    assert plan.chance_to_pay == 1  # the choice is the baseline
    assert any(re.search(r"not certain that data hosts do not pay: the chance .* is \d\d%", n) for n in plan.notes)


def test_chance_to_pay_without_prices_is_not_known() -> None:
    catalogue = Catalogue.load(overrides=("ml.c5.9xlarge=1.836",))
    options = PlanOptions(menu=("ml.c5.9xlarge",), goal="time")
    plan = make_plan(make_profile(headspace_s=0.18, cpu_s=0.15), catalogue, options)
    assert plan.chance_to_pay is None
    assert "not known" in plan_page(plan)


def test_plan_with_more_processes_says_which_argument_of_the_loader(catalogue: Catalogue) -> None:
    plan = plan_of(catalogue, headspace_s=0.18, cpu_s=0.01, processes=2, ranks=2)
    assert plan.reason == "free CPUs"
    number = plan.chosen.local_endpoints
    assert f"pass num_workers={-(-number // 2)} to the loader." in "".join(plan.notes)


def test_profile_of_a_host_with_other_cpus_is_not_one_of_the_baselines_type(catalogue: Catalogue) -> None:
    profile = make_profile(headspace_s=0.18, cpu_s=0.15, trainer="", vcpus=2, processes=2)
    with pytest.raises(ConfigError, match=r"host with 2 CPUs, but ml\.p3\.2xlarge has 8 vCPUs\n.*--instance-type"):
        make_plan(profile, catalogue, PlanOptions(trainer_type="ml.p3.2xlarge", menu=("ml.c5.9xlarge",)))


def test_plan_with_spot_data_hosts_has_no_snippet_for_sagemaker(catalogue: Catalogue) -> None:
    options = PlanOptions(menu=("ml.c5.9xlarge",), spot_usd={"ml.c5.9xlarge": 0.1})
    plan = make_plan(make_profile(headspace_s=0.18, cpu_s=0.15), catalogue, options)
    assert any(group.is_spot for group in plan.chosen.groups)
    for text in (plan_text(plan), plan_page(plan)):
        assert "Not on SageMaker: there, all groups of a job are spot instances, or none." in text
        assert "InstanceGroup" not in text


def test_starts_of_short_epochs_are_named_as_the_limit(catalogue: Catalogue) -> None:
    profile = make_profile(headspace_s=0.4, cpu_s=0.15)
    profile = replace(profile, training=replace(profile.training, steps_per_epoch=100))
    plan = make_plan(profile, catalogue, PlanOptions(menu=("ml.c5.9xlarge",)))
    assert plan.chosen.bottleneck == "epoch start"
    assert "each epoch starts with a wait" in plan_text(plan)


def test_clusters_without_data_hosts_send_no_batches(catalogue: Catalogue) -> None:
    plan = plan_of(catalogue, headspace_s=0.05, cpu_s=0.04, sample_bytes=4e6, batch=8, dtype="float32")
    assert all(any(group.role == "data" for group in each.groups) or each.form == "as is" for each in plan.alternatives)

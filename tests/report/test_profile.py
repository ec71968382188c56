"""Profiles made from reports of finished runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero.decide.planning.candidates import Candidate
from hetero.decide.planning.machines import Machine
from hetero.decide.planning.steps.model import StepModel
from hetero.decide.profile import load_any_profile, profile_of_report
from hetero.documents.records import decode, json_text
from hetero.errors import ConfigError
from hetero.metrics.profile.profile import Profile, write_profile
from hetero.metrics.steps import StepSummary
from hetero.pricing.catalog import Catalogue
from hetero.report import GroupFacts, RankFacts, RunFacts, build_report, write_report

FactsMaker = Callable[..., RunFacts]


def profile_of(make_facts: FactsMaker, **changes: Any) -> Profile:
    catalogue = Catalogue.load("seed-2022")
    return profile_of_report(build_report(make_facts(**changes), catalogue), catalogue)


def test_profile_of_a_homogeneous_run_has_the_time_of_its_vcpus(make_facts: FactsMaker) -> None:
    catalogue = Catalogue.load("seed-2022")
    report = build_report(make_facts(), catalogue)
    profile = profile_of_report(report, catalogue)
    assert report.headline is not None
    assert report.headline.samples_per_s is not None
    (supply,) = profile.supply
    assert (supply.instance_type, supply.vcpus) == ("ml.p3.2xlarge", 8)
    assert supply.sample_cpu_s.mean == pytest.approx(8 / report.headline.samples_per_s.value)
    assert profile.training.headspace_s.mean == pytest.approx(0.4 * 1.193)
    assert profile.training.step_s.mean == pytest.approx(1.193)
    assert profile.training.data_wait_s.mean == pytest.approx(0.6 * 1.193)
    assert profile.training.step_s.num_measured == report.headline.num_steps_measured == 100
    bases = {supply.sample_cpu_s.basis, profile.training.headspace_s.basis, profile.training.step_s.basis}
    assert bases == {"modelled"}
    assert (profile.origin, profile.training.num_hosts) == ("report", 1)
    assert decode(Profile, json.loads(json_text(profile))) == profile


def test_profile_of_a_heterogeneous_run_has_the_data_hosts(make_facts: FactsMaker) -> None:
    (supply,) = profile_of(make_facts, is_heterogeneous=True).supply
    assert (supply.instance_type, supply.vcpus) == ("ml.c5.9xlarge", 36)


@pytest.mark.parametrize("utilisation", [0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 0.89])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"groups": (GroupFacts(name="g", role="trainer", instance_type="ml.p4d.24xlarge", count=1),)},
        {"is_heterogeneous": True},
    ],
    ids=["ml.p3.2xlarge", "ml.p4d.24xlarge", "ml.c5.9xlarge"],
)
def test_vcpus_that_suffice_are_the_fewest_with_which_the_plans_model_expects_no_wait(
    make_facts: FactsMaker, summary_of: Callable[..., StepSummary], changes: dict[str, Any], utilisation: float
) -> None:
    catalogue = Catalogue.load("seed-2022")
    rank = RankFacts(rank=0, host="algo-1", loaders=(summary_of(1.0, utilisation),))
    report = build_report(make_facts(**changes, ranks=(rank,)), catalogue)
    assert report.verdict.vcpus_needed is not None
    needed = round(report.verdict.vcpus_needed.value)
    profile = profile_of_report(report, catalogue)
    model = StepModel(profile, vcpu_speeds={"any": 1.0}, num_draws=0)
    fewer_s, enough_s = model.expected_s(
        [
            Candidate(trainer=Machine(instance_type="any", vcpus=vcpus), num_trainer_hosts=1, local_endpoints=vcpus)
            for vcpus in (needed - 1, needed)
        ]
    )
    headspace_s = profile.training.headspace_s.mean
    assert enough_s == pytest.approx(headspace_s, rel=1e-4)
    assert fewer_s > 1.0001 * headspace_s


def test_profile_of_a_run_with_endpoints_has_their_bytes(make_facts: FactsMaker) -> None:
    facts = make_facts(is_heterogeneous=True)
    ranks = tuple(
        dataclasses.replace(
            rank,
            loaders=tuple(dataclasses.replace(each, batch_bytes=150_528 * each.num_samples) for each in rank.loaders),
        )
        for rank in facts.ranks
    )
    profile = profile_of(lambda **_: dataclasses.replace(facts, ranks=ranks))
    assert profile.wire_bytes_per_sample is not None
    assert profile.wire_bytes_per_sample.value == 150_528


def test_profile_of_a_run_that_waited_for_nothing_is_rejected(make_facts: FactsMaker) -> None:
    facts = make_facts()
    ranks = tuple(
        dataclasses.replace(
            rank,
            loaders=tuple(
                dataclasses.replace(each, data_wait_mean_s=0.001, data_wait_p50_s=0.0, data_wait_p95_s=0.0)
                for each in rank.loaders
            ),
        )
        for rank in facts.ranks
    )
    with pytest.raises(ConfigError, match=r"waited for data in 0\.1 % of each step, so it does not show"):
        profile_of(lambda **_: dataclasses.replace(facts, ranks=ranks))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exit_code": 30}, "run r-1 failed with exit code 30"),
        ({"ranks": ()}, "run r-1 has no measured step"),
        (
            {"options": {"emulate_sample_s": "None", "emulate_step_s": "0.1"}},
            r"(?s)run r-1 simulated its hosts without --emulate-sample-seconds, so .* Give --emulate-sample-seconds",
        ),
        ({"placement": "hybrid"}, r"(?s)run r-1 preprocessed on trainer and data hosts.*--trainer-endpoints 0"),
    ],
)
def test_profile_of_an_unusable_run_is_rejected_with_what_to_do(
    make_facts: FactsMaker, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        profile_of(make_facts, **changes)
    assert "hetero profile" in str(caught.value)


def test_folder_of_a_run_gives_the_profile_of_its_report(make_facts: FactsMaker, tmp_path: Path) -> None:
    catalogue = Catalogue.load("seed-2022")
    report = build_report(make_facts(), catalogue)
    write_report(report, tmp_path)
    found = load_any_profile(tmp_path, catalogue)
    assert found == load_any_profile(tmp_path / "report.json", catalogue) == profile_of_report(report, catalogue)
    write_profile(dataclasses.replace(found, command="profiled.py"), tmp_path / "profile.json")
    assert load_any_profile(tmp_path, catalogue).command == "profiled.py"


def test_folder_without_profile_and_report_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make one with hetero profile SCRIPT"):
        load_any_profile(tmp_path, Catalogue.load())


def test_folder_of_a_study_is_rejected_with_one_of_its_runs(tmp_path: Path) -> None:
    for name in ("001-first", "002-second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"folder of a study with 2 runs.*\n.*{tmp_path}/runs/001-first"):
        load_any_profile(tmp_path, Catalogue.load())

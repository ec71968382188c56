"""Checks of a study before it costs money: each pitfall is found, and a study without it is not bothered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetero.decide.studies.checks import CHECKS, check_study
from hetero.decide.studies.plan import plan_study
from hetero.decide.studies.study_file import parse_study
from tests.support.studies import CLUSTERS, PRICED, SOURCE, plan_of, report_document

ONE = {"1 GPU": CLUSTERS["1 GPU"]}
KEPT: dict[str, Any] = {"samples": 96_000, "epochs": 3, "batch_per_device": 32}


def found(changes: dict[str, Any]) -> dict[str, str]:
    """Return severity and text of each finding by its number."""
    findings = check_study(plan_of({"args": [], **changes}), PRICED)
    return {each.number: f"{each.severity}: {each.found}; {each.fix}" for each in findings}


def test_numbers_are_distinct_and_in_order() -> None:
    assert list(CHECKS) == [f"ST-{number:02d}" for number in range(1, len(CHECKS) + 1)]


def test_study_without_pitfalls_has_no_findings() -> None:
    changes = {"factors": {"cluster": ONE, "samples": [96_000]}, "constraints": {"epochs": 3, "batch_per_device": 32}}
    assert found(changes) == {}


def test_published_study_has_the_pitfalls_that_the_source_names() -> None:
    published = found({"args": SOURCE["args"]})
    assert set(published) == {"ST-01"}
    assert "grows from 32 to 1024, 32 times, and the learning rate is 5e-05 in all" in published["ST-01"]


def test_learning_rate_that_grows_is_no_finding() -> None:
    kept = {**SOURCE["constraints"], "learning_rate_rule": "sqrt"}
    assert "ST-01" not in found({"constraints": kept})


def test_global_batch_without_a_learning_rate_is_found() -> None:
    text = found({"factors": {"cluster": CLUSTERS}, "constraints": KEPT})["ST-01"]
    assert "the study states no learning rate" in text
    assert "state learning_rate, that of the smallest global batch" in text
    advised = {**KEPT, "learning_rate": 1e-4, "learning_rate_rule": "sqrt"}
    assert "ST-01" not in found({"factors": {"cluster": CLUSTERS}, "constraints": advised})


@pytest.mark.parametrize(
    ("constraints", "executor", "expected"),
    [
        ({"data_gb": 100, "volume_gb": 50}, "simulate", "the volume of ml.p3.2xlarge holds 50 GB and the data has 100"),
        ({"data_gb": 40}, "sagemaker", "holds 32 GB"),  # SageMaker's default is 30 GiB
        ({"data_gb": 40}, "simulate", ""),
        ({"data_gb": 40, "volume_gb": 50}, "sagemaker", ""),
    ],
)
def test_volume_smaller_than_the_data_is_found(constraints: dict[str, Any], executor: str, expected: str) -> None:
    changes = {"factors": {"cluster": ONE}, "constraints": {**KEPT, **constraints}, "executor": {executor: {}}}
    text = found(changes).get("ST-02", "")
    assert expected in text
    assert bool(text) == bool(expected)


def test_volume_of_a_type_with_local_storage_does_not_count() -> None:
    cluster = {"a": {"groups": ["trainer=ml.g5.xlarge:1"]}}
    changes = {"factors": {"cluster": cluster}, "constraints": {**KEPT, "data_gb": 100, "volume_gb": 10}}
    assert "ST-02" not in found(changes)


def test_batch_beyond_the_stated_memory_is_found_with_the_largest_that_fits() -> None:
    kept = {**KEPT, "memory_gb_per_sample": 0.5, "memory_gb_fixed": 2}
    text = found({"factors": {"cluster": ONE}, "constraints": kept})["ST-03"]
    assert text.startswith("error: a batch of 32 per device needs 18.0 GB")
    assert "use at most 28 per device" in text  # 95 % of 16 GiB, less 2 GB
    assert "ST-03" not in found({"factors": {"cluster": ONE}, "constraints": {**kept, "batch_per_device": 28}})


def test_memory_that_a_level_states_counts() -> None:
    levels = {"large": {**CLUSTERS["1 GPU"], "values": {"memory_gb_fixed": 14, "memory_gb_per_sample": 0.1}}}
    text = found({"factors": {"cluster": levels}, "constraints": KEPT})["ST-03"]
    assert text.startswith("error: a batch of 32 per device needs 17.2 GB (14 GB and 0.1 GB per sample)")


def test_batch_beyond_the_memory_of_an_earlier_run_is_found(tmp_path: Path) -> None:
    document: Any = report_document()
    step: dict[str, Any] = dict.fromkeys(
        ("num_steps", "num_samples", "warmup_steps", "num_steps_measured", "num_samples_measured"), 10
    )
    step |= dict.fromkeys(("compute_total_s", "data_wait_total_s"), 1.0)
    times = ("step_time", "data_wait")
    step |= {f"{name}_{end}_s": None for name in times for end in ("mean", "p50", "p95")}
    step |= {
        "name": "train",
        "batch_samples": 16,
        "utilisation": None,
        "samples_per_s": None,
    }
    usage = {"host": "algo-1", "scope": "host", "duration_s": 1.0, "num_readings": 2, "num_cpus": 8, "cpu_seconds": 1.0}
    usage |= {"cpu_percent_mean": None, "cpu_percent_peak": None, "memory_basis": "used", "memory_mean_bytes": 1.0}
    usage |= {"memory_peak_bytes": 1, "memory_total_bytes": 2, "network_sent_bytes": None}
    usage |= {"network_received_bytes": None, "num_gpus": 1, "gpu_memory_peak_bytes": 10 * 10**9}
    document["run"] |= {"ranks": [{"rank": 0, "host": "algo-1", "loaders": [step]}], "hosts": [usage]}
    (tmp_path / "report.json").write_text(json.dumps(document))
    changes = {"factors": {"cluster": ONE}, "constraints": {**KEPT, "measured": "report.json"}, "args": []}
    plan = plan_study(parse_study({**SOURCE, **changes}, tmp_path / "STUDY.yaml"), PRICED)
    (finding,) = check_study(plan, PRICED)
    assert (finding.number, finding.severity) == ("ST-03", "warning")
    assert "may need up to 20.0 GB, because the run run used 10.0 GB with 16" in finding.found


def test_epochs_that_are_not_whole_are_found_with_steps_that_make_them_whole() -> None:
    kept = {**SOURCE["constraints"], "steps": 80_000, "learning_rate_rule": "sqrt"}
    text = found({"constraints": kept})["ST-04"]
    assert "80000 steps of 32 samples are 28.4444 epochs of 90000 (cluster 1 GPU, samples 100000)" in text
    assert "set steps to 84375, which makes all epochs whole" in text  # what the source found by guess and check


def test_batch_per_device_that_is_not_whole_is_an_error() -> None:
    kept = {"fix": "global_batch", "global_batch": 100}
    text = found({"factors": {"cluster": CLUSTERS}, "constraints": kept})["ST-05"]
    assert text.startswith("error: a global batch of 100 over 32 ranks")
    assert "for example 128" in text


def test_several_hosts_where_one_larger_would_do_are_found() -> None:
    cluster = {"4 x 1": {"groups": ["trainer=ml.p3.2xlarge:4"]}}
    text = found({"factors": {"cluster": cluster}, "constraints": KEPT})["ST-06"]
    assert "4 x ml.p3.2xlarge have 4 accelerators, and one ml.p3.8xlarge has 4" in text
    largest = {"2 x 8": {"groups": ["trainer=ml.p3.16xlarge:2"]}}
    assert "ST-06" not in found({"factors": {"cluster": largest}, "constraints": KEPT})


def test_factor_that_no_argument_uses_is_found() -> None:
    changes = {"factors": {"cluster": ONE, "dropout": [0.1, 0.2]}, "constraints": KEPT}
    assert "no argument and no variable of a run uses the factor dropout" in found(changes)["ST-07"]
    assert "ST-07" not in found({**changes, "args": ["--dropout={dropout}"]})
    assert "ST-07" not in found({**changes, "environment": {"DROPOUT": "{dropout}"}})


def test_factors_that_a_table_confounds_are_found() -> None:
    table = [{"cluster": "1 GPU", "samples": 100_000}, {"cluster": "32 GPUs", "samples": 1_000_000}]
    assert "have a correlation of 1.00" in found({"design": {"table": table}})["ST-08"]


def test_step_that_takes_more_samples_than_there_are_is_an_error() -> None:
    text = found({"factors": {"cluster": CLUSTERS}, "constraints": {**KEPT, "samples": 1000, "epochs": 1}})["ST-09"]
    assert "a step takes 1024 samples and there are 1000 training samples" in text


def test_runs_without_groups_are_found_because_some_checks_do_nothing() -> None:
    changes: dict[str, Any] = {"factors": {"hosts": [1, 2]}, "constraints": {}, "args": ["{hosts}"]}
    text = found({**changes, "executor": {"sagemaker": {}}})["ST-10"]
    assert text.startswith("warning: ST-02, ST-03, ST-06 and the cost in ST-11 were not checked")
    assert "ST-10" not in found({**changes, "groups": ["trainer=ml.p3.2xlarge:{hosts}"]})


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"hours": 2}, ""),
        ({"hours": 1.9}, "error: by expected_minutes, all 2 runs take 2.00 hours, and the budget is 1.9. "),
        ({"usd": 1}, ".*, all 2 runs take 7.65 USD, and the budget is 1. .*set budget.usd to at least 8"),
        ({"usd": 8}, ""),
        ({}, ""),
    ],
)
def test_budget_that_all_runs_exceed_is_an_error(budget: dict[str, float], expected: str) -> None:
    changes = {"factors": {"cluster": ONE}, "replicates": 2, "expected_minutes": 60, "constraints": {}}
    text = found({**changes, "budget": budget}).get("ST-11", "")
    assert re.match(expected, text)
    assert bool(text) == bool(expected)


def test_runs_of_unknown_duration_make_the_expectation_a_least_one() -> None:
    levels = {"a": {**CLUSTERS["1 GPU"], "expected_minutes": 90}, "b": CLUSTERS["4 GPUs"]}
    changes = {"factors": {"cluster": levels}, "constraints": {}, "budget": {"hours": 1}}
    assert "all 2 runs take at least 1.50 hours" in found(changes)["ST-11"]


def test_epochs_of_a_study_without_samples_or_a_batch_are_no_finding() -> None:
    for kept in ({"epochs": 2.5}, {"epochs": 2.5, "steps": 9}):
        assert "ST-04" not in found({"factors": {"cluster": ONE}, "constraints": kept})

"""`bench_ray.py` without Ray's cluster: its figures, its trials, and what Ray Data's tasks compute."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

Load = Callable[[str], ModuleType]


def make_row(load: Load, name: str, group: str, rates: tuple[float, ...], **fields: Any) -> Any:
    """Return a row with a run of one second for each rate, in samples/s."""
    harness = load("harness")
    facts = {"job_first_batch_s": 8.0, "trainer_node_cpu_s_per_gb": 1.0, "machine_cpu_s_per_gb": 9.0}
    given = {
        "seconds": 1.0,
        "num_batches": 10,
        "num_bytes": 10**9,
        "trainer_cpu_s": 0.4,
        "supply_cpu_s": 1.5,
        "trainer_peak_bytes": 0,
        "trainer_growth_bytes": 0,
        "supply_bytes": 0,
        "first_batch_s": 1.0,
        "facts": facts,
    }
    runs = tuple(harness.Run(**{**given, **fields, "num_samples": rate}) for rate in rates)
    return harness.Row(trial=harness.Trial(competitor=name, group=group), runs=runs)


def test_report_counts_pipelines_that_meet_each_bound(load: Load) -> None:
    bench = load("bench_ray")
    rows = []
    for number, group in enumerate(bench.NAMES):
        rates = (140, 120, 130) if number < 3 else (90, 99, 96)
        rows.append(make_row(load, "hetero", group, rates, first_batch_s=0.25, trainer_cpu_s=0.3))
        rows.append(make_row(load, "ray", group, (100, 100, 100), trainer_cpu_s=0.4))
    text = bench.report(rows)
    assert "- samples/s, hetero / ray (1.20 to 1.40): 1.300, at least 0.95 wanted: met" in text
    assert "- first batch, hetero / ray (0.25 to 0.25): 0.250, at most 0.3 wanted: met" in text
    assert "- trainer CPU-s/GB, hetero / ray (0.75 to 0.75): 0.750, at most 0.7 wanted: **MISSED**" in text
    assert "- pipelines with 1.3 x the samples/s of Ray Data: 3.000, at least 4 wanted: **MISSED**" in text
    assert "- pipelines with at least 0.95 x the samples/s: 6.000, at least 6 wanted: met" in text
    assert "- pipelines with at most 0.7 x the trainer CPU-s/GB: 0.000, at least 6 wanted: **MISSED**" in text


def test_report_of_a_failed_competitor_has_no_ratio(load: Load) -> None:
    bench, harness = load("bench_ray"), load("harness")
    failed = harness.Row(trial=harness.Trial(competitor="ray", group="jpeg"), runs=(), error="no cluster")
    text = bench.report([make_row(load, "hetero", "jpeg", (100,)), failed])
    assert "failed: no cluster" in text
    assert "- samples/s, hetero / ray (no rounds): not measured" in text


def test_every_pipeline_has_both_competitors_and_a_form_that_was_a_candidate(load: Load) -> None:
    bench = load("bench_ray")
    for name in bench.NAMES:
        assert [trial.competitor for trial in bench.make_trials(name)] == ["hetero", "ray"]
        candidates = [trial.config for trial in bench.form_trials(name)]
        assert bench.make_trials(name)[1].config in candidates
        assert load("ray_jobs").LENGTHS_BATCHES[name] > 0


def test_tables_by_batch_are_those_by_row(load: Load) -> None:
    import torch.utils.data

    by_row = load("pipelines.tabular").build(1000, "")
    by_batch = load("pipelines.tabular_batches").build(1000, "").__getitems__([3, 999, 0])
    expected = torch.utils.data.default_collate([by_row[index] for index in (3, 999, 0)])
    for found, wanted in zip(by_batch.values(), expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_batch_of_varying_shapes_passes_through_one_row(load: Load) -> None:
    pytest.importorskip("ray.data", reason="Ray is not installed")
    pa = pytest.importorskip("pyarrow")
    import random

    import torch

    processed = load("ray_jobs.processed")
    random.seed(7)
    row = processed.compute_batch({"id": np.arange(64, 96)}, "text", "", 64)
    found = processed.Unpack()(pa.table(row))
    random.seed(7)
    pipeline = load("pipelines").load("text")
    dataset = pipeline.build(64, "")
    expected = pipeline.collate([dataset[index] for index in range(32)])  # the length is 64, so 64 is 0 again
    assert found["lengths"] == expected["lengths"]
    for key in ("ids", "mask", "labels"):
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key])


@pytest.mark.filterwarnings("ignore")
def test_rows_and_batches_have_the_same_columns(load: Load) -> None:
    pytest.importorskip("ray.data", reason="Ray is not installed")
    processed = load("ray_jobs.processed")
    batch = processed.compute_batch({"id": np.arange(4)}, "tabular", "", 8)
    rows = [processed.compute_row({"id": number}, "tabular", "", 8) for number in range(4)]
    assert set(batch) == set(rows[0])
    for name, column in batch.items():
        assert np.array_equal(np.stack([row[name] for row in rows]), column)


def test_job_runs_once_for_each_command(load: Load) -> None:
    harness, trainer = load("harness"), load("harness.trainer")

    class Endless(harness.Competitor):
        min_warmup_s = 0.0
        stopped = False

        def batches(self) -> Any:
            while True:
                yield 5

        def consume(self, batch: Any) -> tuple[int, int]:
            return 1, batch

        def stop(self) -> None:
            self.stopped = True

    competitor = Endless({})
    run = trainer.run_once(competitor, {"seconds": 0.0, "warmup_batches": 2, "min_batches": 3})
    assert (run.num_batches, run.num_samples, run.num_bytes) == (3, 3, 15)
    assert competitor.stopped

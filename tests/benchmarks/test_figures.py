"""Every benchmark can be imported, and its figures follow from its rows. Rows are made up; nothing is timed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest

Load = Callable[[str], ModuleType]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))


def make_row(load: Load, name: str, group: str, rate: int, config: Any = None, **facts: Any) -> Any:
    """Return a row of one run of one second: ``rate`` batches of 1 MB with a sample each."""
    harness = load("harness")
    run = harness.Run(
        seconds=1.0,
        num_batches=rate,
        num_samples=rate,
        num_bytes=rate * 10**6,
        trainer_cpu_s=rate * 4e-4,
        supply_cpu_s=rate * 1e-3,
        trainer_peak_bytes=10**8,
        trainer_growth_bytes=facts.pop("trainer_growth_bytes", 10**7),
        supply_bytes=10**8,
        first_batch_s=facts.pop("first_batch_s", 2.0),
        facts=facts,
    )
    return harness.Row(trial=harness.Trial(competitor=name, group=group, config=config or {}), runs=(run,))


def test_all_questions_are_there() -> None:
    expected = (
        *("transport", "pipelines", "scaling", "interference", "memory", "compression", "gpu_feed"),
        *("unauthenticated", "safeguards", "tf_feed", "baseline", "auto_hybrid"),
    )
    assert {f"bench_{name}" for name in expected} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_can_be_imported_and_says_question_and_method(load: Load, name: str) -> None:
    module = load(name)
    assert "\nQuestion: " in (module.__doc__ or "")
    assert "\nMethod: " in (module.__doc__ or "")
    assert callable(module.main)
    assert name in (BENCHMARKS / "README.md").read_text(encoding="utf-8")


def test_transport_covers_sizes_and_endpoints_with_the_probes_its_figures_need(load: Load) -> None:
    transport = load("bench_transport")
    trials = transport.make_trials(transport.SIZES, transport.ENDPOINTS)
    found = {(trial.competitor, trial.config["nbytes"], trial.config["num_endpoints"]) for trial in trials}
    for nbytes in (10_000, 1_000_000, 10_000_000, 40_000_000):
        assert {(name, nbytes, 1) for name in transport.COMPETITORS} <= found
        assert {("hetero", nbytes, count) for count in (1, 2, 4)} <= found


def test_transport_figures_at_10_mb(load: Load) -> None:
    config = {"nbytes": 10_000_000, "num_endpoints": 1}
    rows = [make_row(load, name, "g", rate, config) for name, rate in (("hetero", 91), ("grpc-raw", 100))]
    rows.append(make_row(load, "tf.data-service", "g", 60, config))
    probe, service, cpu = load("bench_transport").targets(rows)
    assert "0.910, at least 0.9 wanted: met" in probe
    assert "1.517, at least 1.8 wanted: **MISSED**" in service
    assert "0.400, at most 0.25 wanted: **MISSED**" in cpu


def test_transport_asks_for_nothing_with_two_endpoints(load: Load) -> None:
    config = {"nbytes": 10_000_000, "num_endpoints": 2}
    assert load("bench_transport").targets([make_row(load, "hetero", "g", 90, config)]) == []


def test_pipelines_count_those_ahead_of_every_remote_peer(load: Load) -> None:
    pipelines = load("bench_pipelines")
    rows = []
    for number, group in enumerate(pipelines.NAMES):
        rows += [make_row(load, "hetero", group, 100), make_row(load, "torch", group, 105)]
        rows += [make_row(load, "rpc", group, 50), make_row(load, "ray", group, 99 + 2 * (number == 0))]
    assert "ahead of every remote peer: 5.000, at least 5 wanted: met" in pipelines.report(rows)
    # torch and Ray Data for jpeg, torch for text and tabular; elsewhere 0.9 of torch is wanted.
    assert pipelines.report(rows).count("**MISSED**") == 4


def test_pipelines_overhead_is_what_remains_of_the_cpu_time_beside_computing(load: Load) -> None:
    rows = [
        make_row(load, name, "jpeg", 100, trainer_cpu_s_per_gb=0.4, supply_cpu_s_per_gb=supply)
        for name, supply in (("hetero", 6.0), ("torch", 6.5), ("rpc", 7.0), ("tf", 6.1), ("alone", 5.2))
    ]
    pipelines = load("bench_pipelines")
    assert {name: round(value, 3) for name, value in pipelines.overheads(rows).items()} == {
        "hetero": 0.8,
        "torch": 1.3,
        "rpc": 1.8,
    }
    assert "best peer: 0.615, at most 0.7 wanted: met" in pipelines.figures(rows)[-1]


def test_pipeline_in_which_a_remote_peer_has_failed_does_not_count_as_ahead(load: Load) -> None:
    harness, pipelines = load("harness"), load("bench_pipelines")
    rows = [make_row(load, "hetero", "text", 100), make_row(load, "rpc", "text", 50)]
    assert pipelines.is_ahead(rows)
    failed = harness.Row(trial=harness.Trial(competitor="ray", group="text"), runs=(), error="it did not start")
    assert not pipelines.is_ahead([*rows, failed])
    assert not pipelines.is_ahead(rows[:1])


def test_pipelines_first_batch_is_compared_with_spawned_workers(load: Load) -> None:
    rows = [make_row(load, "hetero", "jpeg", 100, first_batch_s=2.5), make_row(load, "torch-spawn", "jpeg", 100)]
    (line,) = load("bench_pipelines").figures(rows)
    assert "1.250, at most 1.2 wanted: **MISSED**" in line


def test_pipelines_order_figures(load: Load) -> None:
    pipelines = load("bench_pipelines")
    for group, outcome in zip(pipelines.ORDER_GROUPS, ("**MISSED**", "met"), strict=True):
        rows = [make_row(load, "in order", group, 95), make_row(load, "first-come", group, 100)]
        (line,) = pipelines.figures(rows)
        assert line.endswith(outcome)


def test_scaling_figure_is_that_of_32_hosts_and_8_ranks(load: Load) -> None:
    facts = {"ideal_samples_per_s": 1.0, "delivered_samples_per_s": 1.0, "rank_cpu": 0.1, "endpoint_cpu": 0.1}
    rows = [
        make_row(load, f"{hosts}x{ranks}", "", 1, {"num_hosts": hosts, "num_ranks": ranks}, share=share, **facts)
        for hosts, ranks, share in ((1, 1, 0.5), (32, 8, 0.96))
    ]
    (line,) = load("bench_scaling").figures(rows)
    assert "with 32x8: 0.960, at least 0.95 wanted: met" in line


@pytest.mark.parametrize("phase_s", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("is_burst", [True, False])
def test_scaling_rate_is_that_of_whole_turns(load: Load, phase_s: float, is_burst: bool) -> None:
    # 32 vCPUs that take 1.6 s a batch, all at once or evenly spread; seen for 4.8 s that begin anywhere.
    moments = sorted(1.6 * turn + (0.01 if is_burst else 1.6) * cpu / 32 for turn in range(9) for cpu in range(32))
    inside = np.array([moment for moment in moments if 3.2 + phase_s <= moment < 8.0 + phase_s])
    assert load("bench_scaling").delivery_rate(inside, 32) == pytest.approx(32 / 1.6)


def test_interference_compares_step_times_and_says_who_was_too_slow(load: Load) -> None:
    config = {"rate_mb_s": 100}
    rows = [make_row(load, "cached", "g", 100, config, step_time_s=0.040, loop_time_s=0.041)]
    rows += [make_row(load, "hetero", "g", 99, config, step_time_s=0.042, loop_time_s=0.043)]
    rows += [make_row(load, "torch", "g", 90, config, step_time_s=0.041, loop_time_s=0.050)]
    alone, _, figure, loop, slow = load("bench_interference").figures(rows)
    assert alone.endswith("1.050")
    assert "1.024, at most 1 wanted: **MISSED**" in figure
    assert loop.endswith("0.860")
    assert slow == "- torch delivered 90% of the rate: not the same bytes"


def test_memory_bound_is_the_window_and_64_mb(load: Load) -> None:
    facts = {"window_bytes": 20e6, "stalled_growth_bytes": 85e6, "trainer_drift_bytes": 0, "supply_drift_bytes": 9e6}
    row = make_row(load, "hetero", "g", 10, trainer_growth_bytes=84_000_000, **facts)
    fed, stalled, drift, supply = load("bench_memory").figures([row])
    assert "84.0, at most 84 wanted: met" in fed
    assert stalled.endswith("**MISSED**")
    assert drift.endswith("met")
    assert supply.endswith("**MISSED**")


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({50.0: 1.0, 100.0: 0.9}, None),
        ({50.0: 1.53, 200.0: 0.53}, 100.0),  # half way on a logarithmic scale
        ({50.0: 1.5, 100.0: 1.2, math.inf: 0.5}, 100.0),
        ({50.0: 1.5, math.inf: 1.1}, math.inf),
        ({50.0: 1.5}, 50.0),
    ],
)
def test_compression_crossover(load: Load, gains: dict[float, float], expected: float | None) -> None:
    found = load("bench_compression").crossover_mb_s(gains)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_compression_gains_are_by_bandwidth(load: Load) -> None:
    rows = [
        make_row(load, codec, f"photos, {rate}", batches, {"kind": "photos", "rate_mb_s": rate})
        for rate, none, lz4 in ((0, 100, 50), (25, 10, 15))
        for codec, batches in (("none", none), ("lz4", lz4))
    ]
    compression = load("bench_compression")
    assert compression.gains_by_rate(rows, "photos", "lz4") == {25.0: 1.5, math.inf: 0.5}
    assert compression.gains_by_rate(rows, "tokens", "lz4") == {}


def test_compression_says_which_packages_are_missing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    compression = load("bench_compression")
    monkeypatch.setattr(compression, "is_installed", lambda name: name != "zstd")
    assert compression.why_no_codec(compression.CODECS) == "needs zstandard; install hetero[compression]"
    assert compression.why_no_codec(["none", "lz4"]) == ""


def test_unauthenticated_figure_is_the_share_that_a_reader_keeps(load: Load) -> None:
    peers = load("bench_unauthenticated")
    rows = [make_row(load, name, "", rate) for name, rate in (("hetero", 100), ("hetero-beset", 79))]
    (line,) = peers.figures(rows)
    assert "0.790, at least 0.8 wanted: **MISSED**" in line


def test_safeguards_are_compared_with_the_same_without(load: Load) -> None:
    safeguards = load("bench_safeguards")
    rates = {"hetero": 100, "hetero-tls": 40, "hetero-loader": 50, "hetero-audit": 45}
    lines = safeguards.figures([make_row(load, name, "", rate) for name, rate in rates.items()])
    assert lines[0] == "- batches/s with TLS / without: 0.40"
    assert lines[3] == "- batches/s with the ledger / without: 0.90"
    assert {trial.competitor for trial in safeguards.make_trials((1,))} == set(rates)


def test_baseline_figures_are_the_time_and_the_cpu_of_a_job_over_those_under_torchrun(load: Load) -> None:
    baseline = load("bench_baseline")
    rows = [
        make_row(load, name, "", 1, job_s=job_s, job_cpu_s=job_cpu_s)
        for name, job_s, job_cpu_s in (("torchrun", 10.0, 8.0), ("hetero", 10.1, 8.4))
    ]
    wall, cpu = baseline.figures(rows)
    assert "1.010, at most 1.02 wanted: met" in wall
    assert "1.050, at most 1.02 wanted: **MISSED**" in cpu
    assert {trial.competitor for trial in baseline.make_trials({"passes": 5})} == set(baseline.COMPETITORS)


def test_tf_feed_compares_the_launcher_with_servers_started_by_hand(load: Load) -> None:
    tf_feed = load("bench_tf_feed")
    rates = {"tf-local": 125, "tf-by-hand": 100, "tf-launcher": 96, "from_dataset": 150}
    figure, *others = tf_feed.figures([make_row(load, name, "", rate) for name, rate in rates.items()])
    assert "0.960, at least 0.97 wanted: **MISSED**" in figure
    assert [line.rpartition(" ")[2] for line in others] == ["0.77", "1.20", "1.56"]
    assert {trial.competitor for trial in tf_feed.make_trials(tuple(rates))} == set(tf_feed.COMPETITORS)


def test_tf_feed_short_form_has_no_figure(load: Load) -> None:
    tf_feed = load("bench_tf_feed")
    figure, only = tf_feed.figures([make_row(load, name, "", 100) for name in tf_feed.IN_SHORT_FORM])
    assert figure.endswith("not measured")
    assert only == "- samples/s, from_dataset / tf-local: 1.00"


def test_tf_feed_photographs_are_those_of_the_jpeg_pipeline(load: Load, tmp_path: Path) -> None:
    pixels = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)
    (tmp_path / "train" / "a").mkdir(parents=True)
    assert cv2.imwrite(str(tmp_path / "train" / "a" / "0.jpg"), pixels)
    arrays, tensors = (
        load("feeds.photo_arrays").PhotoArrays(str(tmp_path)),
        load("pipelines.jpeg").Photos(10, str(tmp_path)),
    )
    for index in range(4):
        random.seed(index)
        image, label = arrays[index]
        random.seed(index)
        expected, expected_label = tensors[index]
        assert np.array_equal(image, expected.numpy())
        assert label == expected_label


def test_gpu_feed_without_a_gpu_says_so(load: Load) -> None:
    config = {"batch_size": 16, "size": 96, "num_endpoints": 1}
    facts = {"device": "CPU", "model": "a small residual network"}
    rows = [make_row(load, name, "no GPU", 100, config, **facts) for name in ("cached", "hetero")]
    assert "**No GPU was there.**" in load("bench_gpu_feed").figures(rows)[0]


def test_plots_draw_every_kind_of_result(load: Load, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots = load("plots")
    configs = {
        "transport": {"nbytes": 10_000, "num_endpoints": 1},
        "pipelines": {},
        "scaling": {"num_hosts": 32, "num_ranks": 8},
        "interference": {"step": "python", "rate_mb_s": 100},
        "compression": {"kind": "photos", "rate_mb_s": 0},
        "tf_feed": {},
    }
    for name, config in configs.items():
        rows = [
            make_row(load, competitor, "g", 10, config, share=0.9, step_time_s=0.04)
            for competitor in ("hetero", "torch", "cached")
        ]
        content = load("harness.results")
        protocol = load("harness.comparison").Protocol(runs=1, seconds=1.0)
        found = [content.row_content(row, protocol) for row in rows]
        assert found[0]["runs"] == [asdict(rows[0].runs[0])]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": found}))
    assert plots.main(["--results", str(tmp_path)]) == 0
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(configs)

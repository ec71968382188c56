"""A run's report and its ranks' files become a point."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hetero.decide.canary.observations import Observed, point_of, read_observed
from hetero.decide.studies.runs import RunResult
from hetero.documents.records import decode, encode
from hetero.metrics.hosts import HostUsage
from hetero.metrics.usage_series import UsageSeries
from hetero.report.model import Report

BEGAN_S = 1_000_000.0


def observed(**more: Any) -> Observed:
    values = {"began_monotonic_s": BEGAN_S + 4, "ended_monotonic_s": BEGAN_S + 9, "import_s": 2.0}
    return Observed(**values | more)


def result(report: Report | None = None, **more: Any) -> RunResult:
    values = {"run_id": "r", "state": "finished", "exit_code": 0, "started_at": "", "wall_s": 10.0, "report": report}
    return RunResult(**values | more)


def usage() -> HostUsage:
    """Ten seconds: five of start-up and imports with 500 MB and an idle CPU, then work that grows to 900 MB."""
    memory = [500, 500, 500, 500, 500, 500, 600, 700, 900, 900]
    return decode(
        HostUsage,
        {
            "host": "algo-1",
            "scope": "tree",
            "duration_s": 10.0,
            "num_readings": 11,
            "num_cpus": 2,
            "cpu_seconds": 8.0,
            "cpu_percent_mean": 80.0,
            "cpu_percent_peak": 200.0,
            "memory_basis": "rss",
            "memory_mean_bytes": 600e6,
            "memory_peak_bytes": 900_000_000,
            "memory_total_bytes": 16_000_000_000,
            "network_sent_bytes": None,
            "network_received_bytes": None,
            "began_monotonic_s": BEGAN_S,
            "series": {
                "begin_s": [float(i) for i in range(10)],
                "end_s": [float(i + 1) for i in range(10)],
                "cpu_percent": [10.0] * 6 + [200.0] * 3 + [20.0],
                "memory_mean_bytes": [value * 1_000_000 for value in memory],
                "memory_peak_bytes": [value * 1_000_000 for value in memory],
            },
        },
    )


def report(*hosts: HostUsage) -> Report:
    from hetero.pricing import Catalogue
    from hetero.report.build import build_report
    from hetero.report.model import GroupFacts, RankFacts, RunFacts

    facts = RunFacts(
        run_id="job",
        command="train.py",
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=10.0,
        exit_code=0,
        placement="homogeneous",
        groups=(GroupFacts(name="trainer", role="trainer", instance_type="ml.m5.large", count=1),),
        ranks=(RankFacts(rank=0, host="algo-1", loaders=()),),
        hosts=hosts,
    )
    return build_report(facts, Catalogue.load())


def test_time_is_divided_into_start_up_imports_and_script() -> None:
    point = point_of(result(), fraction=0.01, observed=[observed()])
    assert {part.name: part.seconds for part in point.parts} == {"start-up and end": 5.0, "imports": 2.0, "script": 3.0}
    assert (point.growing_s, point.fixed_s) == (3.0, 7.0)


def test_slowest_rank_counts() -> None:
    point = point_of(result(), fraction=0.01, observed=[observed(), observed(ended_monotonic_s=BEGAN_S + 10)])
    assert point.growing_s == 4.0


def test_run_without_observations_may_grow_as_a_whole() -> None:
    point = point_of(result(), fraction=0.01, observed=[])
    assert (point.growing_s, point.fixed_s) == (10.0, 0.0)


def test_resources_are_those_of_the_scripts_own_work() -> None:
    resources = point_of(result(report(usage())), fraction=0.01, observed=[observed()]).resources
    assert resources.cpu_percent_mean == 200.0
    assert resources.memory_base_bytes == 500e6
    assert resources.memory_peak_bytes == 900e6
    assert resources.memory_mean_bytes == pytest.approx(2200e6 / 3)


def test_work_shorter_than_a_reading_uses_the_nearest_one() -> None:
    short = observed(began_monotonic_s=BEGAN_S + 7.1, ended_monotonic_s=BEGAN_S + 7.2, import_s=0.0)
    resources = point_of(result(report(usage())), fraction=0.01, observed=[short]).resources
    assert resources.memory_peak_bytes == 700e6


def test_point_has_the_share_of_its_time_that_others_may_have_taken() -> None:
    beside = dataclasses.replace(usage(), cpu_others=0.5, cpu_pressure=0.3)
    points = [point_of(result(report(each)), fraction=0.01, observed=[]) for each in (usage(), beside)]
    assert [point.excess_share for point in points] == [0.0, pytest.approx(0.3)]


def test_failure_is_the_cause_of_the_run() -> None:
    point = point_of(result(state="failed", cause="HET-30 rank 0"), fraction=0.01, observed=[])
    assert point.failure == "HET-30 rank 0"


def test_files_of_ranks_are_read_and_malformed_ones_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"began_monotonic_s": 1.0, "ended_monotonic_s": 2.0, "import_s": 0.5}
    (tmp_path / "rank-0.json").write_text(json.dumps(good))
    (tmp_path / "rank-1.json").write_text("{}")
    (tmp_path / "rank-2.json").write_text("nothing")
    (found,) = read_observed(tmp_path)
    assert found.work_s == 0.5
    assert caplog.text.count("cannot be used") == 2


def test_empty_history_falls_back_to_the_totals() -> None:
    plain = decode(HostUsage, {**encode(usage()), "series": {}})
    resources = point_of(result(report(plain)), fraction=0.01, observed=[observed()]).resources
    assert resources.memory_peak_bytes == 900e6
    assert UsageSeries().begin_s == ()


def test_percentiles_are_those_of_seconds_however_short_the_readings() -> None:
    document: dict[str, Any] = encode(usage())
    series: Any = document["series"]
    times = [(i / 4, (i + 1) / 4) for i in range(40)]
    coarse = [5] * 24 + [0, 0, 0, 800] * 2 + [200] * 8  # a quarter of a second with 8 CPUs is a second with 2
    series |= {"begin_s": [a for a, _ in times], "end_s": [b for _, b in times]}
    series["cpu_percent"] = [float(value) for value in coarse]
    for name in ("memory_mean_bytes", "memory_peak_bytes"):
        series[name] = [value for value in series[name] for _ in range(4)]
    own = observed(began_monotonic_s=BEGAN_S + 6, ended_monotonic_s=BEGAN_S + 10, import_s=0.0)
    resources = point_of(result(report(decode(HostUsage, document))), fraction=0.01, observed=[own]).resources
    assert resources.cpu_percents == (200.0, 200.0, 200.0, 200.0)

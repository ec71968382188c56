"""The page of a study: what its plots and tables show, and what it must not do."""

from __future__ import annotations

import builtins
import dataclasses
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hetero.decide.studies.output import page, plots
from hetero.decide.studies.output.page import study_page
from hetero.decide.studies.output.plots import Results
from hetero.decide.studies.output.table import rows
from hetero.decide.studies.plan import StudyPlan
from hetero.decide.studies.runs import PlannedRun, RunResult
from hetero.decide.studies.study_file import Metric
from hetero.documents.findings import Finding
from hetero.documents.text import html_text
from hetero.metrics.logged import LoggedMetric
from tests.support.studies import CLUSTERS, plan_of, report_of, result_of

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
CHANGES: dict[str, Any] = {
    "factors": {"cluster": CLUSTERS, "samples": [100_000, 1_000_000]},
    "replicates": 2,
    "metrics": [{"name": "f1", "target": 0.92}],
}
FINDING = Finding(number="ST-01", severity="warning", found="a <b>batch</b>", fix="keep it")


def ended(run: PlannedRun) -> RunResult:
    """Return a result as the source's Figures 4 to 6 show it."""
    ranks = float(run.levels["ranks"])
    wall_s = 65_820 / ranks**0.88
    f1 = 0.931 - 0.001 * ranks + 0.002 * run.replicate
    metrics = [LoggedMetric(name="f1", value=f1 - 0.1, at_s=wall_s / 2), LoggedMetric(name="f1", value=f1, at_s=wall_s)]
    metrics += [LoggedMetric(name="communication_s", value=ranks - 1, at_s=1.0)]
    metrics += [LoggedMetric(name="computation_s", value=100.0, at_s=1.0)]
    return result_of(run, wall_s=wall_s, usd=3.8 * ranks * wall_s / 3600, metrics=tuple(metrics))


def results_of(plan: StudyPlan, results: Sequence[RunResult]) -> Results:
    return Results(results=results, factors=["samples"], metric=plan.study.metrics[0])


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return plan_of(CHANGES)


@pytest.fixture(scope="module")
def results(plan: StudyPlan) -> list[RunResult]:
    failed = result_of(plan.runs[0], state="failed", exit_code=30, cause="<script>alert(1)</script>")
    return [failed, *(ended(run) for run in plan.runs[1:])]


def test_page_is_one_valid_document_that_loads_and_runs_nothing(plan: StudyPlan, results: list[RunResult]) -> None:
    text = study_page(plan, results, rows(results, metrics=plan.study.metrics), [FINDING])
    root = ET.fromstring(text)
    assert {each.tag for each in root.iter()} & {"script", "link", "iframe", "object"} == set()
    assert len(list(root.iter(f"{SVG}svg"))) == 7
    names = [each.attrib["id"] for each in root.iter() if "id" in each.attrib]
    assert len(names) == len(set(names)), "names of elements are unique in a page"
    links = [value for each in root.iter() for key, value in each.attrib.items() if key.endswith(("href", "src"))]
    assert all(link.startswith("data:image/png") or link.removeprefix("#") in names for link in links)
    assert "default-src 'none'" in text.replace("&#x27;", "'")
    assert "&lt;script&gt;alert(1)" in text
    assert "a &lt;b&gt;batch&lt;/b&gt;" in text
    assert "19 of 20 runs finished, 1 failed" in text
    assert "The largest correlation between two factors of the design is 0.00" in text


def test_table_of_cells_has_means_with_intervals(plan: StudyPlan, results: list[RunResult]) -> None:
    header, cells = page.cell_table(plan.study, results)
    assert header == ["cluster", "samples", "ranks", "runs", "failed", "time [s]", "USD", "f1", "time to f1 0.92 [s]"]
    assert len(cells) == 10
    assert cells[0][:6] == ["1 GPU", "100000", "1", "2", "1", "6.582e+04"]  # one run failed: no interval
    assert cells[1][7] == "0.933 [0.9203, 0.9457]"
    assert cells[8][8] == "- (0 of 2)"  # 32 GPUs never reach the target


def test_intervals_of_times_and_costs_are_never_below_zero(plan: StudyPlan) -> None:
    slow = {plan.runs[0].run_id: 9.0}
    results = [result_of(run, wall_s=slow.get(run.run_id, 1.0), usd=slow.get(run.run_id, 1.0)) for run in plan.runs]
    _, cells = page.cell_table(plan.study, results)
    (row,) = (each for each in cells if each[5].startswith("5 ["))
    assert row[5] == row[6]
    assert "-" not in row[5]


@pytest.mark.parametrize(
    ("others", "time"), [(0.04, "10 [10, 10]"), (0.2, "10 [8, 10]"), (0.5, "-")], ids=["idle", "busy", "too busy"]
)
def test_times_beside_other_work_have_a_lower_bound_or_are_no_answer(
    monkeypatch: pytest.MonkeyPatch, plan: StudyPlan, others: float, time: str
) -> None:
    report = report_of()
    monkeypatch.setattr("hetero.report.overruns.lost_cpu_share", lambda hosts: others)
    results = [result_of(run, report=report) for run in plan.runs]
    _, cells = page.cell_table(plan.study, results)
    assert {each[5] for each in cells} == {time}
    text = " ".join(page.notes(plan.study, results))
    assert ("Other work of this machine shows in 20 of 20 runs" in text) == (others > 0.05)
    assert ("has no time and no cost. Run the study again while" in text) == (time == "-")


def test_metric_that_no_run_logged_is_a_notice() -> None:
    metrics = [{"name": "f1"}, {"name": "acc"}, {"name": "loss", "regex": r"loss=(\S+)"}]
    plan = plan_of({**CHANGES, "metrics": metrics})
    results = [ended(run) for run in plan.runs]
    first, second = page.notes(plan.study, results)
    assert first.startswith("The metric acc has no values, because no run logged it. To do: call hetero.log_metric(")
    assert second.startswith("The metric loss has no values, because no line of a log matches its regex.")
    assert html_text(first) in study_page(plan, results, rows(results), [])
    assert page.notes(plan.study, []) == []


@pytest.mark.parametrize("cost", [False, True])
def test_times_and_costs_are_on_logarithmic_axes(plan: StudyPlan, results: list[RunResult], cost: bool) -> None:
    figures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "svg_of", lambda axes: str(figures.append(axes.figure)))
        assert plots.scaling_plot(results_of(plan, results), cost=cost) is not None
    (axes,) = figures[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = [line for line in axes.get_lines() if len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in lines] == [[1, 4, 8, 16, 32]] * 2
    assert axes.get_ylabel() == ("cost of a run [USD]" if cost else "time of a run [hours]")


def test_quality_has_intervals_of_95_percent(plan: StudyPlan, results: list[RunResult]) -> None:
    figures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "svg_of", lambda axes: str(figures.append(axes.figure)))
        found = plots.quality_plot(results_of(plan, results))
    assert found is not None
    assert "Bars are 95 % intervals" in found.caption
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "global batch"
    assert len(axes.containers) == 2  # a series of intervals per number of samples


@pytest.mark.parametrize(
    ("clusters", "expected"),
    [
        (["1 GPU"], ["samples 100000", "samples 1000000"]),
        (["1 GPU", "4 GPUs"], [f"samples {n}, {r}" for r in ("1 rank", "4 ranks") for n in (100_000, 1_000_000)]),
    ],
)
def test_curves_over_time_are_told_apart_by_what_varies(clusters: list[str], expected: list[str]) -> None:
    plan = plan_of({**CHANGES, "factors": {"cluster": {n: CLUSTERS[n] for n in clusters}, "samples": [10**5, 10**6]}})
    figures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "svg_of", lambda axes: str(figures.append(axes.figure)))
        assert plots.quality_over_time_plot(results_of(plan, [ended(run) for run in plan.runs])) is not None
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == expected


def test_equal_results_give_equal_plots(plan: StudyPlan, results: list[RunResult]) -> None:
    found = results_of(plan, results)
    assert plots.scaling_plot(found, cost=False) == plots.scaling_plot(found, cost=False)


def test_study_that_varies_nothing_has_no_plots() -> None:
    plan = plan_of({"factors": {"cluster": {"1 GPU": CLUSTERS["1 GPU"]}}, "constraints": {}, "args": []})
    found = Results(results=[result_of(plan.runs[0], usd=None)], factors=[], metric=Metric(name="f1"))
    assert plots.scaling_plot(found, cost=False) is None
    assert plots.quality_plot(found) is None
    assert plots.quality_over_time_plot(found) is None
    assert plots.pareto_plot(found) is None
    assert plots.communication_plot(found) is None
    assert plan.correlations is None
    assert "No run has ended yet" in study_page(plan, [], [], [])


def test_page_without_matplotlib_says_what_to_install(
    plan: StudyPlan, results: list[RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    text = study_page(plan, results, rows(results), [])
    assert "pip install &quot;hetero[plots]&quot;" in text
    assert "<svg" not in text
    assert "<h2>Runs</h2>" in text


def test_dollar_in_a_name_or_a_level_is_a_character() -> None:
    changes = {
        "factors": {"cluster": CLUSTERS, "price": ["$\\frac$", "$x^2$"]},
        "constraints": {"batch_per_device": 1},
        "args": ["{price}"],
        "metrics": [{"name": "f1$\\nope$"}],
    }
    plan = plan_of(changes)
    named = [ended(run) for run in plan.runs]
    results = [
        dataclasses.replace(
            each,
            metrics=tuple(
                dataclasses.replace(value, name="f1$\\nope$") for value in each.metrics if value.name == "f1"
            ),
        )
        for each in named
    ]
    text = study_page(plan, results, rows(results, metrics=plan.study.metrics), [])
    assert "cannot be drawn" not in text
    assert text.count("<svg") == 6


def test_plot_that_fails_is_a_notice(
    plan: StudyPlan, results: list[RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(found: Results) -> None:
        raise ValueError("no <room>")

    monkeypatch.setattr(page, "quality_plot", fail)
    text = study_page(plan, results, rows(results), [])
    assert "The plot of quality cannot be drawn: ValueError(&#x27;no &lt;room&gt;&#x27;)" in text
    assert text.count("<svg") == 6


def drawn(draw: Callable[[Results], plots.Plot | None], found: Results) -> tuple[Any, str]:
    """Return the axes and the caption of a plot."""
    figures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "svg_of", lambda axes: str(figures.append(axes.figure)))
        plot = draw(found)
    assert plot is not None
    return figures[0].axes[0], plot.caption


def test_intervals_are_those_of_replicates_and_not_of_different_levels(plan: StudyPlan) -> None:
    found = Results(results=[ended(run) for run in plan.runs], factors=[], metric=plan.study.metrics[0])
    axes, caption = drawn(plots.quality_plot, found)  # both numbers of samples are one series
    ((means, _, bars),) = axes.containers
    assert (means.get_linestyle(), bars) == ("None", ())
    assert len(means.get_xdata()) == 10  # one mark per combination
    assert "intervals of the mean" not in caption
    assert "large marks are means of one combination of levels" in caption
    axes, caption = drawn(lambda found: plots.scaling_plot(found, cost=False), found)
    (line,) = [line for line in axes.get_lines() if len(line.get_xdata())]
    assert (line.get_linestyle(), len(line.get_xdata())) == ("None", 10)


def test_too_many_series_have_marks_without_intervals() -> None:
    levels = [samples * 100_000 for samples in range(1, 10)]
    plan = plan_of({**CHANGES, "factors": {"cluster": CLUSTERS, "samples": levels}})
    axes, caption = drawn(plots.quality_plot, results_of(plan, [ended(run) for run in plan.runs]))
    ((means, _, bars),) = axes.containers
    assert (len(means.get_xdata()), bars) == (45, ())
    assert "are not joined" in caption


def test_factor_with_settings_is_left_out_of_the_series_only_if_it_chooses_the_size() -> None:
    optimizers = {"adam": {"environment": {"OPTIMIZER": "adam"}}, "sgd": {"environment": {"OPTIMIZER": "sgd"}}}
    same_ranks = {name: {"groups": [f"trainer={name}:1"]} for name in ("ml.p3.2xlarge", "ml.m5.large")}
    per_host = {str(number): {"options": {"nproc_per_node": number}} for number in (1, 2)}
    for factor, is_size in ((optimizers, False), (same_ranks, False), (per_host, True), (CLUSTERS, True)):
        plan = plan_of({"factors": {"chosen": factor, "samples": [100_000]}, "groups": ["trainer=ml.m5.large:1"]})
        assert page._chooses_size(plan.study.factors[0], plan) == is_size

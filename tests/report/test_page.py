"""The pages of a run and of a comparison."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import main
from hetero.decide.pages.run_page import comparison_page, run_page
from hetero.decide.pages.run_plots import step_parts_s
from hetero.documents.records import encode
from hetero.errors import ConfigError, ExitCode
from hetero.metrics.hosts import HostUsage
from hetero.metrics.step_series import StepSeries
from hetero.metrics.steps import StepSummary
from hetero.metrics.usage_series import UsageSeries
from hetero.pricing import Catalogue
from hetero.report import RankFacts, Report, RunFacts, build_report, compare
from hetero.report.model import TimedEvent
from tests.support.browser import needs_chromium, open_page

pytest.importorskip("matplotlib")

PRICED = Catalogue.load("seed-2022")
HOSTILE = "train.py '</code><script>alert(1)</script>' & \x1b[31m ]]>"
FactsMaker = Callable[..., RunFacts]
SummaryMaker = Callable[..., StepSummary]
UsageMaker = Callable[..., HostUsage]

HISTORY = StepSeries(
    begin_s=(10.0, 10.2, 10.4),
    end_s=(10.2, 10.4, 10.6),
    num_steps=(1, 1, 1),
    compute_s=(0.1, 0.1, 0.1),
    data_wait_s=(0.1, 0.1, 0.1),
)
SERIES = UsageSeries(
    begin_s=(0.0, 1.0), end_s=(1.0, 2.0), cpu_percent=(50.0, 90.0), memory_mean_bytes=(1, 1), memory_peak_bytes=(2, 2)
)


@pytest.fixture
def report_of(make_facts: FactsMaker, summary_of: SummaryMaker, usage_of: UsageMaker) -> Callable[..., Report]:
    """Return a maker of reports of emulated runs with histories, one of the published pair."""

    def make(
        *,
        is_heterogeneous: bool = False,
        command: str = HOSTILE,
        step_s: float | None = None,
        prices: Catalogue = PRICED,
        changes: dict[str, Any] | None = None,
        **steps: Any,
    ) -> Report:
        step_s = step_s or (0.184 if is_heterogeneous else 1.193)
        steps = {"step_wait_s": step_s / 4, "history": HISTORY, **steps}
        summary = dataclasses.replace(summary_of(step_s, 0.5), **steps)
        hosts = [usage_of("algo-1", series=SERIES)]
        if is_heterogeneous:
            work = {"batches_computed": 1234, "endpoints_busy_s": 480.0, "endpoint_slots": 16}
            hosts.append(usage_of("algo-2", series=SERIES, **work))
        facts = make_facts(
            is_heterogeneous=is_heterogeneous,
            command=command,
            ranks=(RankFacts(rank=0, host="algo-1", loaders=(summary,)),),
            hosts=tuple(hosts),
            options={"emulate_sample_s": "0.1", "emulate_step_s": "0.1"},
            timeline=(TimedEvent(at_s=10.3, host="algo-2", what="an endpoint restarted"),),
        )
        return build_report(dataclasses.replace(facts, **changes or {}), prices)

    return make


def texts(page: str, tag: str) -> list[str]:
    return ["".join(element.itertext()) for element in ET.fromstring(page).iter(tag)]


def rows_of(page: str) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in ET.fromstring(page).iter("tr")]


def test_comparison_page_begins_with_the_verdict_and_its_bound(report_of: Callable[..., Report]) -> None:
    page = comparison_page(compare(report_of(), report_of(is_heterogeneous=True)))
    (headline,) = texts(page, "h1")
    assert headline.startswith("Worth it: at least 69.6 % cheaper: the second run has at least 4.86 times the pace")
    assert "at least 69.6 %" in texts(page, "dd")
    assert ["algo-2", "data", "1,234", "480 s of 16 vCPUs", "0.50 of 2", "1.20", "2,000 MB"] in rows_of(page)
    assert ["10.3 s", "algo-2", "an endpoint restarted"] in rows_of(page)
    assert texts(page, "h3")[:4] == [
        "Step time over time",
        "Where the time of a step goes",
        "Cost of the same work",
        "CPU use of the hosts, homogeneous",
    ]
    drawn = texts(page, "{http://www.w3.org/2000/svg}text")
    (of_runs,) = {" ".join(re.findall(r"USD ([0-9.]+) per 1,000 steps", page))}
    assert {f" {usd}" for usd in of_runs.split()} <= set(drawn)  # the bars are what the runs cost


def test_comparison_page_without_verdict_says_why(report_of: Callable[..., Report]) -> None:
    few = report_of(is_heterogeneous=True, num_steps_measured=3)
    (headline,) = texts(comparison_page(compare(report_of(), few)), "h1")
    assert headline.startswith(
        "Which run is faster and which is cheaper cannot be said: The second run measured only 3"
    )


def test_comparison_page_without_prices_has_the_pace(report_of: Callable[..., Report]) -> None:
    reports = report_of(prices=Catalogue([])), report_of(is_heterogeneous=True, prices=Catalogue([]))
    (headline,) = texts(comparison_page(compare(*reports)), "h1")
    assert headline.endswith(" times the pace: whether it is cheaper cannot be said without all prices")


def test_comparison_page_whose_bounds_contain_both_answers_says_so(report_of: Callable[..., Report]) -> None:
    # Half of the second run's step is real work: without it the run is cheaper, with it dearer.
    reports = report_of(step_wait_s=None), report_of(is_heterogeneous=True, step_s=0.9, step_wait_s=0.01)
    comparison = compare(*reports)
    assert comparison.is_worth_it is None
    (headline,) = texts(comparison_page(comparison), "h1")
    assert headline.startswith("Whether the second run is cheaper cannot be said: it is between 11.7 % dearer and")


def test_run_of_real_work_alone_cannot_be_compared(report_of: Callable[..., Report]) -> None:
    work_alone = {"step_wait_s": 0.0, "data_wait_total_s": 0.0, "compute_total_s": 18.4}
    with pytest.raises(ConfigError, match="second report: no time per step was measured"):
        compare(report_of(), report_of(is_heterogeneous=True, **work_alone))


def test_comparison_page_of_other_batches_is_about_samples_and_has_the_caveat(report_of: Callable[..., Report]) -> None:
    page = comparison_page(compare(report_of(), report_of(is_heterogeneous=True, batch_samples=32)))
    assert "Caveats" in texts(page, "h2")
    assert any(item.startswith("The global batch differs (64 against 32 samples)") for item in texts(page, "li"))
    drawn = texts(page, "{http://www.w3.org/2000/svg}text")
    assert "USD for a million samples" in drawn
    assert " times its pace." in page  # no step time: the steps of the two runs are not the same work


def test_run_page_of_many_hosts_and_events_shows_the_first(
    report_of: Callable[..., Report], usage_of: UsageMaker
) -> None:
    hosts = tuple(usage_of(f"algo-{number}", series=SERIES) for number in range(1, 301))
    timeline = tuple(TimedEvent(at_s=10.01 * (1 + at / 1000), host="algo-2", what=f"event {at}") for at in range(20))
    changes = {"hosts": hosts, "timeline": timeline, "events": {"batches computed": 200}}
    page = run_page(report_of(changes=changes))
    hosts_shown = [row[0] for row in rows_of(page) if row and row[0].startswith("algo-")]
    assert 1 < len(hosts_shown) < len(hosts)
    paragraphs = texts(page, "p")
    assert f"{len(hosts) - len(hosts_shown)} hosts more in report.json." in paragraphs
    assert "The script took 105 of 200 batches. Others are made ahead, and again after a failure." in paragraphs
    assert f" of {len(hosts)} hosts." in page


def test_run_page_without_history_and_events_has_neither_plot_nor_table(report_of: Callable[..., Report]) -> None:
    changes = {"timeline": (), "hosts": ()}
    page = run_page(report_of(history=StepSeries(), step_wait_s=None, changes=changes))
    assert texts(page, "h3") == ["Where the time of a step goes"]
    assert not any("Real work that shows" in text for text in texts(page, "p"))


def test_pages_load_and_run_nothing_and_are_small(report_of: Callable[..., Report]) -> None:
    reports = report_of(), report_of(is_heterogeneous=True)
    for page in (comparison_page(compare(*reports)), run_page(reports[1])):
        root = ET.fromstring(page)
        assert {each.tag for each in root.iter()} & {"script", "link", "iframe", "object", "img"} == set()
        links = [value for each in root.iter() for key, value in each.attrib.items() if key.endswith(("href", "src"))]
        assert all(link.startswith("#") for link in links)
        assert len(page.encode()) < 500_000


def test_run_page_of_a_run_without_steps_has_the_advice_and_the_hosts(
    make_facts: FactsMaker, usage_of: UsageMaker
) -> None:
    report = build_report(make_facts(ranks=(), hosts=(usage_of("algo-1", batches_computed=3),)), PRICED)
    page = run_page(report)
    assert texts(page, "h1")[0].startswith("Homogeneous run: No step was measured")
    assert "<svg" not in page
    assert ["algo-1", "3", "0.50 of 2", "1.20", "2,000 MB"] in rows_of(page)  # its role is not known


def test_run_page_of_a_failed_run_has_its_exit_code_and_its_events(
    report_of: Callable[..., Report],
) -> None:
    for changes in ({"exit_code": 30}, {"exit_code": 30, "ranks": ()}):
        page = run_page(report_of(changes=changes))
        assert texts(page, "h1")[0].startswith("Homogeneous run, which ended with exit code 30 ")
        assert ["10.3 s", "algo-2", "an endpoint restarted"] in rows_of(page)


def test_steps_are_those_of_another_rank_if_the_slowest_has_no_history(
    report_of: Callable[..., Report], summary_of: SummaryMaker
) -> None:
    summaries = summary_of(0.3, 0.5), dataclasses.replace(summary_of(0.2, 0.5), history=HISTORY)
    ranks = tuple(RankFacts(rank=rank, host="algo-1", loaders=(each,)) for rank, each in enumerate(summaries))
    assert "Step time over time" in texts(run_page(report_of(changes={"ranks": ranks})), "h3")


def test_names_with_odd_characters_are_escaped_in_plots(report_of: Callable[..., Report], usage_of: UsageMaker) -> None:
    page = run_page(report_of(changes={"hosts": (usage_of("a\x01\u6f22$b$", series=SERIES),)}))
    assert any("a\\x01\u6f22$b$" in text for text in texts(page, "{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize(
    ("emulated_s", "parts"),
    [
        (None, {"compute": 0.08, "data wait": 0.12}),
        (0.05, {"accelerator": 0.05, "real work that shows": 0.03, "data wait": 0.12}),
    ],
)
def test_parts_of_a_step_add_up(summary_of: SummaryMaker, emulated_s: float | None, parts: dict[str, float]) -> None:
    assert step_parts_s(summary_of(0.2, 0.4, step_wait_s=emulated_s)) == pytest.approx(parts)


def test_report_command_writes_the_page_and_keeps_its_inputs(
    report_of: Callable[..., Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, is_heterogeneous in (("a", False), ("b", True)):
        (tmp_path / name).mkdir()
        document = encode(report_of(is_heterogeneous=is_heterogeneous))
        (tmp_path / name / "report.json").write_text(json.dumps(document))
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["report", *runs, "--html", str(tmp_path / "page.html")]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "**worth it: at least" in text
    assert main(["report", *runs]) == ExitCode.OK
    assert capsys.readouterr().out == text
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", *runs, "--html", str(tmp_path / "b" / "report.json")]) == ExitCode.USAGE
    assert "give another file to --html" in capsys.readouterr().err


@needs_chromium
def test_comparison_page_in_a_browser_renders_without_errors_or_requests(
    report_of: Callable[..., Report], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(comparison_page(compare(report_of(), report_of(is_heterogeneous=True))), encoding="utf-8")
    opened = open_page(page, tmp_path)
    assert opened.dom.count("<svg") == 5
    assert "Worth it: at least 69.6 % cheaper" in opened.dom
    assert opened.console == []
    assert opened.requests == []
    assert opened.screenshot.stat().st_size > 50_000, "the page is not empty"


@needs_chromium
def test_browser_of_these_tests_shows_requests_and_errors_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png'/><script>throw Error('no')</script>", encoding="utf-8")
    opened = open_page(page, tmp_path)
    assert opened.requests == ["http://127.0.0.1:9/x.png"]
    assert "no" in opened.console[0]

from __future__ import annotations

import itertools
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import main
from hetero.decide.planning import plan_plot as plot_module
from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.plan import make_plan
from hetero.decide.planning.plan_page import plan_page
from hetero.decide.planning.plan_plot import plan_plot, unbeaten
from hetero.decide.planning.plan_text import cluster_text
from hetero.metrics.figures import Figure
from hetero.metrics.profile.profile import write_profile
from hetero.pricing.catalog import Catalogue
from hetero.report.plan import Plan, PlannedCluster
from tests.support.planning import make_profile

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "train.py --name '</code><script>alert(1)</script>' & \x00 \x1b[31m \u202e \udc80 \"]]>"


def plan_of(catalogue: Catalogue, *, options: PlanOptions | None = None, **profile: Any) -> Plan:
    job = make_profile(**{"headspace_s": 0.18, "cpu_s": 0.15} | profile)
    return make_plan(job, catalogue, options or PlanOptions(menu=("ml.c5.9xlarge", "ml.c5.18xlarge")))


@pytest.fixture
def many_types() -> Catalogue:
    """All types without accelerators with a price that grows with their vCPUs, and some with."""
    source = random.Random(7)
    prices = [
        f"{info.instance_type}={0.05 * info.vcpus * source.uniform(0.8, 1.4):.4f}"
        for info in Catalogue.load().types()
        if info.vcpus and not info.num_accelerators
    ]
    return Catalogue.load(overrides=(*prices, "ml.p3.2xlarge=3.825"))


def parsed(plan: Plan) -> ET.Element:
    return ET.fromstring(plan_page(plan))


def texts(page: ET.Element, tag: str) -> list[str]:
    return ["".join(element.itertext()) for element in page.iter(tag)]


def names_of_parts(page: ET.Element) -> list[str]:
    """Return the names that the code gave to parts of the plot, without the prefix that makes them unique."""
    return [group.get("id", "").partition("-")[2] for group in page.iter(f"{SVG}g")]


def test_page_has_the_answer_as_headline_and_what_to_paste(catalogue: Catalogue) -> None:
    plan = plan_of(catalogue)
    page = parsed(plan)
    assert texts(page, "h1") == [plan.answer]
    assert texts(page, "pre") == [f"hetero simulate {plan.chosen.flags} SCRIPT", plan.chosen.instance_groups]
    assert set(plan.notes) <= set(texts(page, "li"))
    assert "Break-even: the cluster costs 1.48 times" in " ".join(texts(page, "p"))


def test_page_of_a_plan_without_data_hosts_has_nothing_to_paste(catalogue: Catalogue) -> None:
    page = parsed(plan_of(catalogue, headspace_s=1.16, cpu_s=0.1, step_s=1.19))
    assert texts(page, "h1") == ["Do not add data hosts: the accelerator is busy 97 % of each step."]
    assert texts(page, "pre") == []
    assert "chosen, as it is now" in " ".join(texts(page, f"{SVG}text"))


def test_every_alternative_is_in_the_table_and_in_the_drawing(many_types: Catalogue) -> None:
    plan = plan_of(many_types, options=PlanOptions(spot_usd={"ml.c5.9xlarge": 0.6}))
    page = parsed(plan)
    rows = [["".join(cell.itertext()) for cell in row.iter("td")] for row in page.iter("tr")][1:]
    assert len(rows) == len(plan.alternatives) > 10
    tips = texts(page, f"{SVG}title")
    bars = [name for name in names_of_parts(page) if name.startswith("bar-")]
    assert len(tips) == len(bars) == len(plan.alternatives)
    for number, (cluster, row) in enumerate(zip(plan.alternatives, rows, strict=True), start=1):
        assert row[0] == str(number)
        assert row[1].startswith(cluster_text(cluster).replace(", ", " ", 1))
        assert row[-1] == (cluster.rejected or "chosen")
        assert any(tip.startswith(f"{number}. {cluster_text(cluster)}\n") for tip in tips)
    assert [row for row in page.iter("tr") if row.get("class") == "chosen"]


def test_chosen_and_baseline_are_named_in_the_drawing(catalogue: Catalogue) -> None:
    plan = plan_of(catalogue)
    found = texts(parsed(plan), f"{SVG}text")
    assert {"as it is now", "chosen"} < set(found)
    assert {str(row) for row in range(1, len(plan.alternatives) + 1)} < set(found)
    assert "headspace 180 ms: no cluster is faster" in found


def test_page_shows_hostile_text_and_runs_nothing(catalogue: Catalogue) -> None:
    plan = replace(plan_of(catalogue, command=HOSTILE), answer=f"Add <b>: {HOSTILE}", notes=(HOSTILE,))
    plan = replace(plan, alternatives=tuple(replace(each, rejected=HOSTILE) for each in plan.alternatives))
    page = plan_page(plan)
    tags: set[str] = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.add(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert tags.isdisjoint({"script", "b", "img", "link", "iframe", "object"})
    assert page.isascii() or not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", page)
    shown = texts(ET.fromstring(page), "code")[0]
    assert shown == HOSTILE.translate({0: r"\x00", 0x1B: r"\x1b", 0x202E: r"\u202e", 0xDC80: r"\udc80"})


def test_page_refers_to_nothing_outside(many_types: Catalogue) -> None:
    page = plan_page(plan_of(many_types, options=PlanOptions()))
    assert re.findall(r'(?:src=|href=|url\()"?[^"#]', page) == []
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\"]*", page)) == namespaces
    assert "default-src &#x27;none&#x27;" in page


def cluster(step_s: float, usd: float | None) -> PlannedCluster:
    figure = None if usd is None else Figure(value=usd, unit="USD", basis="modelled")
    return PlannedCluster(
        spending="data hosts",
        groups=(),
        local_endpoints=0,
        endpoints_per_host=None,
        form="as is",
        step_time=Figure(value=step_s, unit="s", basis="modelled"),
        step_time_low_s=step_s,
        step_time_high_s=step_s,
        hourly_usd=None,
        usd_per_1k_steps=figure,
        usd_per_1k_steps_low=usd,
        usd_per_1k_steps_high=usd,
        bottleneck="accelerator",
        rejected="",
    )


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([(1, 5), (2, 3), (3, 1)], [(1, 5), (2, 3), (3, 1)]),
        ([(3, 1), (2, 4), (2, 3), (1, 5), (4, 1), (2.5, 3)], [(1, 5), (2, 3), (3, 1)]),
        ([(1, 1), (2, 2), (1, 2), (2, 1)], [(1, 1)]),
        ([(1, None), (2, 3)], [(2, 3)]),  # a cluster without a price
        ([], []),
    ],
)
def test_front_has_the_clusters_that_none_beats(
    points: list[tuple[float, float | None]], front: list[tuple[float, float]]
) -> None:
    clusters = [cluster(*point) for point in points]
    assert unbeaten(clusters) == [cluster(*point) for point in front]


def test_front_does_not_follow_rounding_errors_of_times() -> None:
    points = [(1.0, 5.0), (1.0 + 1e-12, 4.0), (1.0009, 3.0), (1.002, 2.0), (3.0, 2.5), (3.0 + 1e-9, 1.0)]
    front = unbeaten([cluster(*point) for point in points])
    expected = [(1.0 + 1e-12, 4.0), (1.0009, 3.0), (1.002, 2.0), (3.0 + 1e-9, 1.0)]
    assert front == [cluster(*point) for point in expected]


def test_front_in_the_drawing_is_that_of_all_pairs(catalogue: Catalogue) -> None:
    source = random.Random(3)
    points = [(source.uniform(0.2, 1.2), source.uniform(0.3, 2.0)) for _ in range(40)]
    plan = replace(plan_of(catalogue), alternatives=tuple(cluster(*point) for point in points))

    def beats(one: PlannedCluster, other: PlannedCluster) -> bool:
        assert one.usd_per_1k_steps is not None
        assert other.usd_per_1k_steps is not None
        first = (one.step_time.value, one.usd_per_1k_steps.value)
        second = (other.step_time.value, other.usd_per_1k_steps.value)
        return first != second and first[0] <= second[0] and first[1] <= second[1]

    expected = [one for one in plan.alternatives if not any(beats(other, one) for other in plan.alternatives)]
    assert unbeaten(plan.alternatives) == sorted(expected, key=lambda one: one.step_time.value)
    (axes,) = axes_of(plan)
    (line,) = (each for each in axes.lines if each.get_gid() == "front")
    corners = [tuple(corner) for corner in line.get_path().vertices]
    assert len(corners) == 2 * len(expected) - 1
    assert all(x1 <= x2 and y1 >= y2 for (x1, y1), (x2, y2) in itertools.pairwise(corners))


def axes_of(plan: Plan) -> list[Any]:
    """Return the axes of the plot of a plan."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot_module, "svg_of", lambda axes, tips: str(found.append(axes)))
        plan_plot(plan)
    return found


@pytest.fixture(scope="module")
def fast_plan() -> Plan:
    return plan_of(Catalogue.load("seed-2022"), headspace_s=1e-6)


@pytest.mark.parametrize("ratio", [1.001, 1.5, 3.0, 5.9, 6.1, 11.0, 90.0, 7e3])
@pytest.mark.parametrize("least", [0.0123, 0.4, 9.7])
def test_each_axis_has_a_few_round_ticks(fast_plan: Plan, least: float, ratio: float) -> None:
    ends = (cluster(least, least), cluster(least * ratio, least * ratio))
    (axes,) = axes_of(replace(fast_plan, alternatives=ends))
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        labels = [axis.get_major_formatter()(value) for value in axis.get_majorticklocs() if low <= value <= high]
        assert 4 <= len(set(labels)) == len(labels) <= 12


def test_page_without_any_price_has_the_table_alone() -> None:
    job = make_profile(headspace_s=0.18, cpu_s=0.15)
    catalogue = Catalogue.load(overrides=("ml.c5.9xlarge=1.8",))
    plan = make_plan(job, catalogue, PlanOptions(goal="time"))
    page = parsed(plan)
    assert list(page.iter(f"{SVG}svg")) == []
    assert "no cluster has a known price" in " ".join(texts(page, "p"))
    assert len(list(page.iter("tr"))) == len(plan.alternatives) + 1


def test_page_says_where_its_figures_come_from(catalogue: Catalogue) -> None:
    plan = plan_of(catalogue)
    rows = list(parsed(plan).iter("tr"))[1:]
    for cluster, row in zip(plan.alternatives, rows, strict=True):
        assert "".join(list(row.iter("td"))[2].itertext()).endswith(f", {cluster.step_time.basis}")


def test_caption_describes_the_front(catalogue: Catalogue) -> None:
    plan = plan_of(catalogue)
    assert "The line joins" in texts(parsed(plan), "figcaption")[0]
    one = replace(plan, alternatives=(plan.baseline, plan.chosen))
    assert "Row 2 is both the fastest and the cheapest." in texts(parsed(one), "figcaption")[0]


def test_headspace_far_away_does_not_squeeze_the_drawing(catalogue: Catalogue) -> None:
    page = parsed(plan_of(catalogue, headspace_s=1e-4))
    assert any("← headspace 0.1 ms" in text for text in texts(page, f"{SVG}text"))
    assert "headspace" not in names_of_parts(page)


def test_command_writes_the_page_beside_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(make_profile(headspace_s=0.18, cpu_s=0.15), tmp_path / "profile.json")
    arguments = ["plan", str(tmp_path), "--menu", "ml.c5.9xlarge", "--price-profile", "seed-2022", "--html"]
    assert main([*arguments, str(tmp_path / "plan.html")]) == 0
    (headline,) = texts(ET.fromstring((tmp_path / "plan.html").read_text("utf-8")), "h1")
    assert capsys.readouterr().out.startswith(headline)
    assert main([*arguments, str(tmp_path / "none" / "plan.html")]) != 0
    assert "cannot write" in capsys.readouterr().err

"""The result as text, page and plots, and as a file."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hetero.decide.canary.comparison import decide
from hetero.decide.canary.conducting import write_report
from hetero.decide.canary.forecast import Forecast, forecast
from hetero.decide.canary.model import SCHEMA_VERSION, CanaryReport, Candidate, load_canary
from hetero.decide.canary.output.page import canary_page
from hetero.decide.canary.output.plots import draws_of
from hetero.decide.canary.output.text import canary_text, headline_of
from hetero.decide.pages.drawing import Plot
from hetero.errors import ConfigError
from tests.support.canary import job, memory


def made(name: str, whole_s: float, hourly_usd: float, noise: float = 0.02) -> Forecast:
    points = job(lambda f: 0.5 + whole_s * f, noise=noise, more=lambda f: {"resources": memory(7e8, 5e9, f)})
    return forecast(
        Candidate(name=name, groups=(f"t={name}:1",), points=points, hourly_usd=hourly_usd, memory_limit_bytes=16e9)
    )


def drawn(report: CanaryReport) -> list[Plot]:
    return [plot for draw in draws_of(report).values() if (plot := draw()) is not None]


@pytest.fixture(scope="module")
def report() -> CanaryReport:
    forecasts = [made("1 x small", 200, 1.0), made("1 x <large>", 0.001, 3.0)]
    return CanaryReport(
        schema_version=SCHEMA_VERSION,
        command="train.py --lr 1",
        how="Each run gets a fraction of the files.",
        candidates=tuple(each.candidate for each in forecasts),
        decision=decide(forecasts),
    )


def test_text_has_figures_intervals_and_reasons(report: CanaryReport) -> None:
    text = canary_text(report)
    assert "# Canary forecast of `train.py --lr 1`" in text
    assert "| 1 x small" in text
    assert "refused (no-growth): the time does not grow measurably" in text
    assert "There is no forecast of the time, for the reasons below." in text
    assert "of the whole job's time" in text


def test_page_is_valid_and_has_the_same(report: CanaryReport) -> None:
    page = canary_page(report)
    root = ET.fromstring(page.partition("<!DOCTYPE html>\n")[2])
    text = "".join(root.itertext())
    assert "1 x <large>" in text
    assert "does not grow measurably" in text
    assert "script" not in {element.tag for element in root.iter()}


def test_plots_show_points_and_refusals(report: CanaryReport) -> None:
    pytest.importorskip("matplotlib")
    plots = drawn(report)
    titles = [plot.title for plot in plots]
    assert titles[:2] == ["Forecast time of the whole job", "Forecast cost of the whole job"]
    assert "1 x small: time" in titles
    refused = next(plot for plot in plots if plot.title == "1 x <large>: time")
    assert "does not grow measurably" in refused.caption
    assert all(plot.svg.startswith("<svg") for plot in plots)


def test_single_amount_of_data_is_one_number() -> None:
    points = job(lambda f: 100 * f)[:1]
    shown = forecast(Candidate(name="small", groups=("t=small:1",), points=points)).candidate
    assert headline_of(shown).startswith("1 canary run on 1 % of the data took")
    nothing = forecast(Candidate(name="small", groups=("t=small:1",), points=())).candidate
    assert headline_of(nothing).startswith("0 canary runs on 0 % of the data took 0 s")


def test_file_is_read_back(report: CanaryReport, tmp_path: Path) -> None:
    write_report(report, tmp_path)
    assert load_canary(tmp_path) == report
    assert {path.name for path in tmp_path.iterdir()} == {"canary.json", "canary.md", "canary.html"}
    (tmp_path / "canary.json").write_text("{}")
    with pytest.raises(ConfigError, match="schema_version: missing"):
        load_canary(tmp_path)

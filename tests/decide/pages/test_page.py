"""What all pages share: the plots and the sentence without them."""

from __future__ import annotations

import builtins
import sys
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from hetero.decide.pages.drawing import Plot, bar_axes, has_matplotlib, new_axes, svg_of
from hetero.decide.pages.page import html_page, plots_html
from hetero.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return imported(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)


def plot_of(axes: Any, **changes: Any) -> Plot:
    return Plot(title="a < b", caption="c & d", svg=svg_of(axes, {"part": "tip <1>"}), **changes)


@pytest.mark.usefixtures("no_matplotlib")
def test_page_without_matplotlib_has_a_sentence_in_place_of_its_plots() -> None:
    assert not has_matplotlib()
    html = plots_html({"costs": lambda: None})
    assert "no plots, because matplotlib is not installed: pip install &quot;hetero[plots]&quot;" in html
    with pytest.raises(ConfigError, match="plots need matplotlib"):
        new_axes()


def test_plot_that_fails_is_a_notice_beside_the_others() -> None:
    pytest.importorskip("matplotlib")

    def fail() -> Plot:
        raise ValueError("no <room>")

    html = plots_html({"costs": fail, "times": lambda: plot_of(bar_axes(["x"])), "nothing": lambda: None})
    root = ET.fromstring(html_page("page", [html]))
    assert "The plot of costs cannot be drawn: ValueError" in "".join(root.itertext())
    assert [each.text for each in root.iter("h3")] == ["a < b"]
    assert plots_html({"nothing": lambda: None}) == ""


def test_part_of_a_plot_has_its_tip_and_bars_are_equally_high() -> None:
    pytest.importorskip("matplotlib")
    heights = []
    for names in (["x"], ["x", "y", "z"]):
        axes = bar_axes(names)
        axes.barh(0, 1.0, height=0.6)
        axes.set_xlabel("time [s]")
        axes.plot(0.5, 0, "o", gid="part")
        root = ET.fromstring(plot_of(axes).svg)
        assert [each.text for each in root.iter(f"{SVG}title")] == ["tip <1>"]
        axes.figure.draw_without_rendering()
        heights.append(axes.patches[0].get_window_extent().height)
    assert heights[0] == pytest.approx(heights[1], rel=0.1)

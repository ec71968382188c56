"""Plots by matplotlib, as SVG for a page, in the one style of all pages.

matplotlib is imported when a plot is drawn. Nothing here uses pyplot, so no state is shared with a user's own plots.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from hetero.documents.text import html_text, printable
from hetero.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "QUIET", "Plot", "bar_axes", "has_matplotlib", "legend", "new_axes", "plain_ticks", "svg_of"]

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a", "#808080")
"""Colours that people with colour blindness can tell apart (Okabe and Ito). They are visible on white and on black."""
QUIET = PALETTE[-1]
"""Colour of reference lines and of refused figures."""
_WIDTH_IN = 11.0
"""Width of a wide plot. Other plots have half of this width, so all texts of a page have one size."""
_HEIGHT_IN = 3.4
_BAR_IN = 0.6
_SCALE_IN = 0.6
"""Height of the axis below horizontal bars."""
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": QUIET,
    "grid.alpha": 0.2,
}
_TICKS = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))
"""Ticks in each decade of a logarithmic axis. A shorter axis needs more ticks."""
_MIN_TICKS = 4
_PROLOGUE = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_NOT_OF_THE_FIGURE = re.compile(r"\s*<metadata>.*?</metadata>|\s*<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
"""Metadata, and a style that would apply to the whole page. The page's own style has it for plots alone."""
_BEFORE_ELEMENT_NAME = re.compile(r'(?<= id=")|(?<=url\(#)|(?<=href="#)')
_THEME = {"#000000": "var(--text)", "#ffffff": "var(--background)"}
"""Colours that follow the page's theme, light or dark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawn plot."""

    title: str
    caption: str
    svg: str
    """An ``svg`` element."""
    is_wide: bool = False
    """Whether it is as wide as the page. Two others fit side by side."""


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401  only to see whether the import works
    except ImportError:
        return False
    return True


def new_axes(height_in: float = _HEIGHT_IN, *, is_wide: bool = False, widths: Sequence[float] = (1.0,)) -> list[Axes]:
    """Return the empty axes of a new figure, side by side.

    Args:
        height_in: Height of the figure in inches.
        is_wide: Whether the figure is as wide as the page.
        widths: Relative width of each of the axes.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError as error:
        raise ConfigError('plots need matplotlib; to do: pip install "hetero[plots]"') from error
    # Set the style here, because spines and grids take it from the defaults when axes are made.
    with mpl.rc_context(_STYLE):
        figure = MatplotlibFigure(figsize=(_WIDTH_IN if is_wide else _WIDTH_IN / 2, height_in), layout="constrained")
        found = figure.subplots(1, len(widths), squeeze=False, gridspec_kw={"width_ratios": widths})
    return list(found[0])


def bar_axes(names: Sequence[str], *, is_wide: bool = False) -> Axes:
    """Return axes for one horizontal bar per name, from top to bottom. Bars are equally high in all plots."""
    (axes,) = new_axes(_SCALE_IN + _BAR_IN * len(names), is_wide=is_wide)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    # Room for the value at the end of the longest bar.
    axes.margins(x=0.12)
    return axes


def legend(axes: Axes, *, is_outside: bool = False) -> None:
    """Add a legend if anything has a label.

    Args:
        axes: The axes.
        is_outside: Whether the legend is above the axes, where it covers nothing. It needs the width of the page.
    """
    if not any(axes.get_legend_handles_labels()[1]):
        return
    if is_outside:
        axes.figure.legend(loc="outside upper right", frameon=False, ncols=3)
    else:
        axes.legend(frameon=False, fontsize="small")


def plain_ticks(axis: Axis, text_of: Callable[[float], str] = "{:g}".format) -> None:
    """Label a logarithmic axis with plain numbers at some round values. Its ends must be set.

    Args:
        axis: The x axis or the y axis.
        text_of: Returns the text of a value.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = sorted(axis.get_view_interval())
    # Take the first steps with enough ticks. With one fixed set of steps, an axis had only two ticks if its ends
    # differed by a factor of four to six.
    for steps in _TICKS:
        locator = LogLocator(subs=steps)
        if sum(low <= value <= high for value in locator.tick_values(low, high)) >= _MIN_TICKS:
            axis.set_major_locator(locator)
            break
    else:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], min_n_ticks=_MIN_TICKS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value)))
    axis.set_minor_locator(NullLocator())


def svg_of(axes: Axes, tips: Mapping[str, str] | None = None) -> str:
    """Return the figure of some axes as an ``svg`` element for a page. Equal figures are equal texts.

    A ``$`` in a text is that character, not mathematics. Control characters are escaped. Black and white become the
    text and background of the page.

    Args:
        axes: Any axes of the figure.
        tips: Texts that a browser shows over parts of the figure, by the ``gid`` of the part.
    """
    import matplotlib as mpl
    from matplotlib.text import Text

    figure, target = cast("Figure", axes.figure), io.StringIO()
    for text in figure.findobj(Text):
        # Switch mathematics off, because the user's names of metrics and levels may have a $.
        text.set_parse_math(False)
        text.set_text(printable(text.get_text(), keep="\n"))
    # Some texts of ticks are made only while the figure is drawn, so switch mathematics off for new texts too.
    with (
        mpl.rc_context({"svg.hashsalt": "hetero", "svg.fonttype": "none", "text.parse_math": False}),
        warnings.catch_warnings(),
    ):
        # Ignore missing glyphs, because the browser's fonts draw the text.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = _NOT_OF_THE_FIGURE.sub("", _PROLOGUE.sub("", target.getvalue()))
    for name, tip in (tips or {}).items():
        svg = svg.replace(f'<g id="{name}">', f'<g id="{name}"><title>{html_text(tip)}</title>')
    # Element names must be unique in a page, so put a digest of the figure in front of each name.
    svg = _BEFORE_ELEMENT_NAME.sub(f"x{hashlib.blake2s(svg.encode(), digest_size=4).hexdigest()}-", svg)
    for colour, variable in _THEME.items():
        svg = svg.replace(colour, variable)
    return svg

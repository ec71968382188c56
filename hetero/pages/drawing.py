"""Plots by matplotlib, as SVG for a page.

matplotlib is imported when a plot is drawn. Nothing here uses pyplot, so no state is shared with a user's own plots.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero.errors import ConfigError
from hetero.system.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "PLOTS_HINT", "Plot", "has_matplotlib", "new_figure", "svg_of"]

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a", "#808080")
"""Colours that people with colour blindness can tell apart (Okabe and Ito). They are visible on white and on black."""
PLOTS_HINT = 'The page has no plots, because matplotlib is not installed: pip install "hetero[plots]"'
_SIZE_IN = (6.4, 4.2)
_PROLOGUE = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_NOT_OF_THE_FIGURE = re.compile(r"\s*<metadata>.*?</metadata>|\s*<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
"""Metadata, and a style that would apply to the whole page. The page's own style has it for plots alone."""
_NAME = re.compile(r'(?<= id=")|(?<=url\(#)|(?<=href="#)')
_THEME = {"#000000": "var(--text)", "#ffffff": "var(--background)"}
"""Colours that follow the page's theme, light or dark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawn plot."""

    title: str
    caption: str
    svg: str
    """An ``svg`` element."""


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401  the import is the question
    except ImportError:
        return False
    return True


def new_figure(width_in: float = _SIZE_IN[0], height_in: float = _SIZE_IN[1]) -> Figure:
    """Return an empty figure.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError as error:
        raise ConfigError('plots need matplotlib; to do: pip install "hetero[plots]"') from error
    return MatplotlibFigure(figsize=(width_in, height_in), layout="constrained")


def svg_of(figure: Figure) -> str:
    """Return a figure as an ``svg`` element for a page. Equal figures are equal texts.

    A ``$`` in a text is that character, not mathematics. Control characters are escaped. Black and white become the
    text and background of the page.
    """
    import matplotlib as mpl
    from matplotlib.text import Text

    target = io.StringIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(printable(text.get_text()))
    # Texts of ticks are also made while the figure is drawn.
    with (
        mpl.rc_context({"svg.hashsalt": "hetero", "svg.fonttype": "none", "text.parse_math": False}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser's fonts draw the text
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = _NOT_OF_THE_FIGURE.sub("", _PROLOGUE.sub("", target.getvalue()))
    # Element names must be unique in a page. Different figures have different texts.
    svg = _NAME.sub(f"x{hashlib.blake2s(svg.encode(), digest_size=4).hexdigest()}-", svg)
    for colour, variable in _THEME.items():
        svg = svg.replace(colour, variable)
    return svg

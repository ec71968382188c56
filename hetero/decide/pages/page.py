"""The frame of an HTML page, its tables and its figures. A page needs no other file, no network and no script."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from hetero.decide.pages.drawing import Plot, has_matplotlib
from hetero.documents.tables import MAX_ROWS
from hetero.documents.text import counted, html_text, shortened

__all__ = ["figures_html", "html_page", "more_html", "notice_html", "plots_html", "table_html"]

logger = logging.getLogger(__name__)

_MAX_TITLE_CHARS = 80
_PLOTS_HINT = 'The page has no plots, because matplotlib is not installed: pip install "hetero[plots]"'

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy: a browser loads nothing and runs no script, whatever the page holds. matplotlib draws
matrices as images inside of the SVG."""


def html_page(title: str, parts: Sequence[str]) -> str:
    """Return an HTML page, which is valid as XML too.

    Args:
        title: Title, as plain text. A long one is cut.
        parts: HTML of the page's parts, in order. Texts in it must be escaped, see `hetero.documents.text.html_text`.
    """
    css = resources.files("hetero.decide.pages").joinpath("data", "page.css").read_text(encoding="utf-8")
    body = "\n".join(part for part in parts if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html_text(_POLICY)}"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{html_text(shortened(title, _MAX_TITLE_CHARS))}</title>\n<style>\n{css}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def figures_html(cells: Sequence[tuple[str, str, str]]) -> str:
    """Return a row of boxes with the figures that decide.

    Args:
        cells: Name, value and a small text below for each figure, as plain texts.
    """
    boxes = "".join(
        f'<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd><dd class="small">{html_text(below)}</dd></div>'
        for name, value, below in cells
    )
    return f'<dl class="figures">{boxes}</dl>'


def notice_html(text: str) -> str:
    """Return the HTML of a sentence that the reader must not miss."""
    return f'<p class="notice">{html_text(text)}</p>'


def plots_html(draws: Mapping[str, Callable[[], Plot | None]]) -> str:
    """Return the plots of a page. Without matplotlib, return the sentence that tells how to get them.

    A plot that cannot be drawn becomes a notice, because the rest of the page may show runs that cost money.

    Args:
        draws: For each plot its name and the function that draws it. The function returns None without data.
    """
    if not has_matplotlib():
        return notice_html(_PLOTS_HINT)
    drawn, notices = [], []
    for name, draw in draws.items():
        try:
            plot = draw()
        # Catch everything. matplotlib once read a metric with $ as mathematics and raised, so the page of a study was
        # never written again.
        except Exception as error:
            logger.warning("the plot of %s cannot be drawn", name, exc_info=True)
            notices.append(notice_html(shortened(f"The plot of {name} cannot be drawn: {error!r}", 300)))
        else:
            # A plot without data is left out.
            drawn += [_plot_html(plot)] if plot is not None else []
    return "".join(notices) + (f'<div class="plots">{"".join(drawn)}</div>' if drawn else "")


def _plot_html(plot: Plot) -> str:
    wide = " wide" if plot.is_wide else ""
    return (
        f'<figure class="plot{wide}"><h3>{html_text(plot.title)}</h3>{plot.svg}'
        f"<figcaption>{html_text(plot.caption)}</figcaption></figure>"
    )


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return an HTML table of texts.

    Args:
        header: Names of the columns.
        rows: Cells of each row.
        right: Columns with numbers, which are aligned to the right.
    """

    def cells(tag: str, texts: Sequence[str]) -> str:
        starts = [f'<{tag} class="number">' if at in right else f"<{tag}>" for at in range(len(texts))]
        return "".join(f"{start}{html_text(text)}</{tag}>" for start, text in zip(starts, texts, strict=True))

    lines = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="dense">\n<thead><tr>{cells("th", header)}</tr></thead>\n<tbody>\n{lines}\n'
        "</tbody>\n</table></div>"
    )


def more_html(num_rows: int, what: str, file_name: str) -> str:
    """Return how many rows a table of `MAX_ROWS` leaves out, and the file that has them. Empty if it has all."""
    left_out = num_rows - MAX_ROWS
    return f'<p class="small">{counted(left_out, what)} more in {file_name}.</p>' if left_out > 0 else ""

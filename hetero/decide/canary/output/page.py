"""Shows the result of canary training as one HTML page. It needs no other file, no network and no script."""

from __future__ import annotations

from hetero.decide.canary.model import CanaryReport, Candidate
from hetero.decide.canary.output.plots import draws_of
from hetero.decide.canary.output.text import FIGURE_HEADER, SUMMARY_HEADER, figure_rows, headline_of, summary_rows
from hetero.decide.pages.page import html_page, plots_html, table_html
from hetero.documents.text import html_text

__all__ = ["PAGE_FILE_NAME", "canary_page"]

PAGE_FILE_NAME = "canary.html"


def canary_page(report: CanaryReport) -> str:
    """Return the page. Its plots need matplotlib."""
    decision = "" if report.decision is None else f"<p><strong>{html_text(report.decision.sentence)}</strong></p>"
    parts = [
        f"<h1>Canary forecast</h1>\n<p><code>{html_text(report.command)}</code></p>\n<p>{html_text(report.how)}</p>",
        decision,
        table_html(SUMMARY_HEADER, summary_rows(report), right=range(1, len(SUMMARY_HEADER))),
        *(_candidate(candidate) for candidate in report.candidates),
        "<h2>Plots</h2>",
        plots_html(draws_of(report)),
    ]
    return html_page(f"Canary forecast of {report.command}", parts)


def _candidate(candidate: Candidate) -> str:
    """Return the section of one candidate: headline, refusals, figures, notes."""
    refusals = "".join(
        f"<li><strong>refused ({html_text(each.rule)}):</strong> {html_text(each.reason)}.</li>"
        for each in candidate.refusals
    )
    paragraphs = "".join(f"<p>{html_text(text)}</p>" for text in (candidate.more_canaries, *candidate.notes) if text)
    rows = figure_rows(candidate)
    table = table_html(FIGURE_HEADER, rows, right=(1, 3)) if rows else ""
    return (
        f"<h2>{html_text(candidate.name)}</h2>\n<p>{html_text(headline_of(candidate))}</p>\n"
        f"{f'<ul>{refusals}</ul>' if refusals else ''}\n{table}\n{paragraphs}"
    )

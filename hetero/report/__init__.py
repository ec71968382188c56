"""Reports of runs: measurements, cost, bottleneck, and comparisons of clusters.

The launcher of the first trainer host writes the report when the job ends. ``hetero report`` shows or compares reports.

model.py      observations (`RunFacts`), conclusions (`Report`), and the reader of ``report.json``
build.py      the conclusions: headline, cost, bottleneck, advice
overruns.py   bounds of a step time that other work of the machine made longer, and a sentence about them
compare.py    compares two reports: speed-up, saving, and why the runs may not be comparable
verdict.py    the verdict of a comparison in words
markdown.py   shows a report or a comparison as Markdown
samples.py    its sections about samples
plan.py       a plan (`Plan`), and the reader of ``plan.json``
commands.py   writes and shows the files
"""

from __future__ import annotations

from hetero.report.build import build_report
from hetero.report.commands import show_file, write_report
from hetero.report.compare import Comparison, compare
from hetero.report.markdown import render_comparison, render_report
from hetero.report.model import GroupFacts, RankFacts, Report, RunFacts, load_report

__all__ = [
    "Comparison",
    "GroupFacts",
    "RankFacts",
    "Report",
    "RunFacts",
    "build_report",
    "compare",
    "load_report",
    "render_comparison",
    "render_report",
    "show_file",
    "write_report",
]

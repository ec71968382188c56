"""Reports of runs: what was observed, its cost, its bottleneck, and comparisons of clusters."""

from __future__ import annotations

from hetero.report.build import build_report
from hetero.report.commands import compare_files, show_file, write_report
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
    "compare_files",
    "load_report",
    "render_comparison",
    "render_report",
    "show_file",
    "write_report",
]

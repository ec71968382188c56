"""The progress of a profile run, as the launcher logs it."""

from __future__ import annotations

import pytest

from hetero.control.status import RankReport
from hetero.launch.reporting.profiling import ProgressLines, progress_text
from hetero.metrics.profile.parts import RankPart


def report(rank: int, phase: str, num_steps: int, num_planned: int = 50) -> RankReport:
    part = RankPart(
        loader="photos",
        phase=phase,
        num_steps=num_steps,
        num_planned=num_planned,
        num_steps_total=num_steps,
        batch_samples=64,
        num_loader_processes=0,
    )
    return RankReport(rank=rank, profile_json=part.to_json())


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        ([], ""),
        ([RankReport(rank=0)], ""),
        ([report(0, "headspace", 31, 55)], "profiling: headspace, 31 of 55 steps"),
        ([report(0, "headspace", 200, 55)], "profiling: headspace, 200 steps"),
        ([report(0, "headspace", 3), report(1, "as it runs", 49)], "profiling: as it runs, 49 of 50 steps"),
        ([report(0, "as it runs", 31), report(1, "as it runs", 30)], "profiling: as it runs, 30 of 50 steps"),
        ([report(0, "done", 7, 0), report(1, "headspace", 40)], "profiling: headspace, 40 of 50 steps"),
        ([report(0, "done", 7, 0)], "profiling: done"),
        ([RankReport(rank=0, profile_json=b"{"), report(1, "warm-up", 2, 10)], "profiling: warm-up, 2 of 10 steps"),
    ],
)
def test_progress_is_that_of_the_slowest_rank(reports: list[RankReport], text: str) -> None:
    assert progress_text(reports) == text


def test_wait_for_the_first_batch_is_logged_every_ten_seconds() -> None:
    lines = ProgressLines()
    shown = [lines.due("", 100.0 + second) for second in range(31)]
    assert [(second, line) for second, line in enumerate(shown) if line] == [
        (10, "profiling: waiting for the first batch, 10 s"),
        (20, "profiling: waiting for the first batch, 20 s"),
        (30, "profiling: waiting for the first batch, 30 s"),
    ]


def test_new_phase_is_logged_at_once_and_the_same_phase_after_ten_seconds() -> None:
    lines = ProgressLines()
    assert lines.due("", 0.0) == ""
    assert lines.due("profiling: warm-up, 0 of 10 steps", 1.0) == "profiling: warm-up, 0 of 10 steps"
    assert lines.due("profiling: warm-up, 4 of 10 steps", 5.9) == ""
    assert lines.due("profiling: headspace, 1 of 50 steps", 5.9) == "profiling: headspace, 1 of 50 steps"
    assert lines.due("profiling: headspace, 7 of 50 steps", 15.9) == "profiling: headspace, 7 of 50 steps"

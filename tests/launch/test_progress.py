"""The progress of a job: measured from the reports of its ranks, in words, and as a line with a bar."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from hetero.control.status import HostStatus, RankReport
from hetero.launch.reporting.progress import Pace, Progress, StatusLine, bar_line, describe, measure
from hetero.metrics.steps import StepSummary, StepTimer


def summary(**figures: Any) -> StepSummary:
    """Return the summary of a loader in step 18 of 28, with 4 samples and 0.2 s for each of 10 measured steps."""
    known = {
        "name": "photos", "num_steps": 46, "num_steps_measured": 10, "num_samples_measured": 40,
        "compute_total_s": 1.5, "data_wait_total_s": 0.5, "num_passes": 2, "pass_steps": 28, "pass_steps_left": 10,
    }  # fmt: skip
    return dataclasses.replace(StepTimer("photos").summary(), **(known | figures))


def report(rank: int, *summaries: StepSummary, loader: str = "photos") -> RankReport:
    texts = tuple(each.to_json() for each in summaries)
    return RankReport(rank=rank, loader=loader, summaries_json=texts)


def host(*reports: RankReport) -> HostStatus:
    return HostStatus(host="algo-1", incarnation="i", version="1", script_digest="d", ranks=reports)


def measured(*statuses: HostStatus) -> Progress:
    found = measure(statuses)
    assert found is not None
    return found


KNOWN = Progress(
    loader="photos",
    step=18,
    pass_steps=28,
    pass_number=2,
    pace=Pace(samples_per_s=425.0, data_wait=0.03, left_s=4.0),
)
WORDS = "step 18 of 28 in pass 2 of photos, 0:04 left in this pass, 425 samples/s, 3 % data wait"
WARMING_UP = dataclasses.replace(KNOWN, pace=None)
ENDLESS = Progress(
    loader="photos",
    step=480,
    pass_steps=None,
    pass_number=0,
    pace=Pace(samples_per_s=3.26, data_wait=1.0, left_s=None),
)


# Measure


@pytest.mark.parametrize(
    "statuses",
    [
        [],
        [host()],
        [host(report(0))],
        [host(RankReport(rank=0, loader="photos", summaries_json=(b"{",)))],
        [host(report(0, summary(num_steps=0, num_steps_measured=0)))],
    ],
)
def test_progress_before_the_first_step_is_unknown(statuses: list[HostStatus]) -> None:
    assert measure(statuses) is None


def test_progress_of_all_hosts_adds_their_samples_and_takes_the_slowest_steps() -> None:
    slow = summary(compute_total_s=3.0, data_wait_total_s=1.0)  # 10 samples per second, a quarter of its time waits
    found = measured(host(report(0, summary())), host(report(1, slow)))
    assert found == Progress(
        loader="photos",
        step=18,
        pass_steps=28,
        pass_number=2,
        pace=Pace(samples_per_s=30.0, data_wait=0.25, left_s=pytest.approx(4.0)),
    )


def test_progress_in_the_warm_up_has_no_pace() -> None:
    warming_up = summary(num_steps_measured=0, num_samples_measured=0, compute_total_s=0.0, data_wait_total_s=0.0)
    assert measured(host(report(0, summary()), report(1, warming_up))) == WARMING_UP


@pytest.mark.parametrize("other", [host(), host(report(1))])
def test_progress_without_the_figures_of_a_rank_has_no_pace(other: HostStatus) -> None:
    assert measured(host(report(0, summary())), other) == WARMING_UP


def test_progress_after_the_last_step_of_a_pass_has_nothing_left() -> None:
    found = measured(host(report(0, summary(pass_steps_left=0))))
    assert (found.step, found.pass_steps) == (28, 28)
    assert found.pace is not None
    assert found.pace.left_s == 0.0


@pytest.mark.parametrize("pass_steps", [None, 0])
def test_progress_in_a_pass_of_unknown_length_counts_all_steps(pass_steps: int | None) -> None:
    found = measured(host(report(0, summary(pass_steps=pass_steps, pass_steps_left=0))))
    assert (found.step, found.pass_steps, found.pass_number) == (46, None, 0)
    assert found.pace is not None
    assert found.pace.left_s is None


def test_progress_is_that_of_the_loader_whose_step_began_last() -> None:
    training, validation = summary(), summary(num_steps=3, pass_steps=5, pass_steps_left=2, num_passes=1)
    ranks = [report(rank, training, validation, loader="photos#2") for rank in range(2)]
    found = measured(host(*ranks))
    assert (found.loader, found.step, found.pass_steps, found.pass_number) == ("photos#2", 3, 5, 1)


def test_progress_of_rank_0_that_validates_alone_has_its_own_pace() -> None:
    validation = summary(name="validation", num_steps=3)
    found = measured(host(report(0, summary(), validation, loader="validation"), report(1, summary())))
    assert found.pace is not None
    assert (found.loader, found.pace.samples_per_s) == ("validation", 20.0)


def test_progress_while_a_loader_waits_for_its_first_batch_is_that_of_the_longest_other_loader() -> None:
    short, new = summary(name="short", compute_total_s=0.1), summary(name="new", num_steps=0)
    assert measured(host(report(0, short, summary(), new, loader="new"))).loader == "photos"


# Words


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (KNOWN, WORDS),
        (WARMING_UP, "step 18 of 28 in pass 2 of photos"),
        (ENDLESS, "480 steps of photos, 3.3 samples/s, 100 % data wait"),
        (dataclasses.replace(ENDLESS, step=1, pace=None), "1 step of photos"),
        (
            dataclasses.replace(KNOWN, pace=Pace(samples_per_s=9.96, data_wait=0.0, left_s=3725.4)),
            "step 18 of 28 in pass 2 of photos, 1:02:05 left in this pass, 10 samples/s, 0 % data wait",
        ),
    ],
)
def test_progress_in_words_has_only_what_is_known(progress: Progress, text: str) -> None:
    assert describe(progress) == text


# Bar


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (107, f"[######----] {WORDS}"),
        (73, "[######----] step 18 of 28 in pass 2 of photos, 0:04 left in this pass, 4"),
        (13, "[######----] "),
        (0, ""),
        (-5, ""),
    ],
)
def test_bar_line_is_cut_where_the_terminal_ends(columns: int, line: str) -> None:
    assert bar_line(WORDS, columns) == line


@pytest.mark.parametrize(
    ("step", "bar"),
    [(0, "[----------]"), (14, "[#####-----]"), (27, "[#########-]"), (28, "[##########]"), (40, "[##########]")],
)
def test_bar_is_full_with_the_last_step_of_the_pass(step: int, bar: str) -> None:
    words = describe(dataclasses.replace(WARMING_UP, step=step))
    assert bar_line(words, 120) == f"{bar} {words}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "480 steps of photos, 3.3 samples/s, 100 % data wait",
        "profiling: headspace, 31 of 55 steps",
        "step 1 of 0 in pass 1 of photos",
        f"step {'1' * 50} of 28 in pass 2 of photos",
    ],
)
def test_other_text_has_no_bar(text: str) -> None:
    assert bar_line(text, 120) == text


# Status line


@pytest.fixture
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def ends() -> Iterator[tuple[int, TextIO]]:
    """Yield the two ends of a terminal of 60 columns: what it shows, and the stream that programs write to."""
    own_end, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(own_end, "rb", closefd=True), os.fdopen(its_end, "w") as stream:
        yield own_end, stream


def read_all(own_end: int) -> str:
    """Return what was written to a terminal whose other end is closed."""
    data = b""
    with contextlib.suppress(OSError):  # Linux ends a terminal's output with EIO
        while chunk := os.read(own_end, 4096):
            data += chunk
    return data.decode()


@pytest.mark.usefixtures("_terminal")
def test_status_line_draws_a_progress_with_a_bar_and_any_other_text_as_it_is(ends: tuple[int, TextIO]) -> None:
    own_end, stream = ends
    now_s = [100.0]
    line = StatusLine(stream, clock=lambda: now_s[0])
    now_s[0] = 123.0
    line.draw()
    line.show("profiling: headspace, 31 of 55 steps")
    line.show(describe(KNOWN))
    line.clear()
    stream.close()
    shown = read_all(own_end)
    assert shown.split("\r\x1b[K") == [
        "",
        "00:23 starting",
        "00:23 profiling: headspace, 31 of 55 steps",
        "00:23 [######----] step 18 of 28 in pass 2 of photos, 0:04 ",
        "",
    ]
    assert not re.search(r"\x1b\[[0-9;]*m", shown), "it has colours"


@pytest.mark.usefixtures("_terminal")
def test_status_line_elsewhere_than_on_a_terminal_draws_nothing() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as shown, os.fdopen(write_end, "w") as stream:
        line = StatusLine(stream)
        line.show(describe(KNOWN))
        line.clear()
        stream.close()
        assert shown.read() == b""
    assert not line.is_live


def test_status_line_on_a_dumb_terminal_is_not_live(ends: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not StatusLine(ends[1]).is_live


@pytest.mark.usefixtures("_terminal")
def test_status_line_on_a_terminal_that_has_gone_draws_no_more() -> None:
    own_end, its_end = pty.openpty()
    with contextlib.suppress(OSError), os.fdopen(its_end, "w") as stream:  # it cannot write at its end either
        line = StatusLine(stream)
        assert line.is_live
        os.close(own_end)
        line.show("serving")
        assert not line.is_live
        line.show("nobody sees this")

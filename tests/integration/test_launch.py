"""Launchers on a cluster described by a file: late, missing, refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import WITHOUT_TORCH, StartLauncher, failure


def check_rhythm(lines: list[tuple[float, str]], measured: Any) -> None:
    """Expect a line every ten seconds, at this time scale every two: no flood, and none that is all."""
    gaps_s = [later_s - earlier_s for (earlier_s, _), (later_s, _) in itertools.pairwise(lines)]
    measured("waiting_line_interval_s", max(gaps_s))
    assert min(gaps_s) > 0.5
    assert max(gaps_s) < 10.0


@pytest.mark.fault("F13")
def test_data_host_comes_late_and_the_trainer_says_whom_it_waits_for(
    start_launcher: StartLauncher, measured: Any
) -> None:
    trainer = start_launcher("algo-2", "--start-timeout", "120", script=WITHOUT_TORCH)
    lines = trainer.wait_lines("waiting for algo-1 (", 3)
    assert "refused" in lines[-1][1].lower()
    check_rhythm(lines, measured)
    data = start_launcher("algo-1", "--start-timeout", "120", script=WITHOUT_TORCH)
    assert trainer.wait() == 0, trainer.output
    assert data.wait() == 0, data.output


@pytest.mark.fault("F13")
def test_trainer_host_comes_late_and_the_data_host_serves_it(start_launcher: StartLauncher) -> None:
    data = start_launcher("algo-1", "--start-timeout", "120", script=WITHOUT_TORCH)
    data.wait_line("serving with 1 endpoint")
    trainer = start_launcher("algo-2", "--start-timeout", "120", script=WITHOUT_TORCH)
    assert trainer.wait() == 0, trainer.output
    assert data.wait() == 0, data.output


@pytest.mark.fault("F13")
def test_data_host_never_comes_fails_naming_it(start_launcher: StartLauncher) -> None:
    trainer = start_launcher("algo-2", "--start-timeout", "3", script=WITHOUT_TORCH)
    assert trainer.wait() == 20, trainer.output
    assert "algo-1" in failure(trainer).splitlines()[0]
    assert "refused" in failure(trainer).splitlines()[0].lower()  # the last error


@pytest.mark.fault("F14")
def test_trainer_host_never_comes_lets_the_data_host_leave(start_launcher: StartLauncher, measured: Any) -> None:
    # Its endpoints must be there by then.
    data = start_launcher("algo-1", "--start-timeout", "18", script=WITHOUT_TORCH)
    check_rhythm(data.wait_lines("waiting for algo-2 (", 2), measured)
    assert data.wait() == 21, data.output
    assert "algo-2" in failure(data).splitlines()[0]


def test_trainer_host_stopped_while_it_waits_starts_no_ranks(start_launcher: StartLauncher) -> None:
    trainer = start_launcher("algo-2", "--start-timeout", "120")
    trainer.wait_line("waiting for")
    trainer.process.terminate()
    assert trainer.wait(300.0) == 143, trainer.output
    assert "ranks" not in trainer.output.partition("asked to stop")[0]


def test_host_that_is_not_in_the_cluster_leaves_a_failure_file(start_launcher: StartLauncher, tmp_path: Path) -> None:
    (tmp_path / "algo-3" / "ml").mkdir(parents=True)
    job = start_launcher("algo-3")
    assert job.wait() == 10, job.output
    assert failure(job).startswith("HET-10 ")


@pytest.mark.fault("F4")
def test_data_host_lost_for_good_fails_the_trainer_after_the_data_timeout(start_launcher: StartLauncher) -> None:
    args = ["--num-samples", "100000", "--step-s", "0.02"]
    trainer = start_launcher("algo-2", "--data-timeout", "3", args=args)
    data = start_launcher("algo-1", "--data-timeout", "3", args=args)
    trainer.wait_line("step 5")
    data.process.kill()
    assert trainer.wait() == 31, trainer.output
    assert "algo-1" in failure(trainer)

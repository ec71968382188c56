"""The command line of ``hetero canary``."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from hetero.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["canary", *words])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "no cluster is given"),
        (["--group", "t=x:1", "train.py"], "one way to reduce the data is needed"),
        (["--group", "t=x", "--samples", "train.py"], "expected NAME=TYPE:COUNT"),
        (["--group", "t=x:1", "--candidate", "t=y:1", "--samples", "train.py"], "one --candidate for each cluster"),
        (["--fractions", "1%", "2%", "train.py", "--", "--rows", "{samples}"], "no cluster is given"),
        (["--channel", "../x=data", "--group", "t=x:1", "train.py"], "'../x': expected a name of 1 to 64 letters"),
        (["--budget-hours", "0", "--group", "t=x:1", "--samples", "train.py"], "--budget-hours '0': expected a number"),
        (["--budget-hours", "inf", "--group", "t=x:1", "--samples", "train.py"], "--budget-hours 'inf'"),
        (["--budget-hours", "nan", "--group", "t=x:1", "--samples", "train.py"], "--budget-hours 'nan'"),
        (["--memory", "y=1", "--group", "t=x:1", "--samples", "train.py"], "--memory y: no candidate has such hosts"),
        (["--fractions", "2", "--group", "t=x:1", "--samples", "train.py"], "'2': expected a number with a percent"),
        (["--accept", "all", "--group", "t=x:1", "--samples", "train.py"], "expected one of failed, too-few"),
        (["--memory", "x=much", "--group", "t=x:1", "--samples", "train.py"], "expected TYPE=GIB with a number"),
        (["--repeats", "0", "--group", "t=x:1", "--samples", "train.py"], "--repeats '0'"),
        (["--part-seed", "-1", "--group", "t=x:1", "--samples", "train.py"], "--part-seed '-1'"),
        (["--samples"], "no training script is given"),
    ],
)
def test_command_line_that_cannot_work_says_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    code, text = run(capsys, *words)
    assert code == 2
    assert message in text
    assert not (tmp_path / "canaries").exists()


def test_fractions_before_the_script_are_not_taken_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    code, text = run(capsys, "--group", "t=ml.m5.large:1", "--fractions", "1%", "2%", "70%", "train.py", "--", "3%")
    assert code == 2
    assert "--fractions are 1 %, 2 %, 70 %" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_study_with_its_code_and_a_sentence(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import hetero\n")
    was_stopped = threading.Event()

    def interrupted(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:  # `run_canaries` writes the forecast
            was_stopped.set()
            raise

    monkeypatch.setattr("hetero.decide.canary.conducting.run_canaries", interrupted)
    before = signal.getsignal(number)
    command = ["canary", "--group", "t=ml.m5.large:1", "--samples", "--output-dir", str(tmp_path / "out"), str(script)]
    assert main(command) == 128 + number
    assert was_stopped.is_set()
    assert f"hetero: ended by {number.name}; the same command continues it" in capsys.readouterr().err
    assert signal.getsignal(number) is before

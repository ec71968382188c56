from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.config import LaunchOptions
from hetero.documents.files import write_text
from hetero.errors import ExitCode
from hetero.metrics.profile.profile import write_profile
from tests.support.planning import make_profile


@pytest.fixture
def profile(tmp_path: Path) -> str:
    write_profile(make_profile(headspace_s=0.18, cpu_s=0.15), tmp_path / "profile.json")
    return str(tmp_path)


def test_plan_command_prints_the_answer(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", profile, "--price-profile", "seed-2022"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("Add 1 x ml.c5.9xlarge as data hosts: ")


def test_plan_command_prints_json(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--price-profile", "seed-2022", "--menu", "ml.c5.18xlarge", "--vcpu-speed", "ml.c5.18xlarge=1.5"]
    assert main(["plan", profile, *arguments, "--json"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"]["groups"][0] == {
        "name": "data",
        "role": "data",
        "instance_type": "ml.c5.18xlarge",
        "count": 1,
        "is_spot": False,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "ml.p3.2xlarge"], "--baseline 'ml.p3.2xlarge': expected TYPE:COUNT"),
        (["--baseline", "ml.p3.2xlarge:0"], "--baseline 'ml.p3.2xlarge:0': expected TYPE:COUNT"),
        (["--spot", "ml.c5.9xlarge"], "--spot 'ml.c5.9xlarge': expected TYPE=USD with a number above 0"),
        (["--vcpu-speed", "ml.c5.9xlarge=fast"], "--vcpu-speed 'fast': expected TYPE=RATIO"),
        (["--max-hours", "2"], "also give the number of steps of the whole job (--steps N)"),
        (["--menu", "ml.c5.9xlarg"], "did you mean ml.c5.9xlarge"),
        (
            ["--menu", "ml.m5.4xlarge"],
            "error HET-02: no price for ml.m5.4xlarge; pass --price ml.m5.4xlarge=USD, or leave",
        ),
        (["--vcpu-speed", "ml.c5.9xlrge=1"], "did you mean ml.c5.9xlarge"),
        (["--vcpu-speed", "ml.c5.9xlarge=1e-300"], "expected TYPE=RATIO with a number above 0.001 and at most 100"),
        (["--vcpu-speed", "ml.p3.2xlarge=2"], "the profile measured samples on ml.p3.2xlarge, so its speed is 1"),
        (["--html", ""], "not a regular file; give another file to --html"),
        (["--html", "."], "not a regular file; give another file to --html"),
    ],
)
def test_plan_command_with_a_wrong_option_says_what_is_expected(
    profile: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", profile, "--price-profile", "seed-2022", *arguments]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_plan_command_without_prices_says_how_to_give_them(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", profile]) == ExitCode.USAGE
    assert "pass --price ml.p3.2xlarge=USD" in capsys.readouterr().err


def test_plan_command_does_not_replace_a_pipe(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "page.html")
    arguments = ["--price-profile", "seed-2022", "--html", str(tmp_path / "page.html")]
    assert main(["plan", profile, *arguments]) == ExitCode.USAGE
    assert "not a regular file" in capsys.readouterr().err
    assert (tmp_path / "page.html").is_fifo()


def test_plan_command_with_a_cost_limit_needs_the_trainers_price(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--price", "ml.c5.9xlarge=2", "--goal", "time", "--max-usd-per-1k-steps", "1"]
    assert main(["plan", profile, *arguments]) == ExitCode.USAGE
    assert "because the price of the trainer hosts is not known" in capsys.readouterr().err


def test_profile_command_with_a_file_as_output_folder_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "out").touch()
    arguments = ["--output-dir", str(tmp_path / "out"), str(tmp_path / "train.py")]
    assert main(["profile", *arguments]) == ExitCode.USAGE
    assert "File exists; give another folder to --output-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks is 0; expected a number above 0"),
        (["--endpoints-per-host", "-1"], "--endpoints-per-host is -1; expected a number above 0"),
        (["--max-usd-per-1k-steps", "nan"], "--max-usd-per-1k-steps is nan; expected a number above 0"),
        (["--max-hours", "2"], "--max-hours is given without --steps; also give"),
        (["--max-hours", "0", "--steps", "10"], "--max-hours is 0.0; expected a number above 0"),
        (["--steps", "1000"], "--steps is given without --max-hours, so nothing uses it"),
        (
            ["--spot", "ml.c5.9xlarge=0.5", "--spot", "ml.c5.9xlarge=0.9"],
            "--spot 'ml.c5.9xlarge=0.9': ml.c5.9xlarge was given before; expected each name once",
        ),
        (
            ["--menu", "ml.c5.9xlarge", "--vcpu-speed", "ml.c5.18xlarge=2"],
            "ml.c5.18xlarge is not one of the types that the plan chooses from\n  to do: leave it out, or add --menu",
        ),
        (["--vcpu-speed", "ml.m5.4xlarge=2"], "leave it out, or give its price with --price ml.m5.4xlarge=USD"),
    ],
)
def test_option_that_is_wrong_or_has_no_effect_is_named_as_on_the_command_line(
    profile: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", profile, "--price-profile", "seed-2022", *arguments]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("is_link", [False, True])
def test_page_does_not_replace_the_profile(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_link: bool
) -> None:
    page = tmp_path / ("page.html" if is_link else "profile.json")
    if is_link:
        page.symlink_to(tmp_path / "profile.json")
    arguments = ["--price-profile", "seed-2022", "--html", str(page)]
    assert main(["plan", profile, *arguments]) == ExitCode.USAGE
    assert "is a file that the command reads; give another file to --html" in capsys.readouterr().err
    assert json.loads((tmp_path / "profile.json").read_text())["command"] == "train.py"


def test_speed_of_a_bigger_machine_for_the_ranks_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_profile(headspace_s=0.1, cpu_s=0.025, vcpus=4, processes=4, trainer="ml.g5.xlarge")
    write_profile(job, tmp_path / "profile.json")
    prices = [f"--price={price}" for price in ("ml.g5.xlarge=1.4", "ml.g5.4xlarge=2.0", "ml.c5.9xlarge=1.8")]
    assert main(["plan", str(tmp_path), *prices, "--vcpu-speed", "ml.g5.4xlarge=1.1"]) == ExitCode.OK
    assert main(["plan", str(tmp_path), *prices, "--vcpu-speed", "ml.g5.12xlarge=1.1"]) == ExitCode.USAGE
    assert "ml.g5.12xlarge is not one of the types that the plan chooses from" in capsys.readouterr().err


@pytest.mark.parametrize("writes", [False, True])
def test_profile_run_without_a_profile_keeps_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], writes: bool
) -> None:
    (tmp_path / "train.py").touch()
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("profile.json", "profile.md"):
        (folder / name).write_text("earlier")

    def run(options: LaunchOptions, *_: object, **__: object) -> int:
        assert options.output_dir == folder
        if writes:
            write_text(folder / "profile.md", "measured")
        return 0 if writes else 30

    monkeypatch.setattr("hetero.launch.launcher.launch", run)
    code = main(["profile", "--output-dir", str(folder), str(tmp_path / "train.py")])
    shown = capsys.readouterr().out
    assert (folder / "profile.json").read_text() == "earlier"
    if writes:
        assert (code, shown.startswith("measured\nWritten to ")) == (0, True)
    else:
        assert (code, "This run wrote no profile." in shown, "earlier\n" in shown) == (30, True, False)


def test_profile_command_with_an_unknown_type_ends_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("hetero.launch.launcher.launch", lambda *_, **__: pytest.fail("the run started"))
    arguments = ["--output-dir", str(tmp_path / "out"), "--instance-type", "ml.g5.2xlrge", str(tmp_path / "train.py")]
    assert main(["profile", *arguments]) == ExitCode.USAGE
    assert "'ml.g5.2xlrge' is not in the catalogue (did you mean ml.g5.2xlarge" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("num_cpus", "is_warned"), [(8, False), (2, True)])
def test_profile_command_on_a_host_with_other_cpus_than_the_type_warns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_cpus: int,
    is_warned: bool,
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("hetero.launch.launcher.launch", lambda *_, **__: 0)
    monkeypatch.setattr("hetero.system.cgroups.usable_cpus", lambda: num_cpus)
    arguments = ["--output-dir", str(tmp_path / "out"), "--instance-type", "ml.g5.2xlarge", str(tmp_path / "train.py")]
    assert main(["profile", *arguments]) == ExitCode.OK
    words = "ml.g5.2xlarge has 8 vCPUs, but this host has 2 usable CPUs"
    assert any(words in message for message in caplog.messages) == is_warned

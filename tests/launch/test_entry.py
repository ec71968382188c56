"""The entry point for training platforms: hyperparameters in, the command of this host out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero import cli, config
from hetero.cluster import find_platform
from hetero.launch.entry import command, run

LAUNCHER = Path(__file__).parents[2] / "launchers" / "launcher.py"


def write_hyperparameters(base: Path, **parameters: str) -> dict[str, str]:
    """Write the platform's file and return the environment that names it."""
    path = base / "input" / "config" / "hyperparameters.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(parameters))
    return {"SAGEMAKER_BASE_DIR": str(base)}


def test_command_hands_hyperparameters_to_the_script_unquoted(tmp_path: Path) -> None:
    environ = write_hyperparameters(
        tmp_path, hetero_script='"train.py"', sagemaker_program='"launcher.py"', epochs="3", name='"two words"'
    )
    expected = ["launch", "--", "--epochs", "3", "--name", "two words"]
    assert command(["--epochs", "3", "--name", "two", "words"], find_platform(environ)) == expected


HYPERPARAMETERS = {
    "a": 1,
    "amp": True,
    "betas": [0.9, 0.999],
    "data": {"b": 2, "a": "x"},
    "lr": 1e-5,
    "name": 'say "hi"; $HOME',
    "nothing": None,
}


def test_command_says_what_the_real_toolkit_would_say(tmp_path: Path) -> None:
    mapping = pytest.importorskip("sagemaker_training.mapping", exc_type=ImportError)
    encoded = {name: json.dumps(value) for name, value in reversed(HYPERPARAMETERS.items())}
    environ = write_hyperparameters(
        tmp_path, hetero_script='"train.py"', sagemaker_region='"us-east-1"', default_user_module_name='"x"', **encoded
    )
    assert command([], find_platform(environ))[2:] == mapping.to_cmd_args(HYPERPARAMETERS)


def test_command_says_what_the_drivers_of_version_3_would_say(tmp_path: Path) -> None:
    # Values are as that SDK writes them: texts without quotes, everything else as JSON.
    encoded = {name: value if isinstance(value, str) else json.dumps(value) for name, value in HYPERPARAMETERS.items()}
    environ = write_hyperparameters(tmp_path, hetero_script="train.py", **encoded)
    found = command([], find_platform(environ))
    assert found[:2] == ["launch", "--"]
    assert dict(zip(found[2::2], found[3::2], strict=True)) == {
        "--a": "1",
        "--amp": "true",
        "--betas": "[0.9, 0.999]",
        "--data": '{"b": 2, "a": "x"}',
        "--lr": "1e-05",
        "--name": 'say "hi"; $HOME',
        "--nothing": "null",
    }


@pytest.mark.parametrize("quote", ['"', ""])
def test_command_of_a_platform_resolves_script_and_options(tmp_path: Path, quote: str) -> None:
    environ = write_hyperparameters(
        tmp_path,
        hetero_script=f"{quote}train.py{quote}",
        hetero_trainer_endpoints="2",
        hetero_roles=f"{quote}blue=data{quote}",
        epochs="3",
    )
    ours, script_args = config.split_at_script(cli._make_parser(), command([], find_platform(environ)))
    namespace = config.parse(cli._make_parser(), ours)
    namespace.script_args = script_args
    options = config.resolve_options(namespace, environ, find_platform(environ).parameters())
    assert (options.script, options.script_args) == ("train.py", ("--epochs", "3"))
    assert (options.trainer_endpoints, options.roles) == (2, ("blue=data",))


@pytest.mark.parametrize("has_file", [False, True])
def test_command_without_a_script_parameter_takes_the_arguments(tmp_path: Path, has_file: bool) -> None:
    environ = write_hyperparameters(tmp_path, epochs="3") if has_file else {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert command(["train.py", "--", "--lr", "1"], find_platform(environ)) == ["launch", "train.py", "--", "--lr", "1"]


def test_command_of_a_container_is_told_the_script_by_the_environment(tmp_path: Path) -> None:
    environ = {**write_hyperparameters(tmp_path, epochs="3"), "HETERO_SCRIPT": "train.py"}
    assert command(["train"], find_platform(environ)) == ["launch", "--", "--epochs", "3"]


@pytest.mark.parametrize("arguments", [["train"], ["--epochs", "3"], ["--epochs=3"]])
def test_platform_that_names_no_script_is_told_which_hyperparameter_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    for name, value in write_hyperparameters(tmp_path, epochs="3").items():
        monkeypatch.setenv(name, value)
    assert run(cli.main, arguments, folder=tmp_path) == 2
    assert "hyperparameter hetero_script" in capsys.readouterr().err
    assert "hyperparameter hetero_script" in (tmp_path / "output" / "failure").read_text()


def test_damaged_hyperparameters_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in write_hyperparameters(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "input" / "config" / "hyperparameters.json").write_text("{")
    assert run(cli.main, ["--epochs", "3"], folder=tmp_path) == 2
    assert "hyperparameters.json is not JSON" in capsys.readouterr().err


def test_arguments_that_cannot_be_read_leave_a_failure_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    assert run(cli.main, ["--what", "train.py"], folder=tmp_path) == 2
    assert "--what train.py" in (tmp_path / "output" / "failure").read_text()


@pytest.mark.parametrize("is_here", [False, True])
@pytest.mark.parametrize(
    ("parameters", "file"),
    [
        ({"hetero_script": '"train.py"'}, "train.py"),
        ({"hetero_script": '"package.train"', "hetero_module": "true"}, "package/train.py"),
        ({"hetero_script": "package", "hetero_module": "True"}, "package/__main__.py"),
    ],
)
def test_script_beside_the_entry_point_is_found_unless_there_is_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool, parameters: dict[str, str], file: str
) -> None:
    code, here = tmp_path / "code", tmp_path / "here"
    for folder in (code, here):
        (folder / file).parent.mkdir(parents=True)
    (code / file).touch()
    (here / file).touch() if is_here else None
    monkeypatch.chdir(here)
    for name, value in write_hyperparameters(tmp_path / "ml", **parameters).items():
        monkeypatch.setenv(name, value)
    found: list[tuple[Sequence[str], Path]] = []

    def main(arguments: Sequence[str]) -> int:
        found.append((arguments, Path.cwd()))
        return 0

    assert run(main, ["train"], folder=code) == 0
    assert found == [(["launch", "--"], here if is_here else code)]


def test_launcher_says_in_the_failure_file_that_hetero_is_missing(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    shutil.copy(LAUNCHER, tmp_path)  # beside the user's script, as a platform has it
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / "launcher.py")],
        env={"SAGEMAKER_BASE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1
    assert "the image has no module hetero" in (tmp_path / "output" / "failure").read_text()


def test_launcher_in_another_folder_is_hetero_launch(tmp_path: Path) -> None:
    shutil.copy(LAUNCHER, tmp_path)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "launcher.py"), "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SAGEMAKER_BASE_DIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: hetero launch" in done.stdout

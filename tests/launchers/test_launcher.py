"""The entry point for training platforms: hyperparameters in, the command of this host out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from hetero import cli, config

LAUNCHER = Path(__file__).parents[2] / "launchers" / "launcher.py"


@pytest.fixture
def launcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launcher", LAUNCHER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_hyperparameters(base: Path, **parameters: str) -> dict[str, str]:
    """Write the platform's file; return the environment that leads to it."""
    path = base / "input" / "config" / "hyperparameters.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(parameters))
    return {"SAGEMAKER_BASE_DIR": str(base)}


def test_command_hands_hyperparameters_to_the_script_unquoted(launcher: ModuleType, tmp_path: Path) -> None:
    environ = write_hyperparameters(
        tmp_path, hetero_script='"train.py"', sagemaker_program='"launcher.py"', epochs="3", name='"two words"'
    )
    expected = ["launch", "--", "--epochs", "3", "--name", "two words"]
    assert launcher.command(["--epochs", "3", "--name", "two", "words"], environ) == expected


def test_command_of_a_platform_resolves_script_and_options(launcher: ModuleType, tmp_path: Path) -> None:
    environ = write_hyperparameters(
        tmp_path, hetero_script='"train.py"', hetero_trainer_endpoints="2", hetero_roles='"blue=data"', epochs="3"
    )
    ours, script_args = cli._split(launcher.command([], environ))
    namespace = config.parse(cli._make_parser(), ours)
    namespace.script_args = script_args
    options = config.resolve_options(namespace, environ, tmp_path)
    assert (options.script, options.script_args) == ("train.py", ("--epochs", "3"))
    assert (options.trainer_endpoints, options.roles) == (2, ("blue=data",))


@pytest.mark.parametrize("has_file", [False, True])
def test_command_without_a_script_parameter_takes_the_arguments(
    launcher: ModuleType, tmp_path: Path, has_file: bool
) -> None:
    environ = write_hyperparameters(tmp_path, epochs="3") if has_file else {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert launcher.command(["train.py", "--", "--lr", "1"], environ) == ["launch", "train.py", "--", "--lr", "1"]

"""What a simulation refuses before it starts anything, and what becomes of its folder."""

from __future__ import annotations

import errno
import logging
import sys
from pathlib import Path

import pytest

from hetero import cli
from hetero.cluster import parse_cluster
from hetero.config import LaunchOptions
from hetero.errors import ConfigError, ExitCode
from hetero.simulate.launchers import HostCommand, SimulatedHost
from hetero.simulate.opt_ml import write_opt_ml
from hetero.simulate.simulate import emulated_vcpus, locked_folder, parse_group, run_hosts


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import hetero\n")
    return str(path)


def simulate(tmp_path: Path, *arguments: str) -> int:
    """Run the command in this process."""
    return cli.main(["simulate", "--output-dir", str(tmp_path / "run"), *arguments])


def test_group_is_read() -> None:
    group = parse_group("a=b=ml.c5.9xlarge:2")
    assert (group.name, group.instance_type, group.count) == ("a", "b=ml.c5.9xlarge", 2)


@pytest.mark.parametrize("text", ["", "data", "data=ml.c5.9xlarge", "data=:2", "=ml.c5.9xlarge:1", "data=ml.c5:x"])
def test_group_of_another_form_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=TYPE:COUNT"):
        parse_group(text)


@pytest.mark.parametrize("count", ["0", "251"])
def test_group_count_out_of_range_names_the_bound(count: str) -> None:
    with pytest.raises(ConfigError, match="1 to 250"):
        parse_group(f"data=ml.c5.9xlarge:{count}")


def test_script_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, "--group", "dnn=ml.p3.2xlarge:1", "missing.py") == ExitCode.USAGE
    assert "missing.py" in capsys.readouterr().err


def test_no_group_shows_an_example(tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, script) == ExitCode.USAGE
    assert "--group dnn_group=" in capsys.readouterr().err


def test_group_after_the_script_is_said_to_be_the_scripts(
    tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path, script, "--group=dnn=ml.p3.2xlarge:1") == ExitCode.USAGE
    assert f"the --group after {script} is an argument of the script" in capsys.readouterr().err


def test_ambiguous_role_shows_the_flag(tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["--group", "blue=ml.c5.xlarge:1", "--group", "green=ml.m5.xlarge:1"]
    assert simulate(tmp_path, *groups, script) == ExitCode.CLUSTER
    assert "--role 'blue=data'" in capsys.readouterr().err


def test_unknown_role_is_refused(tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, "--group", "dnn=ml.p3.2xlarge:1", "--role", "dnn=boss", script) == ExitCode.USAGE
    assert "boss" in capsys.readouterr().err


def test_two_groups_of_one_name_are_refused(tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["--group", "dnn=ml.p3.2xlarge:1", "--group", "dnn=ml.c5.xlarge:1"]
    assert simulate(tmp_path, *groups, script) == ExitCode.USAGE
    assert "two groups have the same name: dnn, dnn" in capsys.readouterr().err


def test_unknown_type_with_emulation_asks_for_its_vcpus(
    tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--group", "dnn=ml.p99.huge:1", "--role", "dnn=trainer", "--emulate-sample-seconds", "0.1"]
    assert simulate(tmp_path, *flags, script) == ExitCode.CLUSTER
    error = capsys.readouterr().err
    assert "--vcpus ml.p99.huge=N" in error
    assert "did you mean" not in error


def test_mistyped_type_with_emulation_is_an_error_with_the_type_that_is_meant(
    tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--group", "data=ml.c5.9xlarg:1", "--group", "dnn=ml.p3.2xlarge:1", "--emulate-sample-seconds", "0.1"]
    assert simulate(tmp_path, *flags, script) == ExitCode.CLUSTER
    error = capsys.readouterr().err
    assert "group data: the vCPUs of instance type 'ml.c5.9xlarg' are not known (did you mean ml.c5.9xlarge" in error
    assert "--vcpus ml.c5.9xlarg=N, and --price ml.c5.9xlarg=USD" in error


def test_vcpus_of_a_type_that_no_group_has_are_refused(
    tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--group", "dnn=ml.p3.2xlarge:1", "--vcpus", "ml.p3.2xlarg=8"]
    assert simulate(tmp_path, *flags, script) == ExitCode.USAGE
    assert "--vcpus ml.p3.2xlarg=8: no group has that type; expected one of ml.p3.2xlarge" in capsys.readouterr().err


def test_type_with_a_price_of_the_users_is_not_said_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    group = parse_group("dnn=ml.p99.huge:1")
    assert emulated_vcpus(LaunchOptions(script="x", prices=("ml.p99.huge=1.5",)), group, {}) is None
    assert caplog.messages == []
    assert emulated_vcpus(LaunchOptions(script="x"), group, {}) is None
    assert "no price for ml.p99.huge" in caplog.messages[0]


def test_unknown_flag_suggests_the_right_one(tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, "--endpoints-per-hots", "2", script) == ExitCode.USAGE
    assert "--endpoints-per-host" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--cluster-file", "--host"])
def test_flag_of_a_cluster_that_exists_is_rejected_with_the_reason(
    tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert simulate(tmp_path, "--group", "dnn=ml.p3.2xlarge:1", flag, "x", script) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"{flag} describes a cluster that exists, but this command makes its own" in error
    assert "give --group" in error


def test_help_lists_no_flag_of_a_cluster_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    listed = capsys.readouterr().out
    assert "--group" in listed
    assert "--cluster-file" not in listed
    assert "--host" not in listed


def test_channel_without_folder_is_named(tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--group", "dnn=ml.p3.2xlarge:1", "--channel", "training=/no/such/folder"]
    assert simulate(tmp_path, *flags, script) == ExitCode.USAGE
    assert "/no/such/folder" in capsys.readouterr().err


def test_folder_of_a_run_is_locked_where_the_file_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    with locked_folder(tmp_path):
        with pytest.raises(ConfigError, match="another simulation writes to "), locked_folder(tmp_path):
            pass
        monkeypatch.setattr("fcntl.flock", refuse)
        with locked_folder(tmp_path):
            pass


def test_hosts_of_an_earlier_run_are_replaced_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hetero")
    cluster = parse_cluster({"current_host": "algo-1", "hosts": ["algo-1"]}, source="test")
    program = [sys.executable, "-c", "open('ran', 'x').close()"]
    for num_earlier in range(2):
        run_hosts(
            cluster,
            lambda host: HostCommand(arguments=program, environment={}, directory=host.root),
            output_dir=tmp_path,
            port=7350,
        )
        assert (tmp_path / "hosts" / "algo-1" / "ran").is_file()
        assert caplog.text.count("of an earlier run") == num_earlier


def test_hosts_that_only_an_earlier_run_had_are_removed(tmp_path: Path) -> None:
    def run(*names: str) -> None:
        def set_up(host: SimulatedHost) -> HostCommand:
            write_opt_ml(host.base_dir, resource_config={}, hyperparameters={}, channels=[])
            return HostCommand(arguments=["true"], environment={})

        cluster = parse_cluster({"current_host": "algo-1", "hosts": list(names)}, source="test")
        assert run_hosts(cluster, set_up, output_dir=tmp_path, port=7350) == 0

    elsewhere = tmp_path / "elsewhere"
    write_opt_ml(elsewhere / "ml", resource_config={}, hyperparameters={}, channels=[])
    run("algo-1", "algo-2", "algo-3")
    (tmp_path / "hosts" / "notes").mkdir()
    (tmp_path / "hosts" / "linked").symlink_to(elsewhere)
    run("algo-1", "algo-2")
    assert sorted(path.name for path in (tmp_path / "hosts").iterdir()) == ["algo-1", "algo-2", "linked", "notes"]
    assert (elsewhere / "ml").is_dir()

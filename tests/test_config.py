from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import config
from hetero.cluster import find_platform
from hetero.config import LaunchOptions, ReportOptions, Timings, resolve_options, to_flags
from hetero.errors import ConfigError

NOWHERE = Path("/nonexistent")
Resolve = Callable[..., LaunchOptions]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    config.add_launch_arguments(commands.add_parser("launch", allow_abbrev=False))
    config.add_price_arguments(commands.add_parser("prices", allow_abbrev=False))
    return parser


def resolve(
    *flags: str, env: dict[str, str] | None = None, base: Path = NOWHERE, script: str = "train.py"
) -> LaunchOptions:
    arguments = ["launch", *flags, *([script] if script else [])]
    platform = find_platform({**(env or {}), "SAGEMAKER_BASE_DIR": str(base)})
    return resolve_options(config.parse(make_parser(), arguments), env or {}, platform.parameters())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "input/config").mkdir(parents=True)
    return tmp_path


def hyperparameters(base: Path, content: object) -> None:
    path = base / "input/config/hyperparameters.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_options_without_any_source_are_the_defaults() -> None:
    assert resolve() == LaunchOptions(script="train.py")


def test_flags_are_spelled_as_documented() -> None:
    options = resolve(
        *("--role", "a=data", "--role", "b=trainer", "--nproc-per-node", "2", "--endpoints-per-host", "3"),
        *("--trainer-endpoints", "1", "--output-dir", "out", "--port", "1", "--data-timeout", "5"),
        *("--emulate-sample-seconds", "0.5", "--emulate-step-seconds", "0", "--require-token", "--price", "x=1.5"),
        *("--framework", "tensorflow", "-m"),
    )
    assert options == LaunchOptions(
        script="train.py",
        roles=("a=data", "b=trainer"),
        nproc_per_node=2,
        endpoints_per_host=3,
        trainer_endpoints=1,
        output_dir=Path("out"),
        port=1,
        data_timeout_s=5.0,
        emulate_sample_s=0.5,
        emulate_step_s=0.0,
        require_token=True,
        prices=("x=1.5",),
        framework="tensorflow",
        module=True,
    )


def test_later_sources_beat_earlier_ones(base: Path) -> None:
    path = base / "options.yaml"
    path.write_text("port: 1\nwarmup-steps: 1\npurity_checks: 1\nregion: file\nhost: null\n", encoding="utf-8")
    env = {"HETERO_WARMUP_STEPS": "2", "HETERO_PURITY_CHECKS": "2", "HETERO_REGION": "env", "HETERO_HOST": ""}
    hyperparameters(base, {"hetero_purity_checks": "3", "hetero_region": '"hyper"', "epochs": "9"})
    options = resolve("--config", str(path), "--region", "flag", env=env, base=base)
    found = (options.port, options.warmup_steps, options.purity_checks, options.region, options.trainer_endpoints)
    assert found == (1, 2, 3, "flag", "auto")
    assert options.host is None


def test_script_and_its_arguments_come_from_any_source(base: Path) -> None:
    hyperparameters(base, {"hetero_script": "train.py"})
    options = resolve(env={"HETERO_SCRIPT_ARGS": "--name 'a b'"}, base=base, script="")
    assert options.script_args == ("--name", "a b")
    namespace = config.parse(make_parser(), ["launch", "other.py"])
    namespace.script_args = ["--lr", "0.1"]
    found = resolve_options(namespace, {}, find_platform({"SAGEMAKER_BASE_DIR": str(base)}).parameters())
    assert found == LaunchOptions(script="other.py", script_args=("--lr", "0.1"))


def test_missing_script_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no training script is given"):
        resolve(script="")


@pytest.mark.parametrize(
    ("text", "expected"), [("a=data,b=data", ("a=data", "b=data")), ('["a,b=data"]', ("a,b=data",)), ("", ())]
)
def test_lists_in_texts_are_json_or_separated_by_commas(text: str, expected: tuple[str, ...]) -> None:
    assert resolve(env={"HETERO_ROLES": text}).roles == expected


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("0", False), ("Yes", True), ("off", False)])
def test_booleans_in_texts_are_read_as_words(text: str, expected: bool) -> None:
    assert resolve(env={"HETERO_REQUIRE_TOKEN": text}).require_token is expected
    assert resolve("--no-require-token", env={"HETERO_REQUIRE_TOKEN": text}).require_token is False


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("port", 0, "a whole number, 1 or more and at most 65535"),
        ("port", 65536, "at most 65535"),
        ("port", "17170", "a whole number"),
        ("port", True, "a whole number"),
        ("nproc_per_node", 0, "1 or more"),
        ("trainer_endpoints", -1, "0 or more"),
        ("trainer_endpoints", "many", "a whole number, 0 or more and at most 1024, or auto"),
        ("data_timeout_s", 0, "greater than 0"),
        ("data_timeout_s", float("nan"), "a number"),
        ("data_timeout_s", None, "a number"),
        ("emulate_sample_s", 0.0, "greater than 0"),
        ("roles", ["a=data"], "a list of strings"),
        ("require_token", 1, "true or false"),
        ("log_level", "loud", "one of debug, info, warning, error"),
        ("data_service", "ray", "one of grpc, tf"),
        ("tf_workers_per_host", 2, "data_service 'tf'"),
        ("trainer_tf_workers", 1, "data_service 'tf'"),
        ("tf_work_dir", Path("journal"), "data_service 'tf'"),
        ("framework", "jax", "one of torch, tensorflow"),
        ("framework", 1, "one of torch, tensorflow"),
        ("script", "", "its path"),
        ("output_dir", "out", "a path"),
    ],
)
def test_value_out_of_bounds_error_names_value_and_bound(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        LaunchOptions(**{"script": "train.py", field: value})


def test_number_of_trainer_endpoints_may_be_auto(tmp_path: Path) -> None:
    assert resolve("--trainer-endpoints", "auto").trainer_endpoints == "auto"
    assert resolve("--trainer-endpoints", "3").trainer_endpoints == 3
    assert resolve(env={"HETERO_TRAINER_ENDPOINTS": "Auto"}).trainer_endpoints == "auto"
    (tmp_path / "job.yaml").write_text("trainer_endpoints: auto\n")
    options = resolve("--config", str(tmp_path / "job.yaml"))
    assert options.trainer_endpoints == "auto"
    assert "--trainer-endpoints=auto" in to_flags(options)
    with pytest.raises(ConfigError, match=r"--trainer-endpoints is 'some'; expected a whole number.*, or auto"):
        resolve("--trainer-endpoints", "some")


@pytest.mark.parametrize(
    ("changes", "has_data_hosts", "expected"),
    [
        ({}, True, None),
        ({}, False, 0),
        ({"profile": True}, True, 0),
        ({"trainer_endpoints": 0}, True, 0),
        ({"trainer_endpoints": 3}, False, 3),
    ],
)
def test_job_chooses_its_trainer_endpoints_only_with_endpoints_on_data_hosts(
    changes: dict[str, Any], has_data_hosts: bool, expected: int | None
) -> None:
    options = LaunchOptions(**{"script": "train.py", "trainer_endpoints": "auto", **changes})
    assert config.trainer_endpoints_of(options, has_data_hosts=has_data_hosts) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"require_token": True}, "neither tokens nor TLS"),
        ({"tls_dir": Path("tls")}, "neither tokens nor TLS"),
        ({"emulate_sample_s": 0.1}, "cannot emulate vCPUs"),
        ({"endpoints_per_host": 2}, "give tf_workers_per_host"),
        ({"trainer_endpoints": 2}, "give trainer_tf_workers"),
    ],
)
def test_options_that_tensorflows_servers_cannot_obey_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        LaunchOptions(script="train.py", data_service="tf", **changes)


SCRIPT_LINES = [
    ("train.py --port 18181 --log-level warning", ["train.py"], ["--port", "18181", "--log-level", "warning"]),
    ("train.py -- --port 18181", ["train.py"], ["--port", "18181"]),
    ("--port 1 -- train.py --port 18181", ["--port", "1", "train.py"], ["--port", "18181"]),
    ("train.py -- --", ["train.py"], ["--"]),
    ("train.py --resume -- rest", ["train.py"], ["--resume", "--", "rest"]),
    ("--port=1 --audit --no-audit train.py launch", ["--port=1", "--audit", "--no-audit", "train.py"], ["launch"]),
    ("--prot 1 train.py", ["--prot", "1"], ["train.py"]),  # as if the value were missing. parse suggests an option
    ("-m package.train -m --port 2", ["-m", "package.train"], ["-m", "--port", "2"]),
    ("-- --epochs 3", [], ["--epochs", "3"]),  # the script is named elsewhere
    ("-- -- data/ --lr 1", [], ["data/", "--lr", "1"]),
    ("--port 1 -- -- data/ -- more", ["--port", "1"], ["data/", "--", "more"]),
    ("-- --", [], []),
    ("-mpackage.train -m --port 2", ["-m", "package.train"], ["-m", "--port", "2"]),
    ("--port 1 -mpackage.train -- --port 2", ["--port", "1", "-m", "package.train"], ["--port", "2"]),
    ("- --port 2", ["-"], ["--port", "2"]),
    ("-- - --port 2", ["-"], ["--port", "2"]),
    ("--port 1", ["--port", "1"], []),
    ("--port", ["--port"], []),
    ("", [], []),
]


@pytest.mark.parametrize(("line", "own", "script_args"), SCRIPT_LINES)
def test_what_follows_the_script_is_the_scripts(line: str, own: list[str], script_args: list[str]) -> None:
    found = config.split_at_script(make_parser(), ["launch", *line.split()])
    assert found == (["launch", *own], script_args)


def test_command_without_a_script_keeps_all_arguments() -> None:
    arguments = ["prices", "x", "--", "--price"]
    assert config.split_at_script(make_parser(), arguments) == (arguments, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "--endpoint-per-host", "2", "train.py"], "did you mean --endpoints-per-host?"),
        (["launch", "--nproc", "2", "train.py"], "unknown flag --nproc; did you mean --nproc-per-node?"),
        (["prices", "--pice=x=1"], "did you mean --price"),
        (["prices", "extra"], "unexpected argument 'extra'; see --help"),
    ],
)  # fmt: skip
def test_unknown_argument_fails_with_a_suggestion(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(make_parser(), arguments)
    assert message in str(caught.value)


def test_hyperparameters_are_checked_as_texts_and_as_values() -> None:
    stated = {
        "hetero_script": '"train.py"',
        "hetero_port": 7,
        "hetero_roles": ["a=data"],
        "hetero_audit": "true",
        "lr": 1,
    }
    options = config.check_hyperparameters(stated, "the estimator")
    assert options == LaunchOptions(script="train.py", port=7, roles=("a=data",), audit=True)
    with pytest.raises(ConfigError, match="unknown option 'hetero_prot' in the estimator; did you mean 'hetero_port'"):
        config.check_hyperparameters({**stated, "hetero_prot": 1}, "the estimator")
    with pytest.raises(ConfigError, match="port is 0; expected a whole number, 1 or more"):
        config.check_hyperparameters({**stated, "hetero_port": 0}, "the estimator")
    with pytest.raises(ConfigError, match="the estimator has no 'hetero_script'"):
        config.check_hyperparameters({"epochs": 3}, "the estimator")


@pytest.mark.parametrize("name", ["hetero_prot", "hetero_"])
def test_unknown_hyperparameter_of_ours_is_refused(base: Path, name: str) -> None:
    hyperparameters(base, {name: "1"})
    with pytest.raises(ConfigError, match=f"unknown option '{name}' in .*hyperparameters.json; "):
        resolve(base=base)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("flag", "--port is 'x'; expected a whole number, 1 or more and at most 65535"),
        ("env", "HETERO_PORT is 'x'; expected a whole number"),
        ("hyperparameter", "'hetero_port' in .*hyperparameters.json is 'x'; expected a whole number"),
        ("file", "'port' in .*options.yaml is 'x'; expected a whole number"),
    ],
)
def test_malformed_value_error_names_its_source(base: Path, source: str, message: str) -> None:
    (base / "options.yaml").write_text("port: x" if source == "file" else "", encoding="utf-8")
    if source == "hyperparameter":
        hyperparameters(base, {"hetero_port": "x"})
    flags = ["--config", str(base / "options.yaml"), *(["--port", "x"] if source == "flag" else [])]
    with pytest.raises(ConfigError, match=message):
        resolve(*flags, env={"HETERO_PORT": "x"} if source == "env" else {}, base=base)


@pytest.mark.attack("A17")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1", "unknown option 'prot' in .*; did you mean 'port'?"),
        ("!!python/object/apply:os.getcwd []", "is not YAML that can be used"),
        ("a: &a [1]\nb: *a", "uses YAML aliases"),
        ("[" * 1500, "is not YAML that can be used"),
        ("- 1", "holds list; expected options by name"),
        ("port: {a: 1}", "expected a whole number"),
        ("roles: [[a]]", "expected a list of strings"),
        ("# " + "x" * (1 << 20), "is too large; expected at most 1048576 bytes"),
        (b"\xff\xfe", "is not YAML"),
    ],
)
def test_unusable_file_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        resolve("--config", str(path))


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the configuration file .*; check the path given to --config"):
        resolve("--config", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="cannot read"):
        resolve("--config", str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_unusable_hyperparameters_are_refused(base: Path, content: str) -> None:
    hyperparameters(base, content)
    with pytest.raises(ConfigError, match="hyperparameters.json"):
        resolve(base=base)


@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "roles": st.lists(st.text("ab=-\u00fc ").map("g=".__add__), min_size=1, max_size=3).map(tuple),
            "port": st.integers(1, 65535),
            "data_timeout_s": st.floats(1e-6, 86400),
            "emulate_sample_s": st.none() | st.floats(1e-9, 3600),
            "require_token": st.booleans(),
            "price_file": st.none() | st.just(Path("-prices.yaml")),
            "log_level": st.sampled_from(["debug", "error"]),
            "framework": st.sampled_from([None, "torch", "tensorflow"]),
        },
    )
)
def test_options_as_flags_resolve_to_the_same_options(changes: dict[str, Any]) -> None:
    options = LaunchOptions(script="train.py", **changes)
    # What another environment says must not matter.
    env = {"HETERO_PORT": "1", "HETERO_REQUIRE_TOKEN": "true", "HETERO_LOG_LEVEL": "warning"}
    assert resolve(*to_flags(options), env=env) == options


def test_flags_leave_out_what_differs_between_hosts() -> None:
    options = LaunchOptions(script="train.py", script_args=("x",), host="h", cluster_file="f", output_dir=Path("d"))
    assert to_flags(options) == to_flags(LaunchOptions(script="train.py"))


def test_price_arguments_give_the_launch_options() -> None:
    namespace = config.parse(make_parser(), ["prices", "--price", "a=1", "--price", "b=2"])
    assert config.resolve_prices(namespace) == ReportOptions(region="us-east-1", prices=("a=1", "b=2"))


def test_every_option_has_a_flag_with_help() -> None:
    parser = argparse.ArgumentParser()
    config.add_launch_arguments(parser)
    helps = {action.dest: action.help for action in parser._actions}
    for field in dataclasses.fields(LaunchOptions):
        assert field.name == "script_args" or helps[field.name], field.name
    assert "Default: 17170." in parser.format_help()
    assert "Default: 0." in parser.format_help()
    assert "--framework {torch,tensorflow}" in parser.format_help()


def test_command_that_makes_a_cluster_is_told_of_none() -> None:
    parser = argparse.ArgumentParser()
    config.add_launch_arguments(parser, makes_cluster=True)
    fields = {field.name for field in dataclasses.fields(LaunchOptions)}
    assert fields - {action.dest for action in parser._actions} == {
        *("script_args", "platform", "ray_groups", "cluster_file", "host", "join", "join_group"),
    }


@pytest.mark.parametrize("scale", [0.001, 0.05, 1.0, 3.0])
def test_timings_scale_with_a_floor_for_leases(scale: float) -> None:
    timings = Timings.scaled(scale)
    assert timings.heartbeat_s == pytest.approx(2 * scale)
    assert timings.start_timeout_s == pytest.approx(900 * scale)
    assert timings.lease_s >= 3
    assert timings.orphan_s > timings.lease_s
    assert Timings.scaled(1) == Timings()


def test_timings_take_a_stated_timeout_as_it_is() -> None:
    options = LaunchOptions(script="train.py", data_timeout_s=7)
    timings = Timings.from_options(options, {"HETERO_TIME_SCALE": "0.1"})
    assert (timings.data_timeout_s, timings.start_timeout_s) == (7, pytest.approx(90))
    assert Timings.from_options(LaunchOptions(script="train.py"), {}) == Timings()


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "inf", "1000"])
def test_time_scale_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="time scale|HETERO_TIME_SCALE"):
        Timings.from_options(LaunchOptions(script="train.py"), {"HETERO_TIME_SCALE": text})


@pytest.mark.parametrize("changes", [{"lease_s": 0.0}, {"suspect_s": 20.0}, {"heartbeat_s": float("inf")}])
def test_timings_that_contradict_each_other_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Timings(**changes)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"data_service": "tf"}, "data_service is 'tf', whose batches a profile run cannot measure"),
        ({"audit": True}, "leave out audit, because a profile run repeats batches"),
    ],
)
def test_profile_that_is_impossible_is_rejected_with_what_to_do(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchOptions(script="train.py", profile=True, **other)


def test_profile_is_a_hyperparameter_of_a_job() -> None:
    options = config.check_hyperparameters({"hetero_script": "train.py", "hetero_profile": "true"}, "the request")
    assert options.profile
    assert options.shared()["profile"] == "True"

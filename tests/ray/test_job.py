"""Whole jobs on a Ray cluster, started by one command. The nodes have different addresses."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from hetero import cli
from hetero.errors import ConfigError, ExitCode
from hetero.ray.groups import parse_group
from tests.support.ray.driver import CHAIN, TWO, Driver
from tests.support.ray.harness import SCRIPT, batches_in, check_batches, wait_until


def test_lost_data_host_is_replaced_and_a_job_that_was_stopped_goes_on_with_more_hosts_until_its_script_fails(
    address: str, host_folders: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = {"num_samples": 80_000, "step_s": 0.05, "folder": str(out)}
    driver = Driver(address, tmp_path, *TWO, script=SCRIPT, args=[json.dumps(config)])
    wait_until(lambda: len(batches_in(out, 0)) >= 3, "3 batches")
    driver.actor_of("data-0").kill()
    driver.wait_for("data host data-1 has joined the job, in group data")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait() == 128 + signal.SIGTERM, driver.output[-5000:]
    driver.check_nothing_is_left(host_folders, num_killed=1)

    num_before = len(batches_in(out, 0))
    groups = ["--group", "trainer=GPU:1:1", "--group", "data=CPU:1:2"]
    driver = Driver(address, tmp_path, *groups, script=SCRIPT, args=[json.dumps(config)])
    wait_until(lambda: len(batches_in(out, 0)) >= num_before + 20, "20 more batches")
    (out / "fail").touch()
    assert driver.wait() == ExitCode.SCRIPT_FAILED, driver.output[-5000:]
    assert "RuntimeError: training fails on purpose" in driver.output
    check_batches(out, config, world_size=1)  # of both runs together
    driver.check_nothing_is_left(host_folders)


def test_number_of_data_hosts_follows_the_demand_and_no_batch_is_lost_or_repeated(
    address: str, host_folders: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    # A batch of 8 samples takes 160 ms on one endpoint, and a step 80 ms. Later a step takes 600 ms.
    config = {"num_samples": 80_000, "sleep_s": 0.02, "step_s": 0.08, "slow_step_s": 0.6, "folder": str(out)}
    groups = ["--group", "trainer=GPU:1:1", "--group", "data=CPU:1:1..2"]
    driver = Driver(address, tmp_path, *groups, script=SCRIPT, args=[json.dumps(config)])
    driver.wait_for("asking Ray for data-1")
    driver.wait_for("data host data-1 has joined the job, in group data")
    (out / "slow").touch()
    driver.wait_for("the launcher of data-1 ended with 143")
    (out / "stop").touch()
    assert driver.wait() == ExitCode.OK, driver.output[-5000:]
    assert "data-1 leaves" in driver.output
    assert "second signal" not in driver.output
    check_batches(out, config, world_size=1)
    report = json.loads((tmp_path / "report" / "report.json").read_text())["run"]
    groups_of = {group["name"]: (group["instance_type"], group["count"]) for group in report["groups"]}
    assert groups_of == {"trainer": ("GPU:1", 1), "data": ("CPU:1", 1)}
    assert [joined["host"] for joined in report["joined_hosts"]] == ["data-1"]
    assert report["placement"] == "heterogeneous"
    driver.check_nothing_is_left(host_folders)


def test_job_that_ray_cannot_place_says_what_is_needed_and_found(address: str, tmp_path: Path) -> None:
    words = ["--group", "trainer=GPU:8:1", "--group", "data=CPU:1:1", "--start-timeout", "3"]
    driver = Driver(address, tmp_path, *words, script=CHAIN)
    assert driver.wait() == ExitCode.CAPACITY, driver.output[-5000:]
    assert "needed: 2 different nodes, with trainer=GPU:8:1, data=CPU:1:1" in driver.output
    assert "found: 3 nodes (" in driver.output
    assert "1 with CPU:3 GPU:1); free: CPU " in driver.output


@pytest.mark.parametrize(
    ("text", "name", "resources", "count", "most"),
    [
        ("data=CPU:16:2..8", "data", "CPU:16", 2, 8),
        ("data=CPU:16:2", "data", "CPU:16", 2, 2),
        ("trainer=GPU:8:1", "trainer", "GPU:8", 1, 1),
        ("data=CPU:4:3..3", "data", "CPU:4", 3, 3),
        ("a-1.b_2=CPU:4:1", "a-1.b_2", "CPU:4", 1, 1),
    ],
)
def test_group_states_resources_and_bounds(text: str, name: str, resources: str, count: int, most: int) -> None:
    group = parse_group(text)
    assert (group.stated.name, group.stated.instance_type, group.stated.count) == (name, resources, count)
    assert group.max_hosts == most


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=CPU:16", "expected NAME=TYPE:COUNT|found 16 hosts|Ray does not know"),
        ("data=ml.c5.xlarge:2", "Ray does not know the type 'ml.c5.xlarge'"),
        ("data=CPU:16:8..2", r"found 8\.\.2; expected the smaller number first"),
        ("data=CPU:16:0..2", "found 0 hosts"),
        ("CPU:16:2", "expected NAME=TYPE:COUNT"),
        ("-x=CPU:16:2", "found the name '-x'; expected letters"),
        ("a b=CPU:16:2", "found the name 'a b'"),
        ("{port}=CPU:16:2", "found the name '{port}'"),
        ("data=CPU:16:2..99999999999", "found 99999999999 hosts; expected at most"),
    ],
)
def test_group_that_says_nothing_useful_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_group(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--platform", "ray"], "--platform ray needs the groups of the job"),
        (["--group", "data=CPU:1:1"], "only --platform ray uses them"),
        (["--platform", "ray", "--group", "trainer=GPU:1:1..2"], "only a data group can have MIN..MAX hosts"),
        (["--platform", "ray", "--group", "data=CPU:1:1", "--group", "data=CPU:2:1"], "a different name for each"),
        (["--platform", "ray", "--group", "a=CPU:1:1..2", "--group", "b=CPU:1:1..2"], "MIN..MAX in a and b"),
    ],
)
def test_command_line_that_cannot_work_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", *words, str(CHAIN)]) == ExitCode.USAGE
    assert message in capsys.readouterr().err

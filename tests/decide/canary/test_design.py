"""The planned runs: ways to reduce the data, real fractions, order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.decide.canary.design import CanaryRequest, Cluster, cluster_name, how_text, parse_fractions, plan_canaries
from hetero.errors import ConfigError

CLUSTER = Cluster(groups=("trainer=ml.m5.large:1",))


def request(**more: Any) -> CanaryRequest:
    return CanaryRequest(script="train.py", clusters=(CLUSTER,), **more)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for index in range(200):
        (folder / f"{index:03d}.csv").write_bytes(b"x" * 1000)
    return folder


def test_channel_gives_each_run_links_to_its_own_files(data: Path, tmp_path: Path) -> None:
    planned, num_bytes = plan_canaries(request(channels={"training": data}), tmp_path / "out")
    assert num_bytes == 200_000
    assert len(planned) == 9
    assert sorted({each.fraction for each in planned}) == [0.01, 0.02, 0.03]
    for each in planned:
        folder = Path(each.run.channels["training"])
        assert not folder.exists()
        each.link(tmp_path / "out")
        assert len(list(folder.iterdir())) == 200 * each.fraction
        assert [len(linked.files) for linked in each.links] == [200 * each.fraction]


def test_first_runs_suffice_for_a_first_forecast(data: Path, tmp_path: Path) -> None:
    planned, _ = plan_canaries(request(channels={"training": data}), tmp_path / "out")
    assert sorted(each.run.levels["fraction"] for each in planned[:4]) == [0.01, 0.01, 0.02, 0.03]
    again, _ = plan_canaries(request(channels={"training": data}), tmp_path / "out")
    assert [each.run.run_id for each in again] == [each.run.run_id for each in planned]
    more, _ = plan_canaries(request(channels={"training": data}, repeats=5), tmp_path / "out")
    assert {each.run.run_id for each in planned} < {each.run.run_id for each in more}


def test_channel_that_stays_whole_is_passed_as_it_is(data: Path, tmp_path: Path) -> None:
    made = request(channels={"training": data, "labels": tmp_path}, whole_channels=frozenset({"labels"}))
    planned, _ = plan_canaries(made, tmp_path / "out")
    assert {each.run.channels["labels"] for each in planned} == {str(tmp_path.resolve())}


def test_samples_are_reduced_by_variables_of_the_environment(tmp_path: Path) -> None:
    planned, num_bytes = plan_canaries(request(by_samples=True), tmp_path)
    assert num_bytes is None
    assert {each.run.environment["HETERO_SAMPLE_FRACTION"] for each in planned} == {"0.01", "0.02", "0.03"}
    assert len({each.run.environment["HETERO_SAMPLE_SEED"] for each in planned}) == 3


def test_placeholders_are_filled_in(tmp_path: Path) -> None:
    made = request(script_args=("--rows", "{samples}", "--part={fraction}"), whole_samples=1050)
    planned, _ = plan_canaries(made, tmp_path)
    smallest = next(each for each in planned if each.run.levels["fraction"] == 0.01)
    assert smallest.run.script_args == ("--rows", "10", "--part=0.01")
    assert smallest.fraction == pytest.approx(10 / 1050)
    assert "{fraction} and {samples}" in how_text(made)


def test_files_that_are_too_few_are_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "all.csv").write_text("1")
    with pytest.raises(
        ConfigError, match=r"1 file, of which whole ones give the runs 100 % of the data; expected at least 3"
    ):
        plan_canaries(request(channels={"training": folder}), tmp_path / "out")


def test_real_fractions_must_differ_as_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for index in range(100):  # half a percent is one file, and so is one percent
        (folder / f"{index}.csv").write_text("x" * 100)
    with pytest.raises(ConfigError, match=r"100 files, of which whole ones give the runs 1 %, 2 % of the data"):
        plan_canaries(request(channels={"t": folder}, fractions=(0.006, 0.01, 0.02)), tmp_path / "out")
    large = Cluster(groups=("trainer=ml.m5.large:3",))
    made = CanaryRequest(script="train.py", clusters=(CLUSTER, large), channels={"t": folder})
    with pytest.raises(ConfigError, match=r"the runs 3 % of the data"):  # each host needs a file
        plan_canaries(made, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"the job has 20 samples"):
        plan_canaries(request(script_args=("{samples}",), whole_samples=20), tmp_path / "out")


def test_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--channel training=.*none: the folder does not exist"):
        plan_canaries(request(channels={"training": tmp_path / "none"}), tmp_path / "out")


def test_pattern_that_keeps_nothing_is_rejected(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--keep 'labels.csv': no file of training"):
        plan_canaries(request(channels={"training": data}, keep=("labels.csv",)), tmp_path / "out")


@pytest.mark.parametrize("name", ["../data", "/etc", "a/b", "", ".x", "x" * 65])
def test_name_of_a_channel_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a name of 1 to 64 letters"):
        request(channels={name: tmp_path})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "one way to reduce the data is needed, found none"),
        ({"by_samples": True, "script_args": ("{fraction}",)}, "found --samples and {fraction}"),
        ({"script_args": ("{samples}",)}, "give --whole-samples N"),
        ({"by_samples": True, "fractions": (0.01,)}, "Two points cannot show whether growth is a line"),
        ({"by_samples": True, "fractions": (0.01, 0.02)}, "expected at least 3 that differ by a tenth"),
        ({"by_samples": True, "fractions": (0.01, 0.0101, 0.02)}, "expected at least 3 that differ by a tenth"),
        ({"by_samples": True, "fractions": (0.02, 0.025, 0.03)}, "at least 2 times the smallest"),
        ({"by_samples": True, "fractions": (0.01, 0.02, 0.02, 0.03)}, "expected different ones"),
        ({"by_samples": True, "fractions": (0.01, 0.6)}, "at most 50 %"),
        ({"by_samples": True, "repeats": 1}, "gives each cluster 3 runs; a forecast needs at least 4"),
        ({"by_samples": True, "whole_samples": 100}, "--whole-samples needs {samples}"),
        ({"by_samples": True, "keep": ("*.csv",)}, "--keep needs a channel"),
        ({"by_samples": True, "repeats": 0}, "--repeats is 0"),
        ({"by_samples": True, "repeats": 51}, "--repeats is 51"),
        ({"by_samples": True, "whole_channels": frozenset({"x"})}, "unknown channel"),
    ],
)
def test_request_that_cannot_work_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request(**values)


def test_candidate_that_is_given_twice_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--candidate trainer=ml.m5.large:1 is given twice"):
        CanaryRequest(script="train.py", clusters=(CLUSTER, CLUSTER), by_samples=True)


def test_request_without_a_cluster_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no cluster is given"):
        CanaryRequest(script="train.py", clusters=(), by_samples=True)


def test_fractions_are_percentages() -> None:
    assert parse_fractions(["1%", "0.5 %"]) == (0.01, 0.005)
    with pytest.raises(ConfigError, match="expected a number with a percent sign"):
        parse_fractions(["0.01"])


def test_name_of_a_cluster_is_what_it_consists_of() -> None:
    assert cluster_name(("trainer=ml.m5.large:1", "data=ml.c5.xlarge:6")) == "1 x ml.m5.large + 6 x ml.c5.xlarge"

"""The planned runs: ways to reduce the data, real fractions, order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.canary.design import CanaryRequest, Cluster, cluster_name, how_text, parse_fractions, plan_canaries
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
        assert len(list(folder.iterdir())) == 200 * each.fraction
        assert len(each.files) == 200 * each.fraction
        assert Path(each.run.environment["HETERO_CANARY_DIR"]).is_dir()


def test_first_runs_suffice_for_a_first_forecast(data: Path, tmp_path: Path) -> None:
    planned, _ = plan_canaries(request(channels={"training": data}), tmp_path / "out")
    assert sorted(each.run.levels["fraction"] for each in planned[:4]) == [0.01, 0.01, 0.02, 0.03]
    again, _ = plan_canaries(request(channels={"training": data}), tmp_path / "out")
    assert [each.run.run_id for each in again] == [each.run.run_id for each in planned]


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
    with pytest.raises(ConfigError, match="1 file, and whole files give all runs the same data"):
        plan_canaries(request(channels={"training": folder}), tmp_path / "out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "one way to reduce the data is needed, found none"),
        ({"by_samples": True, "script_args": ("{fraction}",)}, "found --samples and {fraction}"),
        ({"script_args": ("{samples}",)}, "give --whole-samples N"),
        ({"by_samples": True, "fractions": (0.01,)}, "at least two different fractions"),
        ({"by_samples": True, "fractions": (0.01, 0.6)}, "at most 50 %"),
        ({"by_samples": True, "repeats": 0}, "--repeats is 0"),
        ({"by_samples": True, "repeats": 51}, "--repeats is 51"),
        ({"by_samples": True, "whole_channels": frozenset({"x"})}, "there is no such channel"),
    ],
)
def test_request_that_cannot_work_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request(**values)


def test_request_without_a_cluster_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no cluster is given"):
        CanaryRequest(script="train.py", clusters=(), by_samples=True)


def test_fractions_are_percentages() -> None:
    assert parse_fractions(["1%", "0.5 %"]) == (0.01, 0.005)
    with pytest.raises(ConfigError, match="expected a number with a percent sign"):
        parse_fractions(["0.01"])


def test_name_of_a_cluster_is_what_it_consists_of() -> None:
    assert cluster_name(("trainer=ml.m5.large:1", "data=ml.c5.xlarge:6")) == "1 x ml.m5.large + 6 x ml.c5.xlarge"

"""Platforms: which one this is, and what it says about the job, from recorded environments."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from hetero.cluster import Role, describes_a_job, find_platform, platforms
from hetero.cluster.platforms.cluster_file import ClusterFile
from hetero.cluster.platforms.platform import ClusterDescription, Folders, Platform
from hetero.cluster.platforms.sagemaker import SageMaker, job_parameters
from hetero.config import Timings
from hetero.errors import ClusterError, ConfigError

GROUPS = [
    {"instance_group_name": "blue", "hosts": ["algo-1", "algo-2"]},
    {"instance_group_name": "green", "hosts": ["algo-3"]},
]


class Batch(Platform):
    """A platform as others are: little time to stop, variables that confuse ranks, groups without instance types."""

    name = "batch"
    variables = ("BATCH_",)
    stripped = ("BATCH_RANK_",)
    stop_signals = (signal.SIGTERM, signal.SIGUSR1)
    kill_after_s = 30.0

    def is_here(self) -> bool:
        return "BATCH_JOB" in self.environ

    def describe(self) -> ClusterDescription:
        document = {"current_host": self.environ["BATCH_HOST"], "instance_groups": GROUPS}
        return ClusterDescription(document=document, source="BATCH_*", roles=("blue=data", "green=trainer"))

    @property
    def folders(self) -> Folders:
        root = Path("/shared")
        return Folders(
            root=root,
            output=root / "out",
            failure=root / "failure",
            model=root / "model",
            checkpoints=root / "ckpt",
            code=root,
        )

    def job_name(self) -> str:
        return self.environ["BATCH_JOB"]


BATCH = {"BATCH_JOB": "run/7", "BATCH_HOST": "algo-3"}


@pytest.fixture
def two_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    known = platforms._platforms()
    monkeypatch.setattr(platforms, "_platforms", lambda: (*known, Batch))


def in_tree(base: Path, name: str, content: object) -> dict[str, str]:
    """Write one of SageMaker's files. Return the environment that names it."""
    path = base / "input" / "config" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return {"SAGEMAKER_BASE_DIR": str(base)}


def test_sagemaker_is_known_by_its_file_although_the_file_is_damaged(tmp_path: Path) -> None:
    platform = find_platform(in_tree(tmp_path, "resourceconfig.json", "{"))
    assert platform.is_here()
    with pytest.raises(ClusterError, match="is not JSON"):
        platform.host_names()
    assert not SageMaker({"SAGEMAKER_BASE_DIR": str(tmp_path / "no")}).is_here()


def test_hosts_are_known_although_the_own_place_is_not(tmp_path: Path) -> None:
    platform = find_platform(in_tree(tmp_path, "resourceconfig.json", {"hosts": ["algo-10", "algo-2"]}))
    assert platform.host_names() == ["algo-2", "algo-10"]
    with pytest.raises(ClusterError, match="wrong at current_host"):
        platform.read_cluster()


@pytest.mark.usefixtures("two_platforms")
def test_platform_is_the_first_that_is_detected(tmp_path: Path) -> None:
    nothing = {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    assert find_platform({**nothing, **BATCH}).name == "batch"
    assert find_platform(nothing).name == "sagemaker"  # whose folders are the default
    assert find_platform({**BATCH, **in_tree(tmp_path, "resourceconfig.json", "{}")}).name == "sagemaker"


@pytest.mark.usefixtures("two_platforms")
def test_cluster_file_replaces_the_hosts_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"hosts": ["node-1", "node-2"]}))
    monkeypatch.setattr(socket, "gethostname", lambda: "node-2.example.org")
    nothing = {"SAGEMAKER_BASE_DIR": str(tmp_path)}
    platform = find_platform({**nothing, **BATCH}, cluster_file=str(path))
    assert isinstance(platform, ClusterFile)
    cluster = platform.read_cluster()
    assert (cluster.current_host, cluster.source) == ("node-2", str(path))
    below = Batch(BATCH)
    assert platform.job_id(cluster) == below.job_id(cluster) != find_platform(nothing).job_id(cluster)
    assert platform.folders == below.folders
    assert (platform.stripped, platform.stop_signals) == (below.stripped, below.stop_signals)
    assert platform.kill_after_s == below.kill_after_s


def test_platform_gives_roles_that_flags_override() -> None:
    assert Batch(BATCH).read_cluster().role is Role.TRAINER
    cluster = Batch(BATCH).read_cluster(roles=["blue=trainer", "green=data"])
    assert [group.role for group in cluster.groups] == [Role.TRAINER, Role.DATA]
    assert Batch(BATCH).read_cluster(host="algo-1", roles=["blue=data"]).role is Role.DATA


def test_job_id_comes_from_the_user_then_the_platform_then_the_cluster(tmp_path: Path) -> None:
    cluster = Batch(BATCH).read_cluster()
    assert Batch({**BATCH, "HETERO_JOB_ID": "mine"}).job_id(cluster) == "mine"
    assert Batch(BATCH).job_id(cluster).startswith("run-7-")  # a plain word
    assert find_platform({"SAGEMAKER_BASE_DIR": str(tmp_path)}).job_id(cluster).startswith("cluster-")


def test_environment_is_the_one_of_the_start() -> None:
    environ = dict(BATCH)
    platform = Batch(environ)
    environ.clear()
    assert platform.job_name() == "run/7"


@pytest.mark.usefixtures("two_platforms")
def test_variables_of_any_platform_describe_a_job() -> None:
    names = ["SM_HOSTS", "SAGEMAKER_REGION", "BATCH_JOB", "PATH", "HETERO_JOB_ID"]
    assert [describes_a_job(name) for name in names] == [True, True, True, False, False]


def test_ranks_get_at_most_half_of_the_time_that_the_platform_gives_to_stop() -> None:
    assert Timings.scaled(1, kill_after_s=Batch.kill_after_s).stop_grace_s == 15.0
    assert Timings.scaled(1, kill_after_s=SageMaker.kill_after_s) == Timings()


def test_parameters_are_those_of_the_file(tmp_path: Path) -> None:
    content = {"hetero_script": '"train.py"', "lr": "1", "sagemaker_program": '"x"'}
    found = find_platform(in_tree(tmp_path, "hyperparameters.json", content)).parameters()
    assert found is not None
    assert found.values["hetero_script"] == "train.py"
    assert found.script_arguments == ["--lr", "1"]
    assert find_platform({"SAGEMAKER_BASE_DIR": str(tmp_path / "no")}).parameters() is None


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "holds list; expected an object")])
def test_damaged_parameters_are_refused_with_their_source(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"hyperparameters.json {message}"):
        find_platform(in_tree(tmp_path, "hyperparameters.json", text)).parameters()


def test_quotes_are_removed_once() -> None:
    found = job_parameters({"hetero_script_args": json.dumps('"a b"'), "name": json.dumps('"c d"')}, "test")
    assert found.values["hetero_script_args"] == '"a b"'
    assert found.script_arguments == ["--name", '"c d"']


@pytest.mark.parametrize(("text", "expected"), [("4", 4), ("0", 0), ("", None), ("many", None)])
def test_gpus_are_as_many_as_the_toolkit_counted(text: str, expected: int | None) -> None:
    assert SageMaker({"SM_NUM_GPUS": text}).num_gpus() == expected

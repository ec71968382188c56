"""Names that want to be paths: groups, hosts, channels, runs, jobs, price profiles, reports behind links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero import cli
from hetero.cluster import find_platform, natural_key, parse_cluster, slug
from hetero.cluster.groups import StatedGroup
from hetero.config import LaunchOptions
from hetero.control.security import call_metadata
from hetero.control.status import Cause
from hetero.documents.files import write_text
from hetero.errors import ClusterError, ConfigError, ExitCode
from hetero.launch.failure import write_failure
from hetero.launch.reporting.summary import output_folder
from hetero.pricing import Catalogue
from hetero.simulate.simulate import simulate

pytestmark = pytest.mark.attack("A13")

EVIL = (
    "../../etc/x",
    "..",
    ".",
    "/etc/passwd",
    "a/../../b",
    "a\\b",
    "-rf",
    "~root",
    "$HOME",
    "a\nb",
    "a\0b",
    "\u202egnp",
    ".hidden",
    "CON",
    "x" * 65,
    "ü" * 30,
)


def cluster(group: str, host: str = "algo-1") -> dict[str, Any]:
    groups = [
        {"instance_group_name": group, "instance_type": "ml.p3.2xlarge", "hosts": [host]},
        {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-2"]},
    ]
    return {"current_host": host, "instance_groups": groups}


@pytest.mark.parametrize("name", EVIL)
def test_group_of_any_name_has_a_file_name_that_stays(tmp_path: Path, name: str) -> None:
    assert (tmp_path / slug(name)).resolve().parent == tmp_path.resolve()
    assert slug(name).isascii()
    assert slug(name).isprintable()
    assert len(slug(name)) <= 64
    try:
        spec = parse_cluster(cluster(name), source="test")
    except ClusterError:  # too long, or not printable
        return
    assert (tmp_path / slug(spec.current_group.name)).resolve().parent == tmp_path.resolve()


@pytest.mark.parametrize("name", sorted({*EVIL, "a b", "", "a" * 254} - {"CON", "x" * 65}, key=natural_key))
def test_host_with_the_name_of_a_path_is_refused(name: str) -> None:
    with pytest.raises(ClusterError):
        parse_cluster(cluster("trainers", name), source="test")


def test_folder_of_a_host_stays_below_the_output() -> None:
    options = LaunchOptions(script="train.py")
    for host in ("algo-1", "a..b", "x:1", "_"):
        spec = parse_cluster(cluster("trainers", host), source="test")
        folder = output_folder(options, find_platform({}).folders, spec.current_host)
        assert folder.parent == Path("/opt/ml/output/data")
        assert folder.name == host


@pytest.mark.parametrize("name", sorted({*EVIL, "a b", "x" * 65} - {"CON"}))
def test_channel_with_the_name_of_a_path_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    output = tmp_path / "run"
    output.mkdir()
    with pytest.raises(ConfigError, match="--channel"):
        simulate(
            LaunchOptions(script=str(script)),
            [StatedGroup(name="trainers", instance_type="ml.p3.2xlarge", count=1)],
            output_dir=output,
            channels={name: tmp_path},
            vcpus={},
        )
    assert list(output.iterdir()) == []


def test_simulation_removes_nothing_behind_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    precious = tmp_path / "precious"
    (precious / "algo-1").mkdir(parents=True)
    (precious / "algo-1" / "model").write_text("precious")
    for number, link in enumerate(("hosts", "hosts/algo-1")):
        output = tmp_path / f"run-{number}"
        (output / link).parent.mkdir(parents=True)
        (output / link).symlink_to(precious if link == "hosts" else precious / "algo-1")
        command = ["simulate", "--group", "trainers=ml.p3.2xlarge:1", "--output-dir", str(output), str(script)]
        assert cli.main(command) == ExitCode.USAGE
        assert "a link that leads out of" in capsys.readouterr().err
    assert (precious / "algo-1" / "model").read_text() == "precious"


@pytest.mark.parametrize("name", ["../../../etc/passwd", "seed-2022/../seed-2022", "/etc/passwd", "", "."])
def test_price_profile_with_the_name_of_a_path_is_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown"):
        Catalogue.load(name)


def test_file_written_over_a_link_replaces_the_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    for link in (tmp_path / "report.json", tmp_path / "report.md"):
        link.symlink_to(target)
        write_text(link, "new\r\n")
        assert not link.is_symlink()
        assert link.read_bytes() == b"new\r\n"
    assert target.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md", "target"]


def test_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\udc80")
    with pytest.raises(OSError, match="No such file"):
        write_text(tmp_path / "missing" / "report.json", "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "before"


def test_failure_file_behind_a_link_is_not_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for target in (tmp_path / "target", Path("/dev/null"), tmp_path / "missing"):
        path = tmp_path / "failure"
        path.symlink_to(target)
        write_failure(path, Cause(host="algo-1", summary="it failed", exit_code=ExitCode.SCRIPT_FAILED))
        assert "HETERO_FAILURE HET-30 algo-1: it failed" in capfd.readouterr().err
        path.unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("job_id", EVIL)
def test_job_of_any_name_is_one_plain_word_to_the_others(job_id: str) -> None:
    """It travels in headers, which know less than names may hold."""
    spec = parse_cluster({"hosts": ["algo-1"], "current_host": "algo-1"}, source="test")
    for variable in ("HETERO_JOB_ID", "TRAINING_JOB_NAME"):
        found = find_platform({variable: job_id}).job_id(spec)
        assert found == slug(job_id)
        assert found.isascii()
        assert found.isprintable()
        assert call_metadata(None, found) == (("hetero-job", found),)
    assert find_platform({}).job_id(spec) == find_platform({"HETERO_JOB_ID": ""}).job_id(spec) != ""

"""Jobs under a real Slurm of this machine: one srun for all components, one for each, and one component.

Each job is submitted with the script that `hetero render slurm` writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from hetero import cli
from hetero.errors import ExitCode
from tests.support.integration.arrays_job import ARRAYS, WITHOUT_TORCH, check_fed_as_alone
from tests.support.integration.harness import CHAIN, chains, chains_alone
from tests.support.integration.slurm_cluster import NUM_GPUS, SlurmCluster, missing

OPTIONS = ["--endpoints-per-host", "1", "--trainer-endpoints", "0", "--log-level", "info"]
TWO_RANKS = [*WITHOUT_TORCH, "--nproc-per-node", "2"]
TWO = [
    "--group",
    f"dnn=GPU:{NUM_GPUS}:1",
    "--group",
    "data=CPU:1:2",
    "--partition",
    "dnn:gpu",
    "--partition",
    "data:cpu",
]

_IS_REQUIRED = "HETERO_TEST_SYSTEM_PROGRAMS" in os.environ
pytestmark = [
    pytest.mark.skipif(bool(missing()) and not _IS_REQUIRED, reason=missing() or "there is a Slurm"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    assert not missing()
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster").running() as cluster:
        yield cluster


def script_of(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    *arguments: str,
    render: list[str],
    options: Sequence[str] = TWO_RANKS,
    script: Path = ARRAYS,
) -> str:
    """Return the rendered script, with the paths of this checkout."""
    (folder / "out").mkdir()
    command = ["render", "slurm", *render, *OPTIONS, *options, str(script), "--", "--output", str(folder / "out")]
    assert cli.main([*command, *arguments]) == ExitCode.OK
    text = capsys.readouterr().out
    bin_folder = Path(sys.executable).parent
    root = CHAIN.parents[3]
    lines = [line for line in text.splitlines() if not line.startswith("#SBATCH --exclusive")]
    first = next(at for at, line in enumerate(lines) if line.startswith("set -euo"))
    variables = {"PATH": f"{bin_folder}:$PATH", "PYTHONPATH": str(root), "HETERO_TIME_SCALE": "0.5"}
    lines[first + 1 : first + 1] = [f"export {name}={value}" for name, value in variables.items()]
    return "\n".join(lines) + "\n"


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes whose command line has a folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()) and process.pid != psutil.Process().pid:
                found.append(process)
    return found


def wait_until(condition: object, what: str, timeout_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def check_nothing_is_left(folder: Path) -> None:
    wait_until(lambda: not processes_of(folder), f"processes are left: {processes_of(folder)}", 300.0)
    assert not list(folder.glob(".hetero-token*"))


def check_report(folder: Path, job: int) -> None:
    assert "platform: slurm, from the SLURM_* environment" in (folder / "job.out").read_text()
    report = json.loads(next(folder.glob(f"hetero-slurm-{job}/gpu01/report.json")).read_text())
    assert {group["name"]: group["count"] for group in report["run"]["groups"]} == {"dnn": 1, "data": 2}
    assert report["run"]["placement"] == "heterogeneous"


def wait_training(folder: Path) -> None:
    output = folder / "job.out"
    wait_until(lambda: output.is_file() and "step 3" in output.read_text(), "the training has not begun")


def test_job_of_two_sruns_has_a_rank_for_each_gpu_and_is_fed_as_one_host_alone(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_of(capsys, tmp_path, render=[*TWO, "--separate-steps"], options=[], script=CHAIN)
    job = slurm.submit(text, tmp_path)
    assert slurm.wait(job) == ("COMPLETED", 0, 0), (tmp_path / "job.out").read_text()
    assert chains(tmp_path / "out") == chains_alone(num_ranks=2)
    check_report(tmp_path, job)
    check_nothing_is_left(tmp_path)


def test_nodes_of_one_component_are_divided(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_of(capsys, tmp_path, render=["--group", "dnn=CPU:1:2", "--partition", "cpu"])
    text = text.replace("export HETERO_GROUPS=dnn=CPU:1:2", "export HETERO_GROUPS='dnn=CPU:1:1 data=CPU:1:1'")
    job = slurm.submit(text, tmp_path)
    assert slurm.wait(job) == ("COMPLETED", 0, 0), (tmp_path / "job.out").read_text()
    check_fed_as_alone(tmp_path / "out", num_ranks=2)
    check_nothing_is_left(tmp_path)


def test_script_that_fails_gives_the_job_its_exit_code(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = slurm.submit(script_of(capsys, tmp_path, "--fail-at", "3", render=TWO), tmp_path)
    assert slurm.wait(job) == ("FAILED", int(ExitCode.SCRIPT_FAILED), 0), (tmp_path / "job.out").read_text()
    check_nothing_is_left(tmp_path)


@pytest.mark.fault("F42")
@pytest.mark.parametrize(
    "ended_by", ["scancel", pytest.param("time limit", marks=pytest.mark.long)]
)  # a time limit has whole minutes
def test_job_that_is_ended_stops_as_asked(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], ended_by: str
) -> None:
    text = script_of(capsys, tmp_path, "--epochs", "1000", "--step-s", "0.05", render=TWO)
    if ended_by == "time limit":  # the signal comes 70 s before the end of the second minute
        text = text.replace("--signal=TERM@120", "--time=2\n#SBATCH --signal=TERM@70")
    job = slurm.submit(text, tmp_path)
    wait_training(tmp_path)
    if ended_by == "scancel":
        slurm.run(["scancel", str(job)])
    state, code, _ = slurm.wait(job)
    check_nothing_is_left(tmp_path)
    assert state == ("CANCELLED" if ended_by == "scancel" else "FAILED")
    assert ended_by == "scancel" or code == 143  # Slurm ends the batch script of a cancelled job itself
    # Both ranks have saved after the same step.
    steps = [json.loads((tmp_path / "out" / f"rank-{rank}.json").read_text())["steps"] for rank in (0, 1)]
    assert steps[0] == steps[1]
    output = (tmp_path / "job.out").read_text()
    assert output.count("Exited with exit code 143") == 3
    assert "HET-30" not in output


@pytest.mark.fault("F42")
def test_data_node_that_is_lost_does_not_end_the_job(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough = tmp_path / "enough"
    arguments = ["--step-s", "0.05", "--until", str(enough)]
    job = slurm.submit(script_of(capsys, tmp_path, *arguments, render=TWO), tmp_path)
    wait_training(tmp_path)
    victims = [
        process
        for process in processes_of(tmp_path)
        if "launch" in process.cmdline() and process.environ().get("SLURMD_NODENAME") == "cpu02"
    ]
    assert victims
    for process in victims:
        process.kill()
    wait_until(lambda: not any(process.is_running() for process in victims), "the victims live")
    enough.touch()
    assert slurm.wait(job) == ("COMPLETED", 0, 0), (tmp_path / "job.out").read_text()
    check_fed_as_alone(tmp_path / "out", num_ranks=2)
    check_report(tmp_path, job)
    check_nothing_is_left(tmp_path)

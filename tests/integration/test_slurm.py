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
from harness import CHAIN, chains, chains_alone
from slurm_cluster import NUM_GPUS, SlurmCluster, missing

from hetero import cli
from hetero.errors import ExitCode

OPTIONS = ["--nproc-per-node", "2", "--endpoints-per-host", "1", "--trainer-endpoints", "0", "--log-level", "info"]
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
    pytest.mark.timeout(300),
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
    options: Sequence[str] = OPTIONS,
) -> str:
    """Return the rendered script, with the paths of this checkout."""
    (folder / "out").mkdir()
    command = ["render", "slurm", *render, *options, str(CHAIN), "--", "--output", str(folder / "out"), *arguments]
    assert cli.main(command) == ExitCode.OK
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


def wait_until(condition: object, what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def check_nothing_is_left(folder: Path) -> None:
    wait_until(lambda: not processes_of(folder), f"processes are left: {processes_of(folder)}", 20.0)
    assert not list(folder.glob(".hetero-token*"))


@pytest.mark.parametrize("separate", [False, True], ids=["one srun", "two sruns"])
def test_heterogeneous_job_is_fed_as_one_host_alone(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], separate: bool
) -> None:
    render = [*TWO, *(["--separate-steps"] if separate else [])]
    # Without a stated number there is a rank for each GPU that Slurm gives to the job.
    options = OPTIONS if separate else OPTIONS[2:]
    job = slurm.submit(script_of(capsys, tmp_path, render=render, options=options), tmp_path)
    assert slurm.wait(job) == ("COMPLETED", 0, 0), (tmp_path / "job.out").read_text()
    assert chains(tmp_path / "out") == chains_alone(num_ranks=2)
    log = (tmp_path / "job.out").read_text()
    assert "platform: slurm, from the SLURM_* environment" in log
    report = json.loads(next(tmp_path.glob(f"hetero-slurm-{job}/gpu01/report.json")).read_text())
    assert {group["name"]: group["count"] for group in report["run"]["groups"]} == {"dnn": 1, "data": 2}
    assert report["run"]["placement"] == "heterogeneous"
    check_nothing_is_left(tmp_path)


def test_nodes_of_one_component_are_divided(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_of(capsys, tmp_path, render=["--group", "dnn=CPU:1:2", "--partition", "cpu"])
    text = text.replace("export HETERO_GROUPS=dnn=CPU:1:2", "export HETERO_GROUPS='dnn=CPU:1:1 data=CPU:1:1'")
    job = slurm.submit(text, tmp_path)
    assert slurm.wait(job) == ("COMPLETED", 0, 0), (tmp_path / "job.out").read_text()
    assert chains(tmp_path / "out") == chains_alone(num_ranks=2)
    check_nothing_is_left(tmp_path)


def test_script_that_fails_gives_the_job_its_exit_code(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = slurm.submit(script_of(capsys, tmp_path, "--fail-at", "3", render=TWO), tmp_path)
    assert slurm.wait(job) == ("FAILED", int(ExitCode.SCRIPT_FAILED), 0), (tmp_path / "job.out").read_text()
    check_nothing_is_left(tmp_path)


@pytest.mark.fault("F42")
@pytest.mark.parametrize("ended_by", ["scancel", "time limit"])
def test_job_that_is_ended_stops_as_asked(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], ended_by: str
) -> None:
    text = script_of(capsys, tmp_path, "--epochs", "1000", "--step-s", "0.05", render=TWO)
    if ended_by == "time limit":  # whole minutes; the signal comes 70 s before the second one
        text = text.replace("--signal=TERM@120", "--time=2\n#SBATCH --signal=TERM@70")
    job = slurm.submit(text, tmp_path)
    output = tmp_path / "job.out"
    wait_until(lambda: output.is_file() and "step 3" in output.read_text(), "the training has not begun")
    if ended_by == "scancel":
        slurm.run(["scancel", str(job)])
    state, code, _ = slurm.wait(job)
    check_nothing_is_left(tmp_path)
    assert state == ("CANCELLED" if ended_by == "scancel" else "FAILED")
    assert ended_by == "scancel" or code == 143  # Slurm ends the batch script of a cancelled job itself
    # Both ranks have saved a checkpoint after the same step.
    assert (tmp_path / "out" / "stopped-0").read_text() == (tmp_path / "out" / "stopped-1").read_text()
    assert output.read_text().count("Exited with exit code 143") == 3
    assert "HET-30" not in output.read_text()


@pytest.mark.fault("F42")
def test_data_node_that_is_lost_does_not_end_the_job(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_of(capsys, tmp_path, "--epochs", "6", "--step-s", "0.05", render=TWO)
    job = slurm.submit(text, tmp_path)
    output = tmp_path / "job.out"
    wait_until(lambda: output.is_file() and "step 3" in output.read_text(), "the training has not begun")
    victims = [
        process
        for process in processes_of(tmp_path)
        if "launch" in process.cmdline() and process.environ().get("SLURMD_NODENAME") == "cpu02"
    ]
    assert victims
    for process in victims:
        process.kill()
    assert slurm.wait(job) == ("COMPLETED", 0, 0), output.read_text()
    assert chains(tmp_path / "out") == chains_alone("--epochs", "6", num_ranks=2)
    check_nothing_is_left(tmp_path)

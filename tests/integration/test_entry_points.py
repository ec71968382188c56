"""The launcher in every way that a platform starts it: by its toolkit, per group by torchrun, as process 1."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.integration.arrays_job import ARRAYS, check_fed_as_alone
from tests.support.integration.harness import TIME_SCALE, Job, Start, wait_gone

LAUNCHER = Path(__file__).parents[2] / "launchers" / "launcher.py"
StartHost = Callable[..., Job]


@pytest.fixture
def start_host(start: Start, tmp_path: Path) -> StartHost:
    """Return a function that starts the entry point as a host's platform does: in a folder of the user's, with a tree.

    The hyperparameters are those of SDK 2, the command line is what becomes of them in a shell.
    """
    code = tmp_path / "code"
    code.mkdir()
    for file in (LAUNCHER, ARRAYS):
        shutil.copy(file, code)
    network = f"127.{100 + os.getpid() % 100}.9"
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("".join(f"{network}.{number} algo-{number}\n" for number in (1, 2, 9, 10)))
    outputs = tmp_path / "with a blank"
    outputs.mkdir()

    def start_entry(
        host: str,
        before: Sequence[str] = (sys.executable,),
        *,
        data: str = "algo-10",
        trainers: Sequence[str] = ("algo-9",),
        args: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: Path = code,
    ) -> Job:
        directory = tmp_path / host
        base = directory / "ml"
        groups = {"data_group": ("ml.c5.xlarge", [data])} if data else {}
        groups["dnn_group"] = "ml.p3.2xlarge", trainers
        write_opt_ml(base, host, groups, {"output": str(outputs), **(args or {})})
        token_file = directory / "token"
        token_file.touch(mode=0o600)
        token_file.write_text("shared-secret-of-the-job")
        own = {
            "HETERO_HOSTS_FILE": str(hosts_file),
            "HETERO_TOKEN_FILE": str(token_file),
            "HETERO_TIME_SCALE": str(TIME_SCALE),
            "SAGEMAKER_BASE_DIR": str(base),
            "TRAINING_JOB_NAME": "job-7",
        }
        entry = str(code / "launcher.py") if cwd != code else "launcher.py"
        command = [*before, entry, "--output", *str(outputs).split(), "--hetero_script", "arrays.py"]
        shell = ["env", f"--chdir={cwd}", *command]
        return start(shell, tmp_path, {**own, **(environment or {})})

    return start_entry


Groups = Mapping[str, tuple[str, Sequence[str]]]


def write_opt_ml(base: Path, host: str, named: Groups, args: Mapping[str, object]) -> None:
    """Write what the platform tells a host. Lists of hosts are unordered, as on the platform."""
    config = base / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    (base / "output" / "data").mkdir(parents=True, exist_ok=True)
    groups = [
        {"instance_group_name": name, "instance_type": kind, "hosts": hosts} for name, (kind, hosts) in named.items()
    ]
    every = sorted(name for _, hosts in named.values() for name in hosts)  # algo-10 before algo-2
    document = {"current_host": host, "hosts": every, "instance_groups": groups}
    (config / "resourceconfig.json").write_text(json.dumps(document))
    options = {"hetero_script": "arrays.py", "hetero_framework": "tensorflow"}  # nothing here is torch's
    options |= {"hetero_port": 17803, "hetero_endpoints_per_host": 1}
    options |= {"hetero_nproc_per_node": 2, "sagemaker_program": "launcher.py"}
    encoded = {name: json.dumps(value) for name, value in {**options, **args}.items()}
    (config / "hyperparameters.json").write_text(json.dumps(encoded))


def launchers(job: Job) -> list[psutil.Process]:
    """Return the copies of the launcher, oldest first."""
    return [process for process in job.find("launcher.py") if "torch.distributed.run" not in process.cmdline()]


def failure_of(tmp_path: Path, host: str) -> str:
    return (tmp_path / host / "ml" / "output" / "failure").read_text()


def check_result(tmp_path: Path) -> None:
    """Expect that both ranks have done two epochs of seven steps."""
    results = [json.loads((tmp_path / "with a blank" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [result["steps"] for result in results] == [2 * 7] * 2


def until(folder: Path) -> dict[str, object]:
    """Return hyperparameters of a job that trains until a file ``enough`` exists."""
    return {"until": str(folder / "enough"), "step-s": 0.05}


def check_same_step(tmp_path: Path) -> None:
    """Expect that both ranks wrote after the same step, when the job was asked to stop."""
    results = [json.loads((tmp_path / "with a blank" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0]["steps"] == results[1]["steps"] > 0


def test_toolkit_starts_the_entry_point_and_the_file_of_hyperparameters_counts(
    start_host: StartHost, tmp_path: Path
) -> None:
    data, trainer = start_host("algo-10"), start_host("algo-9")
    assert (trainer.wait(), data.wait()) == (0, 0), trainer.output + data.output
    check_result(tmp_path)
    assert (tmp_path / "algo-9" / "ml" / "output" / "data" / "algo-9" / "report.json").is_file()
    for host, role in (("algo-9", "trainer"), ("algo-10", "data")):
        # Of all hosts one archive is made: each has a separate folder in it.
        (folder,) = (tmp_path / host / "ml" / "output" / "data").iterdir()
        metrics = json.loads((folder / "metrics.json").read_text())
        assert (folder.name, metrics["host"], metrics["role"]) == (host, host, role)
        assert metrics["usage"]["host"] == host
    assert metrics["events"]["batches computed"] >= 2 * 2 * 7


def test_torchrun_of_each_group_starts_copies_of_which_one_works(start_host: StartHost, tmp_path: Path) -> None:
    data = start_host("algo-10", torchrun(tmp_path, 17810))
    trainer = start_host("algo-9", torchrun(tmp_path, 17811))
    assert (trainer.wait(), data.wait()) == (0, 0), trainer.output + data.output
    check_result(tmp_path)
    for job, line in ((data, "serving with 1 endpoint"), (trainer, "starting 2 of 2 ranks")):
        assert sum(line in text for text in job.lines) == 1, job.output
        assert sum("this launcher leads the 2 processes that torchrun" in text for text in job.lines) == 1, job.output
        assert sum(" INFO job job-7: " in text for text in job.lines) == 1, job.output


def test_torchrun_of_a_group_fails_if_the_script_does(start_host: StartHost, tmp_path: Path) -> None:
    args = {"fail-at": 3}
    data = start_host("algo-10", args=args)
    trainer = start_host("algo-9", torchrun(tmp_path, 17813), args=args)
    assert trainer.wait() == 1, trainer.output + data.output
    assert data.wait() == 30, data.output
    failures = [failure_of(tmp_path, host).splitlines()[0] for host in ("algo-9", "algo-10")]
    assert failures == ["HET-30 algo-9: rank 0: the training script raised RuntimeError: training fails on purpose"] * 2


def test_torchrun_of_a_group_is_asked_to_stop_and_no_copy_tells_a_failure(
    start_host: StartHost, tmp_path: Path
) -> None:
    args = until(tmp_path)
    data = start_host("algo-10", args=args)
    trainer = start_host("algo-9", torchrun(tmp_path, 17815), args=args)
    trainer.wait_line("step 5")
    for job in (trainer, data):
        job.process.terminate()  # it hands the signal to every copy
    trainer.wait(), data.wait()
    assert any("hetero_metric endpoint_restarts=0" in line for line in trainer.lines), trainer.output
    check_same_step(tmp_path)
    assert [host for host in ("algo-9", "algo-10") if (tmp_path / host / "ml" / "output" / "failure").exists()] == []


def torchrun(folder: Path, port: int) -> list[str]:
    """Return the start of the command that SDK 2 runs on a group of one host and two GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", "2"]
    return [*command, "--master_addr", "127.0.0.1", "--master_port", str(port), "--log_dir", str(folder / "torchrun")]


def copy_of(local_rank: int) -> dict[str, str]:
    """Return what torchrun says to one of two copies."""
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "algo-9",
        "MASTER_PORT": "7777",
        "RANK": str(local_rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": "2",
    }


def test_copies_end_when_the_one_that_works_is_killed(start_host: StartHost, tmp_path: Path) -> None:
    args = until(tmp_path)
    data = start_host("algo-10", args=args)
    leader = start_host("algo-9", args=args, environment=copy_of(0))
    follower = start_host("algo-9", args=args, environment=copy_of(1))
    leader.wait_line("step 5")
    of_leader = leader.processes()
    leader.process.kill()
    assert follower.wait(300.0) == 32, follower.output
    wait_gone(of_leader)
    assert failure_of(tmp_path, "algo-9") == "HET-32 algo-9: the launcher of this host was lost"
    assert data.wait(300.0) == 32, data.output


def test_copies_of_a_second_run_wait_for_their_own_leader(start_host: StartHost, tmp_path: Path) -> None:
    start = functools.partial(start_host, "algo-9", data="", args={"hetero_nproc_per_node": 1})
    for run in range(2):
        follower = start(environment=copy_of(1))
        follower.wait_line("another launcher process does the work")
        assert follower.process.poll() is None, f"run {run}: took what the first one has left"
        jobs = [follower, start(environment=copy_of(0))]
        assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)


@pytest.mark.netns
@pytest.mark.parametrize("is_stopped", [False, True])
def test_launcher_is_process_1_of_its_container(start_host: StartHost, tmp_path: Path, is_stopped: bool) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare: a container has a process 1 of its own")
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable]
    args = until(tmp_path) if is_stopped else {}
    data = start_host("algo-10", container, args=args, cwd=tmp_path)  # wherever the image has its working directory
    trainer = start_host("algo-9", container, args=args, cwd=tmp_path)
    if is_stopped:
        trainer.wait_line("step 5")
        for job in (trainer, data):
            launchers(job)[-1].send_signal(signal.SIGTERM)
        assert (trainer.wait(), data.wait()) == (143, 143), trainer.output + data.output
        check_same_step(tmp_path)
    else:
        assert (trainer.wait(), data.wait()) == (0, 0), trainer.output + data.output
        check_result(tmp_path)


def told_of(folder: Path, num_ranks: int) -> list[dict[str, str]]:
    """Return what each rank was told by its environment."""
    return [json.loads((folder / f"rank-{rank}.json").read_text())["told"] for rank in range(num_ranks)]


def hosts_of(told: Sequence[Mapping[str, str]]) -> list[str]:
    return [Path(each["SAGEMAKER_BASE_DIR"]).parent.name for each in told]


def places_of(told: Sequence[Mapping[str, str]]) -> list[list[int]]:
    return [[int(each[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")] for each in told]


def test_trainer_hosts_in_any_order_have_ranks_in_the_natural_one(start_host: StartHost, tmp_path: Path) -> None:
    listed = ["algo-10", "algo-9"]  # as a text "algo-10" is less
    jobs = [start_host(host, data="algo-1", trainers=listed) for host in ("algo-1", *listed)]
    assert [job.wait() for job in jobs] == [0] * len(jobs), "\n".join(job.output for job in jobs)
    told, in_order = told_of(tmp_path / "with a blank", 4), ["algo-9", "algo-9", "algo-10", "algo-10"]
    assert hosts_of(told) == in_order
    assert places_of(told) == [[0, 4, 0, 0], [1, 4, 0, 1], [2, 4, 1, 0], [3, 4, 1, 1]]
    assert {each["MASTER_ADDR"].rpartition(".")[2] for each in told} == {"9"}, "not on the first of them"
    report = tmp_path / "algo-9" / "ml" / "output" / "data" / "algo-9" / "report.json"
    ranks = json.loads(report.read_text())["run"]["ranks"]
    assert [(facts["rank"], facts["host"]) for facts in ranks] == list(enumerate(in_order))


def process_of_mpi(rank: int) -> dict[str, str]:
    """Return what Open MPI says to one of four processes, two per host, and what it hands on of its first host."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": str(rank % 2),
        "PMIX_NAMESPACE": "prterun-algo-10-4242@1",
        "SM_CURRENT_HOST": "algo-10",
    }


def test_ranks_are_where_the_environment_of_open_mpi_says(start_host: StartHost, tmp_path: Path) -> None:
    """The processes of mpirun by their environment alone. The real one is in test_mpirun.py."""
    trainers, args = ["algo-10", "algo-9"], {"hetero_nproc_per_node": 1}
    jobs = [start_host("algo-1", data="algo-1", trainers=trainers, args=args)]
    for rank in range(4):
        host = trainers[rank // 2]
        environment = process_of_mpi(rank)
        jobs.append(start_host(host, data="algo-1", trainers=trainers, args=args, environment=environment))
    assert [job.wait() for job in jobs] == [0] * 5, "\n".join(job.output for job in jobs)
    told = told_of(tmp_path / "with a blank", 4)
    assert hosts_of(told) == ["algo-10", "algo-10", "algo-9", "algo-9"]
    assert places_of(told) == [[0, 4, 1, 0], [1, 4, 1, 1], [2, 4, 0, 0], [3, 4, 0, 1]]
    assert {each["MASTER_ADDR"].rpartition(".")[2] for each in told} == {"10"}, "not where rank 0 is"
    check_fed_as_alone(tmp_path / "with a blank", num_ranks=4)
    assert not any("torchrun" in line for job in jobs for line in job.lines)


@pytest.mark.netns
def test_stop_that_process_1_swallows_ends_by_force_and_leaves_whole_checkpoints(
    start_host: StartHost, tmp_path: Path
) -> None:
    """SageMaker's images have a shell as process 1, which gets no SIGTERM of the kernel. Here is one, too.

    The platform kills all of the container two minutes later.
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare: a container has a process 1 of its own")
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"]
    checkpoints = tmp_path / "algo-9" / "ml" / "checkpoints"
    checkpoints.mkdir(parents=True)
    args = {**until(tmp_path), "output": str(checkpoints), "save-every": 7}
    data = start_host("algo-10", args=args)
    trainer = start_host("algo-9", [*container, sys.executable], args=args)
    # Ranks of this script do not wait for each other, and each has its own checkpoint.
    trainer.wait_line("rank 0 epoch 1 step 9")
    trainer.wait_line("rank 1 epoch 1 step 9")
    (process_1,) = psutil.Process(trainer.process.pid).children()
    process_1.terminate()
    step = max(int(line.rpartition(" ")[2]) for line in list(trainer.lines) if ": rank 1 epoch" in line)
    trainer.wait_line(f" step {step + 8}")  # no rank has noticed
    process_1.kill()
    trainer.wait()
    wait_gone(trainer.processes())
    assert data.wait(300.0) == 32, data.output
    assert "no trainer host was heard" in failure_of(tmp_path, "algo-10")
    # The platform keeps the checkpoints and nothing else, and starts the job again.
    for name in ("input", "output"):
        shutil.rmtree(tmp_path / "algo-9" / "ml" / name)
    shutil.rmtree(tmp_path / "algo-10")
    (tmp_path / "enough").touch()
    data, trainer = start_host("algo-10", args=args), start_host("algo-9", args=args)
    assert (trainer.wait(), data.wait()) == (0, 0), trainer.output + data.output
    assert sum("goes on after step" in line for line in trainer.lines) == 2
    check_fed_as_alone(checkpoints, num_ranks=2)
    assert not (tmp_path / "algo-9" / "ml" / "output" / "failure").exists()

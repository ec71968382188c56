"""Jobs of SageMaker requests on simulated hosts: through the training toolkit, a container's own program, or plain."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.launch.job_token import STAGED_FOLDER, TOKEN_NAME
from tests.support.integration.arrays_job import ARRAYS
from tests.support.integration.harness import Job, Start, wait_gone

LAUNCHER = Path(__file__).parents[2] / "launchers" / "launcher.py"
TOOLKIT = Path(__file__).parent / "scripts" / "toolkit.py"
LONG = {"epochs": "1000000", "step-s": "0.05"}
"""Hyperparameters of arrays.py: it goes on until it is ended."""

needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("sagemaker_training") is None, reason="needs sagemaker-training"
)

Rehearse = Callable[..., Job]


def request_of(
    directory: Path, script: Path, *, data: int, trainers: int, hyperparameters: Mapping[str, str]
) -> dict[str, Any]:
    """Return a request as SDK 2 sends it: some data hosts, some trainer hosts, a launcher as entry point."""
    texts = {"hetero_script": script.name, "output": str(directory), "sagemaker_program": "launcher.py"}
    groups = [("data_group", "ml.c5.9xlarge", data), ("dnn_group", "ml.p3.2xlarge", trainers)]
    texts["sagemaker_submit_directory"] = "s3://bucket/source/sourcedir.tar.gz"
    texts["hetero_framework"] = "tensorflow"  # no script here needs torch
    return {
        "TrainingJobName": "rehearsal",
        "AlgorithmSpecification": {"TrainingImage": "pytorch-training:2.5", "TrainingInputMode": "File"},
        "ResourceConfig": {
            "InstanceGroups": [
                {"InstanceGroupName": name, "InstanceType": kind, "InstanceCount": count}
                for name, kind, count in groups
                if count
            ]
        },
        "HyperParameters": {name: json.dumps(text) for name, text in texts.items()} | hyperparameters,
    }


def channel(name: str, group: str, **more: str) -> dict[str, Any]:
    """Return a channel for one group."""
    source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://bucket/{name}", "InstanceGroupNames": [group]}
    source["S3DataDistributionType"] = more.pop("distribution", "FullyReplicated")
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, **more}


@pytest.fixture
def rehearse(start: Start, tmp_path: Path) -> Rehearse:
    """Return a function that starts the job of a request."""

    def start_request(
        *flags: str,
        script: Path = ARRAYS,
        data: int = 1,
        trainers: int = 1,
        request: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **hyperparameters: str,
    ) -> Job:
        directory = tmp_path / "job"
        source_dir = directory / "source"
        source_dir.mkdir(parents=True, exist_ok=True)
        shutil.copy(LAUNCHER, source_dir)
        shutil.copy(script, source_dir)
        document = request_of(directory, script, data=data, trainers=trainers, hyperparameters=hyperparameters)
        document |= request or {}
        (directory / "request.json").write_text(json.dumps(document))
        command = [sys.executable, "-m", "hetero.cli", "simulate", "--request", str(directory / "request.json")]
        command += ["--output-dir", str(directory / "run"), "--source-dir", str(source_dir)]
        return start([*command, "--endpoints-per-host", "1", *flags], directory, environment or {})

    return start_request


def tree(job: Job, host: str) -> Path:
    """Return what is /opt/ml on a host."""
    return job.directory / "run" / "hosts" / host / "ml"


def log(job: Job, host: str) -> str:
    """Return what a host's container has printed."""
    return (tree(job, host).parent / "log.txt").read_text()


def facts(job: Job, what: str) -> list[dict[str, Any]]:
    """Return what processes of a kind have written."""
    return [json.loads(path.read_text()) for path in job.directory.glob(f"{what}-*.json")]


@needs_toolkit
def test_every_host_sees_its_group_ranks_and_channels_through_the_toolkit(rehearse: Rehearse, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("raw", "stream")}
    for folder in folders.values():
        folder.mkdir()
        for number in range(4):
            (folder / f"{number}.txt").write_text(f"{folder.name} {number}\n")
    channels = [
        channel("raw", "data_group", InputMode="FastFile", distribution="ShardedByS3Key"),
        channel("stream", "dnn_group", InputMode="Pipe"),
    ]
    flags = [f"--channel={name}={folder}" for name, folder in folders.items()] + ["--price-profile=seed-2022"]
    job = rehearse(*flags, script=TOOLKIT, data=2, trainers=2, request={"InputDataConfig": channels})
    assert job.wait() == 0, job.output
    groups = {"data_group": ["algo-3", "algo-1"], "dnn_group": ["algo-4", "algo-2"]}
    seen = facts(job, "data") + facts(job, "rank")
    assert {each["current_host"] for each in seen} == {"algo-1", "algo-2", "algo-3", "algo-4"}
    for each in seen:
        group = each["current_instance_group"]
        assert each["current_host"] in groups[group]
        assert each["current_instance_group_hosts"] == groups[group]
        assert (each["instance_groups"], each["is_hetero"]) == (list(groups), True)
        assert each["hosts"] == ["algo-1", "algo-2", "algo-3", "algo-4"]
        assert list(each["channel_input_dirs"]) == (["raw"] if group == "data_group" else ["stream"])
        assert each["hyperparameters"]["hetero_script"] == "toolkit.py"
    ranks = sorted(facts(job, "rank"), key=lambda each: each["rank"])
    assert [(each["rank"], each["world_size"], each["current_host"]) for each in ranks] == [
        (0, 2, "algo-2"),
        (1, 2, "algo-4"),
    ]
    assert sum(each["total"] for each in ranks) == sum(range(32))
    whole = "".join(f"stream {number}\n" for number in range(4))
    assert [each["piped"] for each in ranks] == [[whole, whole]] * 2
    raw = {
        host: sorted(path.name for path in (tree(job, host) / "input/data/raw").iterdir())
        for host in groups["data_group"]
    }
    assert raw == {"algo-1": ["0.txt", "2.txt"], "algo-3": ["1.txt", "3.txt"]}
    assert [path.name for path in (tree(job, "algo-1") / "input/data").iterdir()] == ["raw"]
    report = job.report()
    assert [(group["name"], group["count"]) for group in report["run"]["groups"]] == [
        ("data_group", 2),
        ("dnn_group", 2),
    ]
    assert report["cost"]["hourly"]["value"] == pytest.approx(2 * 1.836 + 2 * 3.825)
    for host in ("algo-1", "algo-2", "algo-3", "algo-4"):
        assert (tree(job, host) / "output" / "success").exists()
        assert "Reporting training SUCCESS" in log(job, host)


@needs_toolkit
def test_token_that_came_with_the_code_is_the_jobs(rehearse: Rehearse, tmp_path: Path) -> None:
    staged = tmp_path / "job" / "source" / STAGED_FOLDER
    staged.mkdir(parents=True)
    (staged / TOKEN_NAME).write_text("no token")
    job = rehearse(data=0)
    assert job.wait() == 22, job.output
    assert "holds no token" in job.failure("algo-1")


@needs_toolkit
def test_killed_rank_fails_the_job_with_one_cause_and_the_toolkit_leaves_the_failure_file(rehearse: Rehearse) -> None:
    job = rehearse(**LONG)
    job.wait_line("step 3")
    next(process for process in job.find("arrays.py", host="algo-2") if "RANK" in process.environ()).kill()
    assert job.wait() == 30, job.output
    lines = {host: job.failure(host).splitlines()[0] for host in ("algo-1", "algo-2")}
    assert len(set(lines.values())) == 1
    assert lines["algo-1"].startswith("HET-30 algo-2: rank 0 killed by SIGKILL")
    for host in lines:
        assert "Failure file exists. Skipping creation" in log(job, host)
        assert "Reporting training FAILURE" in log(job, host)


@needs_toolkit
def test_lost_data_hosts_are_done_without_and_their_processes_are_gone(rehearse: Rehearse, tmp_path: Path) -> None:
    from sagemaker_training import _PYTHON_ERRORS_

    enough = tmp_path / "enough"
    job = rehearse(data=3, until=str(enough), **LONG | {"epochs": "1"})
    job.wait_line("step 10")
    for host, words, patience_s in (
        ("algo-1", "hetero.sagemaker.rehearsal.toolkit", 5.0),
        ("algo-3", "-- launcher.py", 15.0),
    ):
        doomed = [process for process in job.processes() if str(tree(job, host)) in _base_dir(process)]
        (found,) = [process for process in doomed if words in " ".join(process.cmdline())]
        found.kill()
        wait_gone(doomed, patience_s)
    enough.touch()
    assert job.wait() == 0, job.output
    assert job.result(0)["steps"] % 13 == 0, "not whole epochs of 101 samples in batches of 8"
    assert "ExecuteUserScriptError" in job.failure("algo-3")  # only the toolkit could say why
    for host in ("algo-2", "algo-4"):  # what trips the toolkit's log watcher has it collect all that follows
        ours = [line for line in log(job, host).splitlines() if line.startswith("[")]
        assert ours
        assert [line for line in ours if any(name in line for name in _PYTHON_ERRORS_)] == []


@needs_toolkit
def test_sigterm_ends_at_the_toolkit_and_the_hosts_are_killed_after_the_grace(rehearse: Rehearse) -> None:
    job = rehearse(environment={"HETERO_TIME_SCALE": "0.05"}, **LONG)
    job.wait_line("step 3")
    job.process.terminate()
    told = job.wait_lines("process 1 has no handler for SIGTERM", 2)
    steps_then = len([line for line in job.lines if " step " in line])
    killing_s, _ = job.wait_lines("6 s after the request to stop: killing algo-1, algo-2", 1)[0]
    assert killing_s - told[-1][0] > 5.0
    assert len([line for line in job.lines if " step " in line]) > steps_then, "the job should have heard nothing"
    assert job.wait() == 128 + signal.SIGKILL, job.output
    assert not (job.directory / "rank-0.json").exists()


@needs_toolkit
def test_sigterm_to_the_launcher_below_the_toolkit_lets_callbacks_run(rehearse: Rehearse) -> None:
    job = rehearse(hetero_sigterm_ok="true", **LONG)
    job.wait_line("step 3")
    for launcher in job.find("-- launcher.py"):
        launcher.terminate()
    assert job.wait() == 0, job.output
    assert job.result(0)["steps"] >= 3


@pytest.mark.parametrize("through", ["plain", "entry point"])
def test_sigterm_reaches_a_launcher_that_is_process_1(rehearse: Rehearse, through: str) -> None:
    algorithm = {"TrainingImage": "image", "ContainerEntrypoint": ["python3", "/opt/ml/code/launcher.py"]}
    request = {"AlgorithmSpecification": algorithm} if through == "entry point" else {}
    job = rehearse("--through=plain", data=0, request=request, **LONG)
    job.wait_line("step 3")
    job.process.terminate()
    assert job.wait() == 143, job.output
    assert job.result(0)["steps"] >= 3


@pytest.mark.parametrize(
    "entry", [[], ["/bin/bash", "-c", "python3 /opt/ml/code/launcher.py; true"]], ids=["toolkit", "shell"]
)
def test_killed_rehearsal_leaves_no_process(rehearse: Rehearse, entry: list[str]) -> None:
    request = {"AlgorithmSpecification": {"TrainingImage": "image", "ContainerEntrypoint": entry}}
    job = rehearse(request=request, **LONG)
    job.wait_line("step 3")
    processes = job.processes()
    assert len(processes) > 6  # the command; two hosts' process 1 and launcher; agent, rank and endpoint
    job.process.kill()
    wait_gone(processes)


def test_scripts_of_sdk_3_run_in_the_tree_of_their_host(rehearse: Rehearse, tmp_path: Path) -> None:
    drivers = tmp_path / "drivers"
    (drivers / "scripts").mkdir(parents=True)
    (drivers / "scripts" / "install_requirements.py").write_text("raise SystemExit('would install')")
    (drivers / "sm_train.sh").write_text(
        "set -e\ntest -d /opt/ml/input/config\n"
        "python3 /opt/ml/input/data/sm_drivers/scripts/install_requirements.py requirements.txt\n"
        "cd /opt/ml/input/data/code\npython3 launcher.py\n"
    )
    algorithm = {
        "TrainingImage": "image",
        "ContainerEntrypoint": ["/bin/bash"],
        "ContainerArguments": [
            "-c",
            "chmod +x /opt/ml/input/data/sm_drivers/sm_train.sh && bash /opt/ml/input/data/sm_drivers/sm_train.sh",
        ],
    }
    names = ("code", "sm_drivers")
    sources = [
        {"ChannelName": name, "DataSource": {"S3DataSource": {"S3Uri": f"s3://bucket/{name}"}}} for name in names
    ]
    job = rehearse(
        f"--channel=code={tmp_path / 'job' / 'source'}",
        f"--channel=sm_drivers={drivers}",
        script=TOOLKIT,
        data=0,
        request={"AlgorithmSpecification": algorithm, "InputDataConfig": sources},
    )
    assert job.wait() == 0, job.output
    assert len(facts(job, "rank")) == 1
    assert "a rehearsal does not install" in job.output
    assert "would install" in (drivers / "scripts" / "install_requirements.py").read_text(), (
        "the user's own was changed"
    )


def _base_dir(process: psutil.Process) -> str:
    return process.environ().get("SAGEMAKER_BASE_DIR", "")

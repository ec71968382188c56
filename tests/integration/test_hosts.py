"""Hosts in trouble: names that come late, full disks, few files, taken ports, a log that nobody reads."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import Job, StartJob, StartLauncher, sweep

DNN = "dnn_group=ml.p3.2xlarge:1"
SLOW = ["--num-samples", "100000", "--step-s", "0.05"]


def failure(job: Job) -> str:
    """Return the failure file of a launcher that was started by itself."""
    return (job.directory / "ml" / "output" / "failure").read_text()


@pytest.mark.fault("F15")
def test_own_name_that_is_resolved_late_is_waited_for(start_launcher: StartLauncher, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    known = hosts.read_text()
    hosts.write_text("")
    trainer = start_launcher("algo-2", "--start-timeout", "120")
    line = trainer.wait_line("waiting for the address of algo-2")
    assert "algo-2" in line
    data = start_launcher("algo-1", "--start-timeout", "120")
    data.wait_line("waiting for the address of algo-1")
    hosts.write_text(known)
    assert trainer.wait() == 0, trainer.output
    assert data.wait() == 0, data.output


@pytest.mark.fault("F15")
def test_own_name_that_is_never_resolved_is_an_error_about_names(start_launcher: StartLauncher, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("")
    trainer = start_launcher("algo-2", "--start-timeout", "1")
    assert trainer.wait() == 10, trainer.output
    assert "algo-2" in failure(trainer)


@pytest.mark.fault("F15")
def test_request_to_stop_while_the_own_name_is_not_resolved(start_launcher: StartLauncher, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("")
    trainer = start_launcher("algo-2")
    trainer.wait_line("waiting for the address")
    trainer.process.terminate()
    assert trainer.wait(20.0) == 143, trainer.output


@pytest.mark.fault("F32")
def test_hosts_with_different_options_end_naming_both_values(start_launcher: StartLauncher) -> None:
    trainer = start_launcher("algo-2", "--job-restarts", "2")
    data = start_launcher("algo-1", "--job-restarts", "1")
    assert trainer.wait() == 11, trainer.output
    assert data.wait() == 11, data.output
    assert failure(trainer).splitlines()[0] == failure(data).splitlines()[0]
    assert "job_restarts" in failure(trainer)


@pytest.mark.fault("F11")
def test_killed_trainer_launcher_orphans_the_data_host(start_launcher: StartLauncher) -> None:
    data = start_launcher("algo-1", args=SLOW)
    trainer = start_launcher("algo-2", args=SLOW)
    trainer.wait_line("step 5")
    trainer.process.kill()
    assert data.wait(60.0) == 32, data.output
    assert "no trainer host was heard" in failure(data)


@pytest.mark.fault("F6")
def test_trainer_launcher_that_stands_still_ends_the_job_and_itself(start_job: StartJob, tmp_path: Path) -> None:
    flag = tmp_path / "stand-still"
    site = tmp_path / "site"
    site.mkdir()
    # The product has no switch for this: the interpreter of one launcher gets a signal handler that never returns.
    (site / "sitecustomize.py").write_text(
        "import os, signal, sys, time\n"
        "if os.environ.get('SM_CURRENT_HOST') == 'algo-2' and 'launch' in getattr(sys, 'orig_argv', []):\n"
        "    def stand_still(*_):\n"
        f"        open({str(flag)!r}, 'w').close()\n"
        "        time.sleep(600)\n"
        "    signal.signal(signal.SIGUSR2, stand_still)\n"
    )
    job = start_job(
        ["data_group=ml.c5.9xlarge:1", "dnn_group=ml.p3.2xlarge:2"],
        "--endpoints-per-host",
        "1",
        "--nproc-per-node",
        "1",
        args=SLOW,
        environment={
            "HETERO_TIME_SCALE": "0.2",
            "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
    )
    job.wait_line("step 5")
    job.find("hetero.cli launch", host="algo-2")[0].send_signal(signal.SIGUSR2)
    assert job.wait(60.0) != 0, job.output
    assert flag.exists()
    for host in ("algo-1", "algo-3"):
        assert "trainer host algo-2 stood still" in job.failure(host)
    assert "the main loop of this launcher has stood still" in job.output
    assert "stand_still" in job.output  # its stack


@pytest.mark.fault("F30")
def test_port_held_by_another_run_is_told_by_its_process_and_run(start_launcher: StartLauncher) -> None:
    first = start_launcher("algo-2", "--start-timeout", "120")
    first.wait_line("waiting for")
    second = start_launcher("algo-2", "--start-timeout", "120")
    assert second.wait() == 23, second.output
    assert f"process {first.process.pid} (" in failure(second)
    first.process.terminate()
    assert first.wait(20.0) == 143


@pytest.fixture
def lone_launcher(tmp_path: Path) -> Any:
    """Return a function that gives the command and environment of a homogeneous job of one host."""
    cluster = tmp_path / "cluster.json"
    group = {"instance_group_name": "dnn", "instance_type": "ml.p3.2xlarge", "hosts": ["127.0.0.1"]}
    cluster.write_text(json.dumps({"instance_groups": [group]}))
    (tmp_path / "ml" / "output").mkdir(parents=True)

    def command(script: str, *flags: str) -> tuple[list[str], dict[str, str]]:
        path = tmp_path / "script.py"
        path.write_text(script)
        arguments = ["--cluster-file", str(cluster), "--host", "127.0.0.1", "--port", "17804", *flags, str(path)]
        environment = {
            **os.environ,
            "SAGEMAKER_BASE_DIR": str(tmp_path / "ml"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        return [sys.executable, "-m", "hetero.cli", "launch", "--nproc-per-node", "1", *arguments], environment

    return command


TALKS = """
import sys, time
for number in range(40_000):
    print(f"{number:06d}", "x" * 300)
print("done", flush=True)
"""


@pytest.mark.fault("F37")
def test_log_that_nobody_reads_does_not_hold_up_training(lone_launcher: Any, tmp_path: Path) -> None:
    command, environment = lone_launcher(TALKS)
    read_end, write_end = os.pipe()
    try:
        with subprocess.Popen(command, env=environment, stdout=write_end, stderr=write_end) as process:
            assert process.wait(90.0) == 0  # 12 MB into a pipe of 64 KiB
    finally:
        os.close(read_end)
        os.close(write_end)
    (report,) = tmp_path.rglob("report.json")
    assert json.loads(report.read_text())["run"]["events"]["log lines dropped"] > 10_000


@pytest.mark.fault("F37")
def test_log_whose_reader_has_gone_does_not_hold_up_training(lone_launcher: Any) -> None:
    command, environment = lone_launcher(TALKS)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with subprocess.Popen(command, env=environment, stdout=write_end, stderr=write_end) as process:
        os.close(write_end)
        assert process.wait(90.0) == 0


@pytest.mark.fault("F29")
def test_too_few_files_is_an_error_that_names_the_limit(lone_launcher: Any, tmp_path: Path) -> None:
    command, environment = lone_launcher("")
    done = subprocess.run(
        command,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    assert done.returncode == 24, done.stderr
    text = (tmp_path / "ml" / "output" / "failure").read_text()
    assert "may open 64 files" in text
    assert "ulimit" in text


def test_error_that_nobody_expected_is_said_with_its_code(lone_launcher: Any, tmp_path: Path) -> None:
    command, environment = lone_launcher("")
    environment["HETERO_WORK_DIR"] = str(tmp_path / "absent")
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 40, done.stderr
    assert (tmp_path / "ml" / "output" / "failure").read_text().startswith("HET-40 127.0.0.1: an error inside hetero")


@pytest.mark.fault("F27")
def test_report_that_cannot_be_written_does_not_change_the_end(lone_launcher: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "report.json").mkdir()  # root-free: as a full disk, it takes no report
    command, environment = lone_launcher("print('trained')", "--output-dir", str(folder))
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"the report could not be written to {folder}" in done.stderr


def test_folder_of_a_killed_simulation_is_removed_by_the_next(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job([DNN], args=["--step-s", "30"])
    job.wait_line("starting 1 of 1 ranks")
    left = list((tmp_path / "tmp").glob("hetero-simulate-*"))
    assert len(left) == 1
    job.process.kill()
    job.process.wait()
    sweep(job.marker, job.output)
    assert left[0].exists()
    following = start_job([DNN])
    assert following.wait() == 0, following.output
    assert list((tmp_path / "tmp").glob("hetero-*")) == []


def test_processes_of_a_killed_simulation_are_gone_at_once(start_job: StartJob) -> None:
    job = start_job(["data_group=ml.c5.9xlarge:1", DNN], "--endpoints-per-host", "1", args=["--step-s", "30"])
    job.wait_line("starting 1 of 1 ranks")
    processes = [process for process in job.processes() if process.pid != job.process.pid]
    job.process.kill()
    job.process.wait()
    gone, alive = psutil.wait_procs(processes, timeout=60.0)
    assert alive == []
    assert gone

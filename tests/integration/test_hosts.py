"""Hosts in trouble: names that come late, full disks, few files, taken ports, a log without a reader."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero import __version__
from hetero.config import Timings
from hetero.system.cgroups import memory_use
from tests.support.integration.harness import (
    DNN,
    MARKER,
    SLOW,
    WITHOUT_TORCH,
    StartJob,
    StartLauncher,
    failure,
    sweep,
    wait_gone,
)

DATA = "data_group=ml.c5.9xlarge:1"


@pytest.mark.fault("F15")
def test_own_name_that_is_resolved_late_is_waited_for(start_launcher: StartLauncher, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    known = hosts.read_text()
    hosts.write_text("")
    trainer = start_launcher("algo-2", "--start-timeout", "120", script=WITHOUT_TORCH)
    line = trainer.wait_line("waiting for the address of algo-2")
    assert "algo-2" in line
    data = start_launcher("algo-1", "--start-timeout", "120", script=WITHOUT_TORCH)
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
    assert trainer.wait(300.0) == 143, trainer.output


@pytest.mark.fault("F32")
@pytest.mark.parametrize(
    ("name", "on_data", "on_trainer"),
    [pytest.param("job_restarts", "1", "2", marks=pytest.mark.long), ("hetero", "9.0.0", __version__)],
)
def test_hosts_with_different_options_end_naming_both_values(
    start_launcher: StartLauncher, tmp_path: Path, name: str, on_data: str, on_trainer: str
) -> None:
    flags: list[list[str]] = [[], []]
    environment = {}
    if name == "hetero":
        # Another release, in this one's place: only the interpreters of one host import this.
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(f"import hetero\nhetero.__version__ = {on_data!r}\n")
        environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    else:
        flags = [["--job-restarts", on_trainer], ["--job-restarts", on_data]]
    trainer = start_launcher("algo-2", *flags[0])
    data = start_launcher("algo-1", *flags[1], environment=environment)
    assert trainer.wait() == 11, trainer.output
    assert data.wait() == 11, data.output
    first_line = failure(trainer).splitlines()[0]
    assert first_line == failure(data).splitlines()[0]
    # The host that noticed it first logs it.
    texts = (
        f"algo-1 has {name} {on_data}, algo-2 has {on_trainer};",
        f"algo-2 has {name} {on_trainer}, algo-1 has {on_data};",
    )
    assert any(text in first_line for text in texts), first_line


@pytest.mark.fault("F11")
def test_killed_trainer_launcher_orphans_the_data_host(start_job: StartJob, measured: Any) -> None:
    scale = 0.1
    environment = {"HETERO_TIME_SCALE": str(scale)}
    job = start_job([DATA, DNN], "--endpoints-per-host", "1", args=SLOW, environment=environment)
    job.wait_line("step 5")
    assert job.find("hetero.launch.ranks.rank", host="algo-2")
    (launcher,) = job.find("hetero.cli launch", host="algo-2")
    of_trainer = [process for process in job.find(host="algo-2") if process != launcher]
    of_data_host = job.find(host="algo-1")
    begin_s = time.monotonic()
    launcher.kill()
    measured("ranks_gone_s", wait_gone(of_trainer))
    wait_gone(of_data_host)
    data_host_gone_s = time.monotonic() - begin_s
    measured("data_host_gone_s", data_host_gone_s)
    # Promised: 60 s from the silence of a host. 45 of them, which scale, are the time until all trainers count as lost.
    assert data_host_gone_s < Timings.scaled(scale).orphan_s + 15.0
    assert job.wait(300.0) == 137, job.output
    assert job.failure("algo-1").startswith("HET-32 ")
    assert "no trainer host was heard" in job.failure("algo-1")


WAITS = """
import time
import hetero

@hetero.dataset
def nothing():
    return []

if __name__ == "__main__":
    print("in the midst of it", flush=True)
    time.sleep(600)
"""


@pytest.mark.fault("F6")
def test_trainer_launcher_that_stands_still_ends_the_job_and_itself(start_job: StartJob, tmp_path: Path) -> None:
    script, flag = tmp_path / "script.py", tmp_path / "stand-still"
    script.write_text(WAITS)
    site = tmp_path / "site"
    site.mkdir()
    # The product lacks a switch for this. The interpreter of one launcher gets a signal handler that never returns.
    (site / "sitecustomize.py").write_text(
        "import os, signal, sys, time\n"
        "if os.environ.get('SM_CURRENT_HOST') == 'algo-2' and 'launch' in getattr(sys, 'orig_argv', []):\n"
        "    def stand_still(*_):\n"
        f"        open({str(flag)!r}, 'w').close()\n"
        "        time.sleep(600)\n"
        "    signal.signal(signal.SIGUSR2, stand_still)\n"
    )
    job = start_job(
        [DATA, "dnn_group=ml.p3.2xlarge:2"],
        "--endpoints-per-host",
        "1",
        "--nproc-per-node",
        "1",
        script=script,
        environment={
            "HETERO_TIME_SCALE": "0.2",
            "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
    )
    job.wait_lines("in the midst of it", 2)
    job.find("hetero.cli launch", host="algo-2")[0].send_signal(signal.SIGUSR2)
    assert job.wait(300.0) != 0, job.output
    assert flag.exists()
    for host in ("algo-1", "algo-3"):
        assert "trainer host algo-2 stood still" in job.failure(host)
    assert "the main loop of this launcher has stood still" in job.output
    assert "stand_still" in job.output  # its stack


@pytest.mark.fault("F30")
@pytest.mark.fault("F31")
def test_port_held_by_another_run_is_told_by_its_process_and_run(start_launcher: StartLauncher) -> None:
    first = start_launcher("algo-2", "--start-timeout", "120", environment={"HETERO_JOB_ID": "job-a"})
    first.wait_line("waiting for")
    second = start_launcher("algo-2", "--start-timeout", "120", environment={"HETERO_JOB_ID": "job-b"})
    assert second.wait() == 23, second.output
    assert f"process {first.process.pid} (" in failure(second)
    assert " of the job job-a listens on it" in failure(second)
    first.process.terminate()
    assert first.wait(300.0) == 143


@pytest.mark.fault("F31")
def test_hosts_of_two_jobs_at_one_port_say_whose_the_other_is(start_launcher: StartLauncher) -> None:
    trainer = start_launcher("algo-2", "--start-timeout", "120", environment={"HETERO_JOB_ID": "job-a"})
    data = start_launcher("algo-1", "--start-timeout", "120", environment={"HETERO_JOB_ID": "job-b"})
    advice = "give each job that runs there another --port"
    trainer.wait_line(f"this server belongs to job job-b, this host belongs to job job-a; {advice}")
    data.wait_line(f"this server belongs to job job-a, this host belongs to job job-b; {advice}")
    for job in (data, trainer):
        job.process.terminate()
    assert (data.wait(300.0), trainer.wait(300.0)) == (143, 143), data.output + trainer.output


@pytest.fixture
def lone_launcher(tmp_path: Path) -> Iterator[Any]:
    """Return a function that gives the command and environment of a homogeneous job. No process may be left."""
    marker, temporary = uuid.uuid4().hex, tmp_path / "tmp"
    temporary.mkdir()
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
            "TMPDIR": str(temporary),
            MARKER: marker,
        }
        return [sys.executable, "-m", "hetero.cli", "launch", "--nproc-per-node", "1", *arguments], environment

    yield command
    sweep(marker)
    assert [path for path in temporary.iterdir() if not path.name.startswith("pymp-")] == [], "temporary files are left"


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
            assert process.wait(300.0) == 0  # 12 MB into a pipe of 64 KiB
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
        assert process.wait(300.0) == 0


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


RAISES = """
raise RuntimeError("fails on purpose")
"""

FILLS = """
import os
with open(os.path.join(os.environ["SAGEMAKER_BASE_DIR"], "output", "checkpoint"), "wb", buffering=0) as file:
    while True:
        file.write(bytes(4096))
"""


@pytest.mark.fault("F26")
def test_failure_file_that_cannot_be_written_is_said_and_the_exit_code_is_the_causes(
    lone_launcher: Any, tmp_path: Path
) -> None:
    (tmp_path / "ml" / "output" / "failure").mkdir()  # root-free: as a full disk, it takes no text
    command, environment = lone_launcher(RAISES)
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 30, done.stderr
    line = "HETERO_FAILURE HET-30 127.0.0.1: rank 0: the training script raised RuntimeError: fails on purpose"
    assert line in done.stderr.splitlines()


@pytest.mark.fault("F26")
def test_failure_file_on_a_disk_that_the_script_has_filled_takes_the_reserve(
    lone_launcher: Any, tmp_path: Path
) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace: root")
    command, environment = lone_launcher(FILLS)
    disk = tmp_path / "ml" / "output"
    mount = f'mount -t tmpfs -o size=64k none {disk} || exit 99; "$@"; status=$?; cat {disk}/failure; exit $status'
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", mount, "-", *command],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 30, done.stderr
    cause = "HET-30 127.0.0.1: rank 0: the training script raised OSError: [Errno 28] No space left on device"
    assert done.stdout.splitlines()[0] == cause
    assert "HETERO_FAILURE" not in done.stderr


GROWS = """
held = []
while True:
    held.append(b"x" * 2**24)
"""
CGROUPS = Path("/sys/fs/cgroup")
MEMORY_BYTES = 2**30


@pytest.fixture
def memory_group() -> Iterator[tuple[Path, Path]]:
    """Yield a control group with little memory, and the place where a container would see it."""
    first_version = CGROUPS / "memory"
    if first_version.is_dir():
        place = first_version
        limit, swap, peak = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes"
    else:
        place, limit, swap, peak = CGROUPS, "memory.max", "memory.swap.max", "memory.peak"
    group = place / f"hetero-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs root and control groups that can be made: {error}")
    try:
        if not ((group / limit).exists() and (group / peak).exists()):
            pytest.skip("the memory of control groups is not limited here, or its peak not known")
        (group / limit).write_text(str(MEMORY_BYTES))
        if (group / swap).exists():
            (group / swap).write_text("0" if swap == "memory.swap.max" else str(MEMORY_BYTES))
        yield group, place
    finally:
        deadline_s = time.monotonic() + 10.0
        while group.exists() and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):  # until the last of its processes is reaped
                group.rmdir()
            time.sleep(0.02)


@pytest.mark.fault("F10")
def test_rank_that_outgrows_the_memory_of_its_container_is_told_with_the_figures(
    lone_launcher: Any, memory_group: tuple[Path, Path], tmp_path: Path
) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace: root")
    command, environment = lone_launcher(GROWS)
    # As in a container, whose own group is all that it sees.
    contain = 'mount --bind $1 $2 && shift 2 && exec "$@"'
    enter = f"echo $$ > $1/cgroup.procs && exec unshare -m bash -c '{contain}' - \"$@\""
    done = subprocess.run(
        ["bash", "-c", enter, "-", *map(str, memory_group), *command],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 30, done.stderr
    cause = (
        "HET-30 127.0.0.1: rank 0 killed by SIGKILL, likely out of memory "
        "(peak of its control group: 1.0 GiB of 1.0 GiB allowed)"
    )
    assert (tmp_path / "ml" / "output" / "failure").read_text().splitlines()[0] == cause


def test_memory_of_a_process_is_that_of_its_own_group_where_those_of_all_are_seen(
    memory_group: tuple[Path, Path],
) -> None:
    group, _ = memory_group
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            (group / "cgroup.procs").write_text(str(process.pid))
            use = memory_use(Path(f"/proc/{process.pid}"))
        finally:
            process.kill()
    assert use is not None
    assert (use.limit_bytes, use.is_own) == (MEMORY_BYTES, True)
    assert use.peak_bytes <= MEMORY_BYTES


def test_folder_of_a_killed_simulation_is_removed_by_the_next(start_job: StartJob, tmp_path: Path) -> None:
    script, later = tmp_path / "script.py", tmp_path / "later.py"
    script.write_text(WAITS)
    later.write_text("print('trained')")
    job = start_job([DNN], script=script)
    job.wait_line("starting 1 of 1 ranks")
    left = list((tmp_path / "tmp").glob("hetero-simulate-*"))
    assert len(left) == 1
    job.process.kill()
    job.process.wait()
    sweep(job.marker, job.output)
    assert left[0].exists()
    following = start_job([DNN], script=later)
    assert following.wait() == 0, following.output
    assert list((tmp_path / "tmp").glob("hetero-*")) == []


def test_processes_of_a_killed_simulation_are_gone_at_once(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITS)
    job = start_job([DATA, DNN], "--endpoints-per-host", "1", script=script)
    job.wait_line("in the midst of it")
    processes = [process for process in job.processes() if process.pid != job.process.pid]
    job.process.kill()
    job.process.wait()
    gone, alive = psutil.wait_procs(processes, timeout=300.0)
    assert alive == []
    assert gone

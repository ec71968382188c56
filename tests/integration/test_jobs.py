"""Simulated jobs end to end: same bytes whatever the placement, whatever fails."""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.audit.reading import read_ledger
from hetero.report import compare, load_report, render_comparison
from tests.support.integration.harness import (
    DNN,
    TORCH_CHAIN,
    Job,
    StartJob,
    audit,
    chains,
    chains_alone,
    data,
    wait_gone,
)

LEASE_S = 3.0
"""The shortest there is."""

TWO_TRAINERS = "dnn_group=ml.p3.2xlarge:2"
PLACEMENTS = {
    "none": ([DNN], "2", (), ()),
    "remote": ([data(1), DNN], "2", (), ()),
    "hybrid": ([data(1), TWO_TRAINERS], "1", ("--trainer-endpoints", "1"), ("--gloo",)),
}
"""Two ranks each: groups, ranks per host, further flags, arguments of torch_chain.py."""

pytestmark = pytest.mark.timeout(800)  # the first test that asks a shared job also waits for it


def check_exactly_once(job: Job, num_ranks: int, *, num_samples: int, epochs: int, batch_size: int) -> None:
    """Every sample of every epoch once over all ranks, plus the padding."""
    results = [job.result(rank) for rank in range(num_ranks)]
    padding = -num_samples % num_ranks
    per_epoch = -(-num_samples // (num_ranks * batch_size))
    for result in results:
        assert result["len"] == per_epoch
        assert result["steps"] == epochs * per_epoch
    for epoch in range(epochs):
        counts: collections.Counter[int] = collections.Counter()
        for result in results:
            for batch in result["indices"][epoch * per_epoch : (epoch + 1) * per_epoch]:
                counts.update(batch)
        assert set(counts) == set(range(num_samples))
        assert sum(counts.values()) == num_samples + padding


@pytest.fixture(scope="module")
def placed(start_shared_job: StartJob) -> dict[str, Job]:
    """Return a finished job of each placement."""
    jobs = {}
    for name, (groups, num_ranks, flags, args) in PLACEMENTS.items():
        fixed = ("--endpoints-per-host", "1", "--nproc-per-node", num_ranks, "--audit")
        jobs[name] = start_shared_job(groups, *fixed, *flags, script=TORCH_CHAIN, args=args)
        jobs[name].wait_line("step 1")  # the next one imports while this one ends
    for job in jobs.values():
        assert job.wait() == 0, job.output
    return jobs


@pytest.fixture(scope="module")
def alone(shared_folder: Path) -> Path:
    """Return the folder with the output of both ranks, ledgers included, without launchers and data hosts."""
    folder = shared_folder / "alone"
    folder.mkdir()
    for rank in ("0", "1"):
        environment = {**os.environ, "HETERO_AUDIT_DIR": str(folder / "ledgers"), "RANK": rank, "WORLD_SIZE": "2"}
        subprocess.run([sys.executable, str(TORCH_CHAIN), "--output", str(folder)], env=environment, check=True)
    return folder


@pytest.mark.fault("F36")
@pytest.mark.parametrize(
    ("name", "placement"), [("none", "homogeneous"), ("remote", "heterogeneous"), ("hybrid", "hybrid")]
)
def test_chain_any_placement_is_the_same(placed: dict[str, Job], alone: Path, name: str, placement: str) -> None:
    check_exactly_once(placed[name], 2, num_samples=101, epochs=2, batch_size=8)
    assert chains(placed[name].directory) == chains(alone)
    assert placed[name].report()["run"]["placement"] == placement


@pytest.mark.fault("F36")
def test_report_of_a_job_without_data_hosts_is_the_baseline_of_the_others(placed: dict[str, Job]) -> None:
    assert "batches computed" not in placed["none"].report()["run"]["events"]
    reports = [load_report(placed[name].directory / "run") for name in ("none", "remote")]
    comparison = render_comparison(compare(*reports))
    assert comparison.index("homogeneous") < comparison.index("heterogeneous"), comparison


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("groups", "flags"),
    [([DNN], ()), ([data(2), DNN], ()), ([data(4), DNN], ()), ([data(2), DNN], ("--trainer-endpoints", "1"))],
    ids=["none", "two", "four", "hybrid"],
)
def test_chain_any_number_of_data_hosts_is_the_same(
    start_job: StartJob, num_ranks: int, groups: list[str], flags: tuple[str, ...]
) -> None:
    flags = ("--endpoints-per-host", "1", "--nproc-per-node", str(num_ranks), *flags)
    job = start_job(groups, *flags, script=TORCH_CHAIN)
    assert job.wait() == 0, job.output
    check_exactly_once(job, num_ranks, num_samples=101, epochs=2, batch_size=8)
    assert chains(job.directory, num_ranks) == chains_alone(num_ranks=num_ranks, script=TORCH_CHAIN)


def test_audit_of_jobs_with_and_without_data_hosts_says_the_same(placed: dict[str, Job]) -> None:
    plain, remote = (placed[name].directory / "run" for name in ("none", "remote"))
    # Beside the report, on the host that the ranks ran on.
    (host,) = [path.parent for path in remote.rglob("report.json") if path.parent != remote]
    assert {path.name for path in host.glob("ledger-*")} == {"ledger-rank-0.jsonl", "ledger-rank-1.jsonl"}
    status, text = audit(plain, remote)
    assert (status, "The same data: 28 batches are equal bit for bit." in text) == (0, True), text


def test_audit_of_a_job_and_of_a_script_without_a_launcher_says_the_same(placed: dict[str, Job], alone: Path) -> None:
    status, text = audit(alone / "ledgers", placed["remote"].directory / "run")
    assert (status, "The same data: 28 batches are equal bit for bit." in text) == (0, True), text


@pytest.mark.fault("F22")
def test_batches_that_arrive_damaged_wherever_they_come_from_end_the_job_naming_the_peer(start_job: StartJob) -> None:
    job = start_job(
        [data(1), DNN],
        "--endpoints-per-host",
        "2",
        args=["--batch-size", "64"],  # the images are its largest part, and that is what is damaged
        environment={"HETERO_FAULTS": "send:corrupt:p=1"},
    )
    assert job.wait() == 35, job.output
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2)}
    assert len(first_lines) == 1
    pattern = r"HET-35 algo-2: rank 0: a batch arrived damaged 3 times, last from algo-1/[01] \(127\.[\d.]+:\d+\): "
    assert re.match(pattern, first_lines.pop()), job.failure("algo-2")


@pytest.mark.fault("F8")
def test_trainer_that_stands_still_for_longer_than_a_lease_goes_on_with_the_same_hosts(start_job: StartJob) -> None:
    job = start_job(
        [data(1), DNN],
        "--endpoints-per-host",
        "1",
        args=["--num-samples", "400", "--epochs", "1", "--step-s", "0.02"],
        environment={"HETERO_TIME_SCALE": "0.2"},
    )
    job.wait_line("step 10")
    (rank,) = job.find("hetero.launch.ranks.rank")
    rank.send_signal(signal.SIGSTOP)  # in the middle of a step
    try:
        time.sleep(1.5 * LEASE_S)  # the stall itself
        assert rank.status() == psutil.STATUS_STOPPED
    finally:
        rank.send_signal(signal.SIGCONT)
    assert job.wait() == 0, job.output
    check_exactly_once(job, 1, num_samples=400, epochs=1, batch_size=8)
    assert "fell silent" not in job.output  # launchers keep each other's leases
    events = job.report()["run"]["events"]
    assert [events[name] for name in ("endpoint_losses", "failovers", "retries", "endpoint restarts")] == [0] * 4


@pytest.fixture(scope="module")
def raised(start_shared_job: StartJob) -> tuple[Job, float]:
    """Return an ended job whose script raised on the second trainer host, and how long the end took."""
    flags = ("--endpoints-per-host", "1", "--nproc-per-node", "1", "--audit")
    args = ["--gloo", "--fail-at", "3", "--fail-rank", "1"]
    job = start_shared_job([data(1), TWO_TRAINERS], *flags, script=TORCH_CHAIN, args=args)
    assert job.wait() == 30, job.output
    wait_gone(job.processes())
    return job, time.monotonic() - float((job.directory / "failed-at").read_text())


@pytest.mark.fault("F9")
def test_training_script_raises_every_host_ends_within_ten_seconds(raised: tuple[Job, float], measured: Any) -> None:
    job, shutdown_s = raised
    measured("shutdown_s", shutdown_s)
    assert shutdown_s < 10.0  # promised: from the exception until every process of every group is gone
    assert "rank 1: " in job.output


@pytest.mark.fault("F9")
@pytest.mark.parametrize("host", ["algo-1", "algo-2", "algo-3"])
def test_cause_is_the_exception_not_the_connection_that_broke_on_another_host(
    raised: tuple[Job, float], host: str
) -> None:
    first_line = raised[0].failure(host).splitlines()[0]
    assert first_line == "HET-30 algo-3: rank 1: the training script raised RuntimeError: training fails on purpose"


def test_output_folder_of_a_running_simulation_is_refused(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    job = start_job([DNN], script=script)
    job.wait_line("starting 1 of 1 ranks")
    folder = str(job.directory / "run")
    other = start_job([DNN], "--output-dir", folder, script=script)
    assert other.wait() == 2, other.output
    assert folder in other.output
    job.process.send_signal(signal.SIGINT)
    job.wait_line("stopping: waiting for")
    job.process.send_signal(signal.SIGINT)
    assert job.wait(300.0) != 0


@pytest.fixture(scope="module")
def killed(start_shared_job: StartJob) -> tuple[Job, list[psutil.Process]]:
    """Return an ended homogeneous job with a killed rank, and the processes that outlived it."""
    args = ["--gloo", "--kill-at", "3", "--fail-rank", "1", "--num-workers", "1"]
    job = start_shared_job([DNN], "--nproc-per-node", "2", "--audit", script=TORCH_CHAIN, args=args)
    assert job.wait() == 30, job.output
    return job, job.processes()


@pytest.mark.fault("F10")
def test_rank_killed_is_named_and_never_a_success(killed: tuple[Job, list[psutil.Process]]) -> None:
    first_line = killed[0].failure("algo-1").splitlines()[0]
    assert "rank 1 killed by SIGKILL" in first_line
    assert "likely out of memory" not in first_line


def test_killed_rank_of_a_homogeneous_job_leaves_no_workers(killed: tuple[Job, list[psutil.Process]]) -> None:
    assert killed[1] == []


@pytest.mark.parametrize(("kind", "has_end"), [("raised", True), ("killed", False)])
def test_audit_of_a_job_that_failed_says_where_it_ends(
    request: pytest.FixtureRequest, alone: Path, kind: str, has_end: bool
) -> None:
    run = request.getfixturevalue(kind)[0].directory / "run"
    (path,) = run.rglob("ledger-rank-1.jsonl")
    record = read_ledger(path)
    assert (len(record.entries), record.has_end, record.damage) == (3, has_end, "")
    status, text = audit(alone / "ledgers", run)
    assert status == 1, text
    assert "B ends before epoch 0, position " in text
    assert "they part" not in text


DATA_SET_FAULTS = ("factory", "raise_at=17", "unsupported=1", "out_of_range=1", "not_json", "by_host=1", "listing=1")


@pytest.fixture(scope="module")
def data_set_errors(start_shared_job: StartJob) -> tuple[Job, dict[str, dict[str, Any]]]:
    """Return a job whose last data set failed, and the code and text of each error that its script caught before."""
    script = TORCH_CHAIN.with_name("data_set_errors.py")
    args = [*DATA_SET_FAULTS, "descriptors=1"]
    job = start_shared_job([data(2), DNN], "--endpoints-per-host", "1", script=script, args=args)
    assert job.wait() == 34, job.output
    caught = [json.loads(line[line.index('{"faults"') :]) for line in job.lines if '{"faults"' in line]
    return job, {error["faults"]: error for error in caught}


@pytest.mark.parametrize(
    ("faults", "code", "words"),
    [
        ("factory", 34, ["the factory fails on purpose", " while it was built", "Traceback", "torch_chain.py"]),
        ("raise_at=17", 34, ["sample 17 is broken on purpose", "/0 at sample 17", "Traceback", "torch_chain.py"]),
        ("unsupported=1", 34, ["['path'][0]", "Path", "/0 while the batch was encoded"]),
        ("out_of_range=1", 34, ["101", "out of range", "/0 at sample"]),
        ("not_json", 2, ["num_samples", "Path"]),
        ("by_host=1", 11, ["differ", "102", "103"]),
        ("listing=1", 11, ["differ", "fingerprint"]),
    ],
)
@pytest.mark.fault("F2")
def test_dataset_at_fault_is_shown_in_the_trainers_error(
    data_set_errors: tuple[Job, dict[str, dict[str, Any]]], faults: str, code: int, words: list[str]
) -> None:
    error = data_set_errors[1][faults]
    assert error["code"] == code
    assert [word for word in words if word not in error["text"]] == []


@pytest.mark.fault("F29")
@pytest.mark.fault("F2")
def test_dataset_that_opens_too_many_files_ends_the_job_with_its_error(
    data_set_errors: tuple[Job, dict[str, dict[str, Any]]],
) -> None:
    job, _ = data_set_errors
    words = ["Too many open files", "(this process may open ", "/0 at sample", "Traceback", "torch_chain.py"]
    for text in (job.failure("algo-3"), job.output):
        assert [word for word in words if word not in text] == []
    assert "ancdata" not in job.output  # how torch says that descriptors have run out


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("import hetero\n", 2, "@hetero.dataset"),
        pytest.param("raise OSError('no such disk')\n", 30, "no such disk", marks=pytest.mark.long),
    ],
)
def test_script_at_fault_on_a_data_host_ends_the_job(
    start_job: StartJob, tmp_path: Path, text: str, code: int, words: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    job = start_job([data(1), DNN], "--endpoints-per-host", "1", script=script)
    assert job.wait() == code, job.output
    assert words in job.failure("algo-2")


@pytest.mark.fault("F12")
@pytest.mark.parametrize(
    ("number", "groups", "flags", "code"),
    [(signal.SIGTERM, [data(1), DNN], [], 143), (signal.SIGINT, [DNN], ["--sigterm-ok"], 0)],
    ids=["SIGTERM to every process", "Ctrl-C, which is well"],
)
def test_first_signal_runs_stop_callbacks_after_the_same_step(
    start_job: StartJob, number: signal.Signals, groups: list[str], flags: list[str], code: int
) -> None:
    job = start_job(
        groups,
        "--endpoints-per-host",
        "1",
        "--nproc-per-node",
        "2",
        *flags,
        script=TORCH_CHAIN,
        args=["--gloo", "--step-s", "0.05", "--num-samples", "5000"],
    )
    job.wait_line("step 5")
    if number == signal.SIGTERM:  # as Slurm, systemd, PBS and LSF do
        for process in job.processes():
            if process.pid != job.process.pid:
                process.send_signal(number)
    else:
        job.process.send_signal(number)
    assert job.wait() == code, job.output
    stopped = [(job.directory / f"stopped-{rank}").read_text() for rank in range(2)]
    assert stopped[0] == stopped[1]


@pytest.mark.fault("F38")
@pytest.mark.parametrize(
    ("groups", "on_terminal"), [([data(1), DNN], True), ([DNN], False)], ids=["heterogeneous", "homogeneous"]
)
def test_interrupt_twice_is_gone_at_once(
    start_job: StartJob, groups: list[str], on_terminal: bool, measured: Any
) -> None:
    before = set(Path("/dev/shm").iterdir())
    args = ["--step-s", "30", "--num-workers", "2"]
    job = start_job(
        groups,
        "--endpoints-per-host",
        "1",
        script=TORCH_CHAIN,
        args=args,
        environment={"TERM": "xterm"},
        on_terminal=on_terminal,
    )
    job.wait_line("step 1")
    job.interrupt()
    hosts = ", ".join(f"algo-{number + 1}" for number in range(len(groups)))
    job.wait_line(f"stopping: waiting for {hosts}; a second signal kills them")
    begin_s = time.monotonic()
    job.interrupt()
    assert job.wait(300.0) == 128 + signal.SIGKILL
    wait_gone(job.processes())
    measured("shutdown_s", time.monotonic() - begin_s)
    job.pump_thread.join(100.0)
    assert "killed on request" in job.output
    if on_terminal:
        assert "\x1b[K" in job.output, "it drew no status line"
        after_it = job.output.rpartition("\x1b[K")[2]
        assert re.match(r"\d\d:\d\d ", after_it) is None, "its line is left"
        assert after_it.endswith("the terminal is as it was")
    assert set(Path("/dev/shm").iterdir()) - before == set(), "semaphores or shared memory are left"


@pytest.fixture(scope="module")
def emulated(start_shared_job: StartJob) -> Job:
    """Return a job whose data host is too slow: a step takes 0.02 s, a batch 8 x 0.05 s of one of 4 vCPUs."""
    job = start_shared_job(
        ["data_group=ml.c5.xlarge:1", DNN],
        *("--endpoints-per-host", "1", "--emulate-sample-seconds", "0.05", "--emulate-step-seconds", "0.02"),
        *("--trainer-endpoints", "0"),  # on a busy machine the job may add some, and their vCPUs are not known
        *("--price-profile", "seed-2022", "--price", "ml.c5.xlarge=0.2"),
        args=["--num-samples", "400", "--epochs", "1"],
    )
    assert job.wait() == 0, job.output
    return job


def test_report_names_loader_hosts_and_emulation(emulated: Job) -> None:
    report = emulated.report()
    assert report["run"]["placement"] == "heterogeneous"
    assert len(report["run"]["hosts"]) == 2
    assert report["headline"]["step_time_mean"]["basis"] == "simulated"
    assert report["cost"]["hourly"]["value"] == pytest.approx(4.025)
    markdown = (emulated.directory / "run" / "report.md").read_text()
    assert "simulated" in markdown.lower()


@pytest.mark.fault("F7")
def test_preprocessing_ten_times_slower_is_named_with_what_to_add(emulated: Job) -> None:
    check_exactly_once(emulated, 1, num_samples=400, epochs=1, batch_size=8)
    report = emulated.report()
    assert report["headline"]["data_wait_mean"]["value"] > 0.02  # longer than the compute of a step
    verdict = report["verdict"]
    assert (verdict["bottleneck"], verdict["vcpus"]) == ("data", 4)
    needed = verdict["vcpus_needed"]["value"]
    assert needed > 4
    assert f"{needed - 4:.0f} more vCPUs beside the 4 that preprocess now would suffice" in verdict["advice"]
    assert verdict["advice"] in (emulated.directory / "run" / "report.md").read_text()


@pytest.mark.fault("F30")
def test_port_in_use_is_an_error_that_names_it(start_job: StartJob) -> None:
    blockers = []
    for second in range(31, 36):
        blocker = socket.socket()
        blocker.bind((f"127.{second}.0.2", 17999))
        blocker.listen()
        blockers.append(blocker)
    try:
        job = start_job([DNN], "--port", "17999")
        assert job.wait() == 23, job.output
        assert str(os.getpid()) in job.output
    finally:
        for blocker in blockers:
            blocker.close()

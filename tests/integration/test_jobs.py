"""Simulated jobs end to end: same bytes whatever the placement, whatever fails."""

from __future__ import annotations

import collections
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import DNN, Job, StartJob, chains, chains_alone, data, wait_gone

from hetero.report import compare_files
from hetero.system.cgroups import memory_use

LEASE_S = 3.0
"""The shortest there is."""

PLACEMENTS = {
    "none": ([DNN], ()),
    "one": ([data(1), DNN], ()),
    "two": ([data(2), DNN], ()),
    "four": ([data(4), DNN], ()),
    "hybrid": ([data(2), DNN], ("--trainer-endpoints", "1")),
}


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


@pytest.mark.fault("F36")
@pytest.mark.timeout(400)  # up to five jobs
@pytest.mark.parametrize(("num_ranks", "placements"), [(1, ["none", "four"]), (2, list(PLACEMENTS))])
def test_chain_any_placement_is_the_same(start_job: StartJob, num_ranks: int, placements: list[str]) -> None:
    jobs, chains = {}, {}
    for name in placements:
        groups, flags = PLACEMENTS[name]
        jobs[name] = start_job(groups, "--endpoints-per-host", "1", "--nproc-per-node", str(num_ranks), *flags)
        jobs[name].wait_line("step 1")  # the next one imports while this one ends
    for name, job in jobs.items():
        assert job.wait() == 0, job.output
        check_exactly_once(job, num_ranks, num_samples=101, epochs=2, batch_size=8)
        chains[name] = [job.result(rank)["chain"] for rank in range(num_ranks)]
        placement = {"none": "homogeneous", "hybrid": "hybrid"}.get(name, "heterogeneous")
        assert job.report()["run"]["placement"] == placement
    assert len({tuple(chain) for chain in chains.values()}) == 1, chains
    # The one without data hosts is what the others are compared with.
    assert "batches computed" not in jobs["none"].report()["run"]["events"]
    comparison = compare_files(jobs["none"].directory / "run", jobs["four"].directory / "run")
    assert comparison.index("homogeneous") < comparison.index("heterogeneous"), comparison


def test_chain_two_trainer_hosts_equal_two_ranks_on_one(start_job: StartJob) -> None:
    one = start_job([data(1), DNN], "--endpoints-per-host", "1", "--nproc-per-node", "2", args=["--gloo"])
    assert one.wait() == 0, one.output
    two = start_job(
        [data(1), "dnn_group=ml.p3.2xlarge:2"], "--endpoints-per-host", "1", "--nproc-per-node", "1", args=["--gloo"]
    )
    assert two.wait() == 0, two.output
    assert [one.result(rank)["chain"] for rank in range(2)] == [two.result(rank)["chain"] for rank in range(2)]


@pytest.mark.fault("F1")
def test_endpoint_killed_at_half_an_epoch_gives_the_same_chain(start_job: StartJob) -> None:
    args = ["--faults", "sleep_s=0.01", "--epochs", "1", "--num-samples", "1000"]
    job = start_job([data(1), DNN], "--endpoints-per-host", "2", args=args)
    job.wait_line("step 40")
    fork_server = job.find("hetero.dataplane.endpoint.fork_server")[0]
    fork_server.children()[0].send_signal(signal.SIGKILL)
    assert not any("step 100" in line for line in job.lines), "the machine is too slow: the kill came late"
    assert job.wait() == 0, job.output
    assert chains(job.directory, 1) == chains_alone(*args)
    assert job.report()["run"]["events"]["endpoint restarts"] == 1


@pytest.mark.fault("F3")
def test_data_host_killed_at_half_an_epoch_gives_the_same_chain(start_job: StartJob, measured: Any) -> None:
    args = ["--faults", "sleep_s=0.01", "--epochs", "1", "--num-samples", "400"]
    job = start_job([data(2), DNN], "--endpoints-per-host", "1", args=args)
    job.wait_line("step 10")
    own = job.find(host="algo-1")
    job.find("hetero.cli launch", host="algo-1")[0].send_signal(signal.SIGKILL)
    measured("processes_gone_s", wait_gone(own, 5.0))  # promised: within 5 s
    assert job.wait() == 0, job.output
    assert chains(job.directory, 1) == chains_alone(*args)


@pytest.mark.fault("F22")
def test_batches_that_arrive_damaged_wherever_they_come_from_end_the_job_naming_the_peer(start_job: StartJob) -> None:
    job = start_job(
        [data(2), DNN],
        "--endpoints-per-host",
        "1",
        args=["--batch-size", "64"],  # the images are its largest part, and that is what is damaged
        environment={"HETERO_FAULTS": "send:corrupt:p=1"},
    )
    assert job.wait() == 35, job.output
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2, 3)}
    assert len(first_lines) == 1
    pattern = r"HET-35 algo-3: rank 0: a batch arrived damaged 3 times, last from algo-[12]/0 \(127\.[\d.]+:\d+\): "
    assert re.match(pattern, first_lines.pop()), job.failure("algo-3")


@pytest.mark.fault("F8")
def test_trainer_that_stands_still_for_longer_than_a_lease_goes_on_with_the_same_hosts(start_job: StartJob) -> None:
    job = start_job(
        [data(2), DNN],
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


@pytest.mark.fault("F9")
def test_training_script_raises_every_host_reports_the_same_cause(start_job: StartJob, measured: Any) -> None:
    job = start_job(
        [data(2), DNN],
        "--endpoints-per-host",
        "1",
        "--nproc-per-node",
        "2",
        args=["--gloo", "--fail-at", "3", "--fail-rank", "1"],
    )
    assert job.wait() == 30, job.output
    wait_gone(job.processes(), 10.0)
    shutdown_s = time.monotonic() - float((job.directory / "failed-at").read_text())
    measured("shutdown_s", shutdown_s)
    assert shutdown_s < 10.0  # promised: from the exception until every process of every group is gone
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2, 3)}
    assert len(first_lines) == 1
    assert "training fails on purpose" in first_lines.pop()
    assert "rank 1: " in job.output


@pytest.mark.fault("F9")
def test_cause_is_the_exception_not_the_connection_that_broke_on_another_host(start_job: StartJob) -> None:
    job = start_job(
        [data(1), "dnn_group=ml.p3.2xlarge:2"],
        "--endpoints-per-host",
        "1",
        "--nproc-per-node",
        "1",
        args=["--gloo", "--fail-at", "3", "--fail-rank", "1"],
    )
    assert job.wait() == 30, job.output
    for number in (1, 2, 3):
        first_line = job.failure(f"algo-{number}").splitlines()[0]
        assert first_line == "HET-30 algo-3: rank 1: the training script raised RuntimeError: training fails on purpose"


def test_output_folder_of_a_running_simulation_is_refused(start_job: StartJob) -> None:
    job = start_job([DNN], args=["--step-s", "30"])
    job.wait_line("starting 1 of 1 ranks")
    folder = str(job.directory / "run")
    other = start_job([DNN], "--output-dir", folder)
    assert other.wait() == 2, other.output
    assert folder in other.output
    job.process.send_signal(signal.SIGINT)
    job.wait_line("stopping: waiting for")
    job.process.send_signal(signal.SIGINT)
    assert job.wait(20.0) != 0


@pytest.mark.fault("F10")
def test_rank_killed_is_named_and_never_a_success(start_job: StartJob) -> None:
    job = start_job(
        [data(1), DNN],
        "--endpoints-per-host",
        "1",
        "--nproc-per-node",
        "2",
        args=["--gloo", "--kill-at", "3", "--fail-rank", "1"],
    )
    assert job.wait() == 30, job.output
    has_figures = memory_use() is not None
    figures = r" \(peak of (its control group|a control group above its own): \d+\.\d GiB" if has_figures else "$"
    for number in (1, 2):
        first_line = job.failure(f"algo-{number}").splitlines()[0]
        assert re.search(f"rank 1 killed by SIGKILL, likely out of memory{figures}", first_line), first_line


@pytest.mark.parametrize(
    ("faults", "code", "words"),
    [
        ("factory", 34, ["the factory fails on purpose", " while it was built", "Traceback", "chain.py"]),
        ("raise_at=17", 34, ["sample 17 is broken on purpose", "/0 at sample 17", "Traceback", "chain.py"]),
        pytest.param(
            "descriptors=1",
            34,
            ["Too many open files", "(this process may open ", "/0 at sample", "chain.py"],
            marks=pytest.mark.fault("F29"),
        ),
        ("unsupported=1", 34, ["['path'][0]", "Path", "/0 while the batch was encoded"]),
        ("out_of_range=1", 34, ["101", "out of range", "/0 at sample"]),
        ("not_json", 2, ["num_samples", "Path"]),
        ("by_host=1", 11, ["differ", "102", "103"]),
        ("listing=1", 11, ["differ", "fingerprint"]),
    ],
)
@pytest.mark.fault("F2")
def test_dataset_at_fault_is_shown_in_the_trainers_error(
    start_job: StartJob, faults: str, code: int, words: list[str]
) -> None:
    job = start_job([data(2), DNN], "--endpoints-per-host", "1", args=["--faults", faults])
    assert job.wait() == code, job.output
    for text in (job.failure("algo-3"), job.output):
        assert [word for word in words if word not in text] == []
    assert "ancdata" not in job.output  # how torch says that descriptors have run out


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("raise OSError('no such disk')\n", 30, "no such disk"),
        ("import hetero\n", 2, "@hetero.dataset"),
        ("import hetero\nf = lambda: None\nhetero.dataset(f, name='x')\ng = lambda: 1\nhetero.dataset(g, name='x')\n",
         2, "two data sets are named"),
    ],
)  # fmt: skip
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
    ("number", "flags", "code"),
    [(signal.SIGTERM, [], 143), (signal.SIGINT, ["--sigterm-ok"], 0)],
    ids=["SIGTERM", "Ctrl-C, which is well"],
)
def test_first_signal_runs_stop_callbacks_after_the_same_step(
    start_job: StartJob, number: signal.Signals, flags: list[str], code: int
) -> None:
    job = start_job(
        [data(1), DNN],
        "--endpoints-per-host",
        "1",
        "--nproc-per-node",
        "2",
        *flags,
        args=["--gloo", "--step-s", "0.05", "--num-samples", "5000"],
    )
    job.wait_line("step 5")
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
        groups, "--endpoints-per-host", "1", args=args, environment={"TERM": "xterm"}, on_terminal=on_terminal
    )
    job.wait_line("step 1")
    job.interrupt()
    hosts = ", ".join(f"algo-{number + 1}" for number in range(len(groups)))
    job.wait_line(f"stopping: waiting for {hosts}; a second signal kills them")
    begin_s = time.monotonic()
    job.interrupt()
    assert job.wait(20.0) == 128 + signal.SIGKILL
    wait_gone(job.processes(), 10.0)
    measured("shutdown_s", time.monotonic() - begin_s)
    job.pump_thread.join(10.0)
    assert "killed on request" in job.output
    if on_terminal:
        assert "\x1b[K" in job.output, "it drew no line of its own"
        after_it = job.output.rpartition("\x1b[K")[2]
        assert re.match(r"\d\d:\d\d ", after_it) is None, "its line is left"
        assert after_it.endswith("the terminal is as it was")
    assert set(Path("/dev/shm").iterdir()) - before == set(), "semaphores or shared memory are left"


@pytest.mark.fault("F11")
def test_trainer_launcher_killed_takes_its_ranks_along(start_job: StartJob) -> None:
    job = start_job(
        [data(1), DNN],
        "--endpoints-per-host",
        "1",
        args=["--step-s", "0.1", "--num-samples", "5000"],
        environment={"HETERO_TIME_SCALE": "0.1"},
    )
    job.wait_line("step 3")
    job.find("hetero.cli launch", host="algo-2")[0].send_signal(signal.SIGKILL)
    assert job.wait(60.0) == 137, job.output
    assert "no trainer host was heard" in job.failure("algo-1")


def test_report_names_loader_hosts_and_emulation(start_job: StartJob) -> None:
    job = start_job(
        [data(1), DNN],
        "--emulate-sample-seconds",
        "0.01",
        "--emulate-step-seconds",
        "0.02",
        "--price-profile",
        "seed-2022",
        args=["--num-samples", "400"],
    )
    assert job.wait() == 0, job.output
    report = job.report()
    assert report["run"]["placement"] == "heterogeneous"
    assert len(report["run"]["hosts"]) == 2
    assert report["headline"]["step_time_mean"]["basis"] == "simulated"
    assert report["cost"]["hourly"]["value"] == pytest.approx(5.661)
    markdown = (job.directory / "run" / "report.md").read_text()
    assert "simulated" in markdown.lower()


@pytest.mark.fault("F7")
def test_preprocessing_ten_times_slower_is_named_with_what_to_add(start_job: StartJob) -> None:
    # A step takes 0.02 s. A batch takes 8 x 0.05 s of one of 4 vCPUs, 0.1 s of all; with a tenth of that they keep up.
    job = start_job(
        ["data_group=ml.c5.xlarge:1", DNN],
        "--endpoints-per-host",
        "1",
        "--emulate-sample-seconds",
        "0.05",
        "--emulate-step-seconds",
        "0.02",
        "--trainer-endpoints",
        "0",  # on a busy machine the job may add some, and their vCPUs are not known
        args=["--num-samples", "400", "--epochs", "1"],
    )
    assert job.wait() == 0, job.output
    check_exactly_once(job, 1, num_samples=400, epochs=1, batch_size=8)
    report = job.report()
    assert report["headline"]["data_wait_mean"]["value"] > 0.02  # longer than the compute of a step
    verdict = report["verdict"]
    assert (verdict["bottleneck"], verdict["vcpus"]) == ("data", 4)
    needed = verdict["vcpus_needed"]["value"]
    assert needed > 4
    assert f"{needed - 4:.0f} more vCPUs beside the 4 that preprocess now would suffice" in verdict["advice"]
    assert verdict["advice"] in (job.directory / "run" / "report.md").read_text()


@pytest.mark.fault("F30")
def test_port_in_use_is_an_error_that_names_it(start_job: StartJob) -> None:
    import socket

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

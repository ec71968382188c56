"""tf.data.service in whole jobs, against TensorFlow's own servers: two data hosts, two ranks.

What TensorFlow guarantees, and not, is about elements that are lost or come twice. They are counted here over both
ranks; a test asserts what is guaranteed, and `measured` says what it was. For TensorFlow's imports alone a job costs
half a minute of two cores: there are few, and each shows much.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import CHAIN, Job, StartJob, StartLauncher, data, wait_gone

SCRIPT = CHAIN.with_name("tf_service.py")
GROUPS = [data(2), "dnn_group=ml.p3.2xlarge:2"]
LAST_LINE = "has reached its last line"
WAIT_S = 120.0

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install 'tensorflow>=2.16'"
    ),
    pytest.mark.timeout(400),  # every server and every rank imports it
]


class Trial:
    """A job of a scenario of the script, and what its ranks had.

    Args:
        output: Where the ranks write.
        scenario: Of the script.
        num_elements: Of its datasets.
    """

    def __init__(self, output: Path, scenario: str, num_elements: int) -> None:
        self.output = output
        self.num_elements = num_elements
        self.args = [scenario, "--output", str(output), "--num-elements", str(num_elements)]
        output.mkdir()

    def start(self, start_job: StartJob, *flags: str) -> Job:
        """Start it as a simulated job."""
        return start_job(GROUPS, "--data-service", "tf", *flags, script=SCRIPT, args=self.args)

    def go_on(self, name: str) -> None:
        """Have the ranks go on in a pass in which they stand still."""
        (self.output / f"go-{name}").touch()

    def passes(self, name: str) -> list[collections.Counter[int]]:
        """Return how often each element came to any rank, in every pass of that name."""
        found = [json.loads((self.output / f"rank-{rank}.json").read_text())[name] for rank in range(2)]
        return [collections.Counter(first + second) for first, second in zip(*found, strict=True)]

    def copies(self, number: int) -> collections.Counter[int]:
        """Return what comes if every element comes so often."""
        return collections.Counter(dict.fromkeys(range(self.num_elements), number))


def servers(job: Job, host: str) -> list[psutil.Process]:
    """Return the servers of tf.data.service of a host, oldest first: the dispatcher, until it is started again."""
    return job.find("hetero.dataplane.pool.tf_server", host=host)


def kill(job: Job, host: str) -> None:
    """Kill the oldest server of tf.data.service of a host."""
    servers(job, host)[0].kill()


def wait_until_serving(job: Job, host: str, number: int) -> None:
    """Wait until so many servers of tf.data.service serve on a host."""
    deadline_s = time.monotonic() + WAIT_S
    while sum(is_serving(process) for process in servers(job, host)) < number:
        if time.monotonic() > deadline_s or job.process.poll() is not None:
            pytest.fail(f"no server was started again:\n{job.output}")
        time.sleep(0.05)


def is_serving(process: psutil.Process) -> bool:
    """Return whether a process listens; not if it has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections())
    return False


def leave(job: Job, host: str) -> None:
    """Ask a data host to leave, and wait until its servers have."""
    leaving = servers(job, host)
    job.find("hetero.cli launch", host=host)[0].terminate()
    wait_gone(leaving, 30.0)


def wait_end(job: Job, since: str, count: int = 1) -> tuple[int, float]:
    """Wait for the end of all processes; return the exit code, and the seconds since the last of some lines came."""
    lines = job.wait_lines(since, count, WAIT_S)
    processes = job.processes()
    status = job.wait()
    wait_gone([*processes, *job.processes()], 10.0)
    return status, time.monotonic() - lines[-1][0]


def test_ranks_share_each_element_once_and_every_host_ends(start_job: StartJob, tmp_path: Path, measured: Any) -> None:
    trial = Trial(tmp_path / "results", "calm", 400)
    job = trial.start(start_job, "--trainer-tf-workers", "1")
    status, shutdown_s = wait_end(job, LAST_LINE, 2)
    assert status == 0, job.output
    measured("shutdown_s", shutdown_s)
    # Promised; here with iterators open over a dataset without end.
    assert shutdown_s < 10.0, "\n".join(f"{at_s:.2f} {line}" for at_s, line in job.wait_lines("", len(job.lines))[-20:])
    for name, num_passes in (("dynamic", 2), ("after", 1), ("data", 1), ("file", 1)):
        assert trial.passes(name) == [trial.copies(1)] * num_passes, name
    assert max(trial.passes("left")[0].values()) == 1
    # Without sharding each worker makes all: those on data hosts, or those on trainer hosts too.
    assert trial.passes("remote") == [trial.copies(2)]
    assert trial.passes("any") == [trial.copies(4)]
    assert [found.total() for found in trial.passes("endless")] == [2 * 30 * 4] * 2
    run = job.report()["run"]
    samples = [{loader["name"]: loader["num_samples"] for loader in rank["loaders"]} for rank in run["ranks"]]
    # Of what is made of a dataset the steps are counted by `measure` only.
    wanted = {"dynamic": 3 * 400 + 2 * 20, "data": 400, "file": 400, "remote": 800, "any": 1600, "endless": 2 * 30 * 4}
    assert {name: samples[0][name] + samples[1][name] for name in wanted} == wanted
    assert min(samples[0]["dynamic"], samples[1]["dynamic"]) > 0
    assert (run["events"]["tf.data worker restarts"], run["events"]["tf.data dispatcher restarts"]) == (0, 0)


def test_lost_servers_cost_no_more_than_the_policies_allow(start_job: StartJob, tmp_path: Path, measured: Any) -> None:
    trial = Trial(tmp_path / "results", "faults", 1000)
    job = trial.start(start_job, "--tf-work-dir", str(tmp_path / "journal"))
    for name in ("dynamic", "file", "off", "journal"):
        job.wait_lines(f"{name}: rank", 2, WAIT_S)
        host, num_servers = ("algo-1", 2) if name == "journal" else ("algo-2", 1)
        wait_until_serving(job, host, num_servers)
        kill(job, host)
        trial.go_on(name)
    job.wait_lines("endless: rank", 2, WAIT_S)
    leave(job, "algo-2")  # the other data host feeds the ranks
    trial.go_on("endless")
    status, _ = wait_end(job, LAST_LINE, 2)
    assert status == 0, job.output
    assert list((tmp_path / "journal").iterdir()) == []
    events = job.report()["run"]["events"]
    assert (events["tf.data worker restarts"], events["tf.data dispatcher restarts"]) == (3, 1)
    costs = {}
    for name, num_copies in (("dynamic", 1), ("file", 1), ("off", 2), ("journal", 1)):
        (found,), wanted = trial.passes(name), trial.copies(num_copies)
        costs[name] = (wanted - found).total(), (found - wanted).total()
        for what, number in zip(("lost", "repeated"), costs[name], strict=True):
            measured(f"{name}_{what}_elements", number)
    print("lost and repeated elements:", costs)
    assert costs["dynamic"][1] == 0  # at most once: what the worker was at is lost
    assert costs["dynamic"][0] < 500  # half of all: not all that it was to make
    assert costs["file"][0] == 0  # at least once
    assert costs["off"][0] == 0
    assert costs["journal"] == (0, 0)
    assert trial.passes("endless")[0].total() > 1000  # as many steps as without the loss


def test_dispatcher_without_a_journal_and_worker_that_is_lost_for_good_end_what_would_wait_for_an_hour(
    start_job: StartJob, tmp_path: Path
) -> None:
    trial = Trial(tmp_path / "results", "forgotten", 400)
    job = trial.start(start_job, "--job-restarts", "1", "--data-timeout", "30")
    job.wait_lines("halted-0: rank", 2, WAIT_S)
    kill(job, "algo-1")
    trial.go_on("halted-0")
    line = job.wait_line("restart 1 of at most 1 of the trainer group", WAIT_S)
    assert "because of HET-31 algo-" in line
    assert "the dispatcher of tf.data.service was started again and has lost the datasets of this run" in line
    job.wait_lines("halted-1: rank", 2, WAIT_S)
    leave(job, "algo-2")
    trial.go_on("halted-1")
    assert job.wait() == 31, job.output
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 3, 4)}
    assert len(first_lines) == 1
    cause = r"HET-31 algo-[34]: rank [01] has waited for a batch for \d+ s, and workers of .* are missing on algo-2"
    assert re.fullmatch(cause, first_lines.pop())
    assert trial.passes("whole-1") == [trial.copies(1)]


def test_data_host_whose_name_comes_late_has_its_part_of_a_static_policy(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    groups = [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1", "algo-2"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-3"]},
    ]
    (tmp_path / "cluster.json").write_text(json.dumps({"instance_groups": groups}))
    lines = {f"algo-{number}": f"127.{100 + os.getpid() % 100}.7.{number} algo-{number}\n" for number in (1, 2, 3)}
    hosts = tmp_path / "hosts"
    hosts.write_text(lines["algo-1"] + lines["algo-3"])
    trial = Trial(tmp_path / "results", "late", 400)
    flags = ["--data-service", "tf", "--nproc-per-node", "2"]

    def start(host: str) -> Job:
        environment = {"HETERO_TIME_SCALE": "0.5"}
        return start_launcher(host, *flags, script=SCRIPT, args=trial.args, environment=environment)

    trainer, first = start("algo-3"), start("algo-1")
    trainer.wait_line("waiting for algo-1", WAIT_S)
    first.wait_line("waiting for a dispatcher (once the address of algo-2 is known) and 1 worker", WAIT_S)
    hosts.write_text("".join(lines.values()))
    late = start("algo-2")
    assert [job.wait() for job in (trainer, first, late)] == [0, 0, 0], trainer.output
    assert trial.passes("data") == [trial.copies(1)]


def test_rank_that_raises_while_another_waits_for_a_batch_is_the_cause(
    start_job: StartJob, tmp_path: Path, measured: Any
) -> None:
    trial = Trial(tmp_path / "results", "raises", 400)
    job = trial.start(start_job)
    status, abort_s = wait_end(job, "rank 1: rank 1 raises")
    assert status == 30, job.output
    cause = "HET-30 algo-4: rank 1: the training script raised RuntimeError: training fails on purpose"
    assert [job.failure(f"algo-{number}").splitlines()[0] for number in range(1, 5)] == [cause] * 4
    measured("abort_s", abort_s)
    assert abort_s < 10.0  # promised


@pytest.mark.parametrize("asked", ["job", "algo-1", "algo-4"], ids=["job", "host of the dispatcher", "trainer host"])
def test_request_to_stop_ends_all_ranks_after_the_same_step(
    start_job: StartJob, tmp_path: Path, measured: Any, asked: str
) -> None:
    trial = Trial(tmp_path / "results", "endless", 400)
    job = trial.start(start_job)
    job.wait_lines("is in the midst of it", 2, WAIT_S)
    begin_s = time.monotonic()
    processes = job.processes()
    if asked == "job":
        job.process.terminate()
    else:
        job.find("hetero.cli launch", host=asked)[0].terminate()
    assert job.wait() == 143, job.output
    wait_gone([*processes, *job.processes()], 10.0)
    shutdown_s = time.monotonic() - begin_s
    measured("shutdown_s", shutdown_s)
    assert shutdown_s < 60.0  # promised
    steps = [int((trial.output / f"stopped-{rank}").read_text()) for rank in range(2)]
    assert steps[0] == steps[1] >= 20

"""tf.data.service in whole jobs, against TensorFlow's own servers.

What TensorFlow guarantees, and not, is about elements that are lost or come twice. They are counted here over all
ranks; a test asserts what is guaranteed, and `measured` says what it was. For TensorFlow's imports alone a job costs
half a minute of two cores: there are few, each shows much, and some end in the question of a second test.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import itertools
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.integration.harness import CHAIN, DNN, Job, StartJob, StartLauncher, data, failure, wait_gone

SCRIPT = CHAIN.with_name("tf_service.py")
GROUPS = [data(2), "dnn_group=ml.p3.2xlarge:2"]
LAST_LINE = "has reached its last line"
WAIT_S = 400.0

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install 'tensorflow>=2.16'"
    ),
    pytest.mark.timeout(1200),  # every server and every rank imports it
]


class Trial:
    """A job of a scenario of the script, and what its ranks had.

    Args:
        output: Where the ranks write.
        scenario: Of the script.
        num_elements: Of its datasets.
        num_ranks: Of the job.
    """

    def __init__(self, output: Path, scenario: str, num_elements: int, num_ranks: int = 2) -> None:
        self.output = output
        self.num_elements = num_elements
        self.num_ranks = num_ranks
        self.args = [scenario, "--output", str(output), "--num-elements", str(num_elements)]
        output.mkdir()

    def start(self, start_job: StartJob, groups: list[str], *flags: str) -> Job:
        """Start it as a simulated job."""
        return start_job(groups, "--data-service", "tf", *flags, script=SCRIPT, args=self.args)

    def go_on(self, name: str) -> None:
        """Let the ranks go on in the pass where they pause."""
        (self.output / f"go-{name}").touch()

    def passes(self, name: str) -> list[collections.Counter[int]]:
        """Return how often each element came to any rank, in every pass of that name."""
        ranks = range(self.num_ranks)
        found = [json.loads((self.output / f"rank-{rank}.json").read_text())[name] for rank in ranks]
        return [collections.Counter(itertools.chain(*parts)) for parts in zip(*found, strict=True)]

    def stopped(self) -> list[int]:
        """Return the last step of each rank."""
        return [int((self.output / f"stopped-{rank}").read_text()) for rank in range(self.num_ranks)]

    def copies(self, number: int) -> collections.Counter[int]:
        """Return what comes if every element comes so often."""
        return collections.Counter(dict.fromkeys(range(self.num_elements), number))


def servers(job: Job, host: str) -> list[psutil.Process]:
    """Return the servers of tf.data.service of a host, oldest first: the dispatcher, until it is started again."""
    return job.find("hetero.pool.tf_server", host=host)


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
    """Return whether a process still runs and listens."""
    with contextlib.suppress(psutil.Error):
        return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections())
    return False


def leave(job: Job, host: str) -> None:
    """Ask a data host to leave, and wait until its servers have."""
    leaving = servers(job, host)
    job.find("hetero.cli launch", host=host)[0].terminate()
    wait_gone(leaving)


def wait_end(job: Job, since: str, count: int = 1) -> tuple[int, float]:
    """Wait for the end of all processes. Return the exit code, and the seconds since the last of some lines came."""
    lines = job.wait_lines(since, count, WAIT_S)
    processes = job.processes()
    status = job.wait()
    wait_gone([*processes, *job.processes()])
    return status, time.monotonic() - lines[-1][0]


def test_ranks_share_each_element_once_and_every_host_ends(start_job: StartJob, tmp_path: Path, measured: Any) -> None:
    trial = Trial(tmp_path / "results", "calm", 400)
    workers = ["--tf-workers-per-host", "2", "--trainer-tf-workers", "1"]
    job = trial.start(start_job, [data(1), DNN], "--nproc-per-node", "2", *workers)
    status, shutdown_s = wait_end(job, LAST_LINE, 2)
    assert status == 0, job.output
    measured("shutdown_s", shutdown_s)
    for name, num_passes in (("dynamic", 2), ("after", 1), ("data", 1), ("file", 1)):
        assert trial.passes(name) == [trial.copies(1)] * num_passes, name
    assert max(trial.passes("left")[0].values()) == 1
    # Without sharding each worker makes all: the two on the data host, or the one on the trainer host too.
    assert trial.passes("remote") == [trial.copies(2)]
    assert trial.passes("any") == [trial.copies(3)]
    assert [found.total() for found in trial.passes("endless")] == [2 * 30 * 4] * 2
    run = job.report()["run"]
    samples = [{loader["name"]: loader["num_samples"] for loader in rank["loaders"]} for rank in run["ranks"]]
    # Steps of datasets that are made from others are counted by `measure` only.
    wanted = {"dynamic": 3 * 400 + 2 * 20, "data": 400, "file": 400, "remote": 800, "any": 1200, "endless": 2 * 30 * 4}
    assert {name: samples[0][name] + samples[1][name] for name in wanted} == wanted
    assert min(samples[0]["dynamic"], samples[1]["dynamic"]) > 0
    assert (run["events"]["tf.data worker restarts"], run["events"]["tf.data dispatcher restarts"]) == (0, 0)
    # 10 s are promised on a machine with idle cores, here with iterators open over a dataset without end.
    last_lines = job.wait_lines("", len(job.lines))[-20:]
    assert shutdown_s < 100.0, "\n".join(f"{at_s:.2f} {line}" for at_s, line in last_lines)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that was harmed and has ended."""

    trial: Trial
    jobs: list[Job]
    """The simulated job, or a launcher per host."""
    codes: list[int]
    end_s: float
    """From the request to stop, or the error, to the end of all processes."""


@pytest.fixture(scope="module")
def harmed(start_shared_job: StartJob, shared_folder: Path) -> Ended:
    """A job that has lost a worker, the dispatcher and a data host, and then was stopped at the dispatcher's host."""
    trial = Trial(shared_folder / "faults", "faults", 1000)
    job = trial.start(start_shared_job, GROUPS, "--tf-work-dir", str(shared_folder / "journal"))
    for name, host, num_servers in (("policies", "algo-2", 1), ("journal", "algo-1", 2)):
        job.wait_lines(f"{name}: rank", 2, WAIT_S)
        wait_until_serving(job, host, num_servers)
        kill(job, host)
        trial.go_on(name)
    job.wait_lines("endless: rank", 2, WAIT_S)
    leave(job, "algo-2")  # the other data host feeds the ranks
    trial.go_on("endless")
    job.wait_lines("is in the midst of it", 2, WAIT_S)
    return stop(trial, job, "algo-1")


def stop(trial: Trial, job: Job, asked: str) -> Ended:
    """Ask the job, or the launcher of a host, to stop. Wait until all has ended."""
    begin_s = time.monotonic()
    processes = job.processes()
    (job.process if asked == "job" else job.find("hetero.cli launch", host=asked)[0]).terminate()
    code = job.wait()
    wait_gone([*processes, *job.processes()])
    return Ended(trial=trial, jobs=[job], codes=[code], end_s=time.monotonic() - begin_s)


def test_lost_servers_cost_no_more_than_the_policies_allow(harmed: Ended, measured: Any) -> None:
    trial, (job,) = harmed.trial, harmed.jobs
    assert list((trial.output.parent / "journal").iterdir()) == []
    events = job.report()["run"]["events"]
    assert (events["tf.data worker restarts"], events["tf.data dispatcher restarts"]) == (1, 1)
    costs = {}
    for name, num_copies in (("dynamic", 1), ("file", 1), ("off", 2), ("journal", 1)):
        found, wanted = sum(trial.passes(name), collections.Counter()), trial.copies(num_copies)
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


def test_request_to_stop_ends_all_ranks_after_the_same_step(harmed: Ended, measured: Any) -> None:
    check_stop(harmed, measured)


@pytest.mark.long
@pytest.mark.parametrize("asked", ["job", "algo-4"], ids=["job", "trainer host"])
def test_request_to_stop_that_reaches_another_host_ends_all_ranks_after_the_same_step(
    start_job: StartJob, tmp_path: Path, measured: Any, asked: str
) -> None:
    trial = Trial(tmp_path / "results", "endless", 400)
    job = trial.start(start_job, GROUPS)
    job.wait_lines("is in the midst of it", 2, WAIT_S)
    check_stop(stop(trial, job, asked), measured)


def check_stop(ended: Ended, measured: Any) -> None:
    """Expect that all ranks have ended after the same step."""
    assert ended.codes == [143], ended.jobs[0].output
    measured("shutdown_s", ended.end_s)
    assert ended.end_s < 200.0  # 60 s are promised on a machine with idle cores
    first, second = ended.trial.stopped()
    assert first == second >= 20


def test_dispatcher_without_a_journal_and_worker_that_is_lost_for_good_end_what_would_wait_for_an_hour(
    start_job: StartJob, tmp_path: Path
) -> None:
    trial = Trial(tmp_path / "results", "forgotten", 400, num_ranks=1)
    job = trial.start(start_job, [data(2), DNN], "--job-restarts", "1", "--data-timeout", "75")
    job.wait_line("halted-0: rank", WAIT_S)
    kill(job, "algo-1")
    trial.go_on("halted-0")
    line = job.wait_line("restart 1 of at most 1 of the trainer group", WAIT_S)
    assert "because of HET-31 algo-" in line
    assert "the dispatcher of tf.data.service was started again and has lost the datasets of this run" in line
    job.wait_line("halted-1: rank", WAIT_S)
    leave(job, "algo-2")
    trial.go_on("halted-1")
    assert job.wait() == 31, job.output
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 3)}
    assert len(first_lines) == 1
    cause = r"HET-31 algo-3: rank 0 has waited for a batch for \d+ s, and workers of .* are missing on algo-2"
    assert re.fullmatch(cause, first_lines.pop())
    assert trial.passes("whole-1") == [trial.copies(1)]


@pytest.fixture(scope="module")
def joined_late(start_shared_launcher: StartLauncher, shared_folder: Path) -> Ended:
    """A job of two data hosts. One of them lacks an address at first. In the end one of two ranks raises."""
    groups = [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1", "algo-2"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-3"]},
    ]
    (shared_folder / "cluster.json").write_text(json.dumps({"instance_groups": groups}))
    hosts = shared_folder / "hosts"
    first_line, late_line, trainer_line, *_ = hosts.read_text().splitlines(keepends=True)
    hosts.write_text(first_line + trainer_line)
    trial = Trial(shared_folder / "late", "late", 400)
    flags = ["--data-service", "tf", "--nproc-per-node", "2"]

    def start(host: str) -> Job:
        environment = {"HETERO_TIME_SCALE": "0.5"}
        return start_shared_launcher(host, *flags, script=SCRIPT, args=trial.args, environment=environment)

    trainer, first = start("algo-3"), start("algo-1")
    trainer.wait_line("waiting for algo-1", WAIT_S)
    first.wait_line("waiting for a dispatcher (once the address of algo-2 is known) and 1 worker", WAIT_S)
    hosts.write_text(first_line + late_line + trainer_line)
    jobs = [trainer, first, start("algo-2")]
    raised_s, _ = trainer.wait_lines("rank 1: rank 1 raises", 1, WAIT_S)[0]
    processes = [process for job in jobs for process in job.processes()]
    codes = [job.wait() for job in jobs]
    wait_gone(processes)
    return Ended(trial=trial, jobs=jobs, codes=codes, end_s=time.monotonic() - raised_s)


def test_data_host_whose_name_comes_late_has_its_part_of_a_static_policy(joined_late: Ended) -> None:
    assert joined_late.trial.passes("data") == [joined_late.trial.copies(1)]


def test_rank_that_raises_while_another_waits_for_a_batch_is_the_cause(joined_late: Ended, measured: Any) -> None:
    assert joined_late.codes == [30, 30, 30], joined_late.jobs[0].output
    cause = "HET-30 algo-3: rank 1: the training script raised RuntimeError: training fails on purpose"
    assert [failure(job).splitlines()[0] for job in joined_late.jobs] == [cause] * 3
    measured("abort_s", joined_late.end_s)
    assert joined_late.end_s < 100.0  # 10 s are promised on a machine with idle cores

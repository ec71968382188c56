"""A job that loses an endpoint, then a data host: it goes on with the same bytes, and logs it in harmless words."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.integration.harness import DNN, TIME_SCALE, Job, StartJob, chains, chains_alone, data, wait_gone

SAMPLES = ["--epochs", "1", "--num-samples", "400"]


@dataclass(frozen=True)
class Bereaved:
    """What became of the job, and how long processes of the killed data host lived on."""

    job: Job
    processes_gone_s: float


@pytest.fixture(scope="module")
def bereaved(start_shared_job: StartJob) -> Bereaved:
    """Return an ended job that lost an endpoint of one data host, then the other data host."""
    job = start_shared_job(
        [data(2), DNN],
        *("--endpoints-per-host", "2", "--job-restarts", "1"),
        args=["--faults", "sleep_s=0.005", "--step-s", "0.1", *SAMPLES],
        environment={"HETERO_TIME_SCALE": str(TIME_SCALE)},
    )
    job.wait_line("step 5")
    fork_server = job.find("hetero.pool.fork_server", host="algo-1")[0]
    fork_server.children()[0].send_signal(signal.SIGKILL)
    job.wait_line("step 15")
    own = job.find(host="algo-2")
    job.find("hetero.cli launch", host="algo-2")[0].send_signal(signal.SIGKILL)
    processes_gone_s = wait_gone(own)
    assert not any("step 50" in line for line in job.lines), "the machine is too slow: the kills came late"
    job.wait_line("data host algo-2 fell silent")
    assert job.wait() == 0, job.output
    return Bereaved(job, processes_gone_s)


@pytest.mark.fault("F1")
def test_endpoint_killed_in_mid_epoch_is_started_again(bereaved: Bereaved) -> None:
    assert bereaved.job.report()["run"]["events"]["endpoint restarts"] >= 1


@pytest.mark.fault("F3")
def test_data_host_killed_in_mid_epoch_leaves_no_process(bereaved: Bereaved, measured: Any) -> None:
    measured("processes_gone_s", bereaved.processes_gone_s)


@pytest.mark.fault("F1")
@pytest.mark.fault("F3")
def test_endpoint_and_data_host_killed_in_mid_epoch_give_the_same_chain(bereaved: Bereaved) -> None:
    assert chains(bereaved.job.directory, 1) == chains_alone(*SAMPLES)


def names_that_the_toolkit_watches_for() -> list[str]:
    toolkit = pytest.importorskip("sagemaker_training", reason="needs sagemaker-training")
    errors = pytest.importorskip("tensorflow.python.framework.errors_impl", reason="needs TensorFlow")
    of_tensorflow = [name for name, value in vars(errors).items() if isinstance(value, type)]
    return [*toolkit._PYTHON_ERRORS_, *toolkit._MPI_ERRORS_, *of_tensorflow]


def test_failures_that_are_overcome_leave_no_words_that_start_the_toolkits_log_watcher(bereaved: Bereaved) -> None:
    """From a line with one of them on, it keeps every line, and compares each with all that it has kept."""
    names = names_that_the_toolkit_watches_for()
    hosts = bereaved.job.directory / "run" / "hosts"
    said = [line for path in hosts.glob("*/log.txt") for line in path.read_text().splitlines()]
    assert any("fell silent" in line for line in said)
    assert [line for line in said if any(name in line for name in names)] == []

"""The log of a job as a platform reads it: figures that its definitions find."""

from __future__ import annotations

import itertools
import re

import pytest

from hetero.launch.reporting.progress import PROGRESS_MARK
from hetero.metrics.lines import METRIC_NAMES
from hetero.sagemaker.preparation.metric_definitions import METRIC_DEFINITIONS
from tests.support.integration.harness import TORCH_CHAIN, Job, StartJob, data

PRICES = ["--price-profile", "seed-2022"]


def log_of(job: Job, host: str) -> list[str]:
    """Return what one simulated host has logged."""
    return (job.directory / "run" / "hosts" / host / "log.txt").read_text().splitlines()


def found_in(lines: list[str]) -> dict[str, list[float]]:
    """Return what SageMaker finds: it searches every line for every definition."""
    matches = [
        (definition["Name"], re.search(definition["Regex"], line))
        for line in lines
        for definition in METRIC_DEFINITIONS
    ]
    found: dict[str, list[float]] = {}
    for name, match in matches:
        if match is not None:
            found.setdefault(name, []).append(float(match.group(1)))
    return found


def test_every_metric_definition_finds_its_figure_in_the_log_of_one_host(start_job: StartJob) -> None:
    job = start_job(
        [data(1), "dnn_group=ml.p3.2xlarge:2"],
        "--endpoints-per-host", "1", "--trainer-endpoints", "0", "--warmup-steps", "2", *PRICES,
        "--emulate-sample-seconds", "0.001", "--emulate-step-seconds", "0.01",  # needed for costs
        environment={"HETERO_PROGRESS_SECONDS": "0.2"},
        script=TORCH_CHAIN, args=["--num-samples", "4000"],  # endpoints say once a second how long they have computed
    )  # fmt: skip
    assert job.wait() == 0, job.output
    found = found_in(log_of(job, "algo-2"))
    assert found.keys() == {f"hetero:{name}" for name in METRIC_NAMES}
    report = job.report()
    steps = [loader["num_steps"] for rank in report["run"]["ranks"] for loader in rank["loaders"]]
    # The last status of the other trainer host may come after the last line.
    assert 0 < found["hetero:steps"][-1] <= min(steps)
    falls = [after < before for before, after in itertools.pairwise(found["hetero:steps"])]
    assert sum(falls) <= 1, "it falls at most once: when the second rank begins"
    assert found["hetero:endpoints"] == [1.0] * len(found["hetero:endpoints"])
    assert found["hetero:wall_seconds"] == [pytest.approx(report["run"]["wall_s"], abs=1e-6)]
    assert found["hetero:usd_per_1k_steps"] == [pytest.approx(report["cost"]["per_1k_steps"]["value"], abs=1e-6)]
    assert found["hetero:step_time_ms"][-1] >= 10.0
    assert 0.0 <= found["hetero:data_wait_percent"][-1] <= 100.0
    # All hosts' logs are searched: the others say nothing that would count twice.
    assert found_in([*log_of(job, "algo-1"), *log_of(job, "algo-3")]) == {}
    assert "hetero_metric" not in job.output, "a person is shown the lines for programs"
    words = [line.partition(PROGRESS_MARK)[2] for line in job.output.splitlines()]
    *_, progress = (found for text in words if (found := re.match(r"step (\d+) of (\d+) in pass (\d+) of .*", text)))
    assert progress[1] == progress[2]
    assert int(progress[3]) * int(progress[1]) == min(steps)
    assert "samples/s" in progress[0], "the figures of a host are missing"
    assert not re.search(r"[\r\x1b]", job.output), "it is no terminal"


@pytest.mark.parametrize("tag", ["[1,0]<stderr>:", "[1,0]<stderr>: ", "[1,mpirank:0,algo-1]<stderr>:"])
def test_metric_lines_are_found_behind_the_tags_of_mpirun(tag: str) -> None:
    line = "[dnn_group algo-3 trainer] INFO hetero_metric step_time_ms=12.5"
    assert found_in([tag + line]) == {"hetero:step_time_ms": [12.5]}


@pytest.mark.parametrize(
    "before", ["[dnn_group algo-3 trainer] rank 0: ", "[dnn_group algo-3 trainer] INFO it says ", "x"]
)
def test_metric_lines_that_are_quoted_do_not_count(before: str) -> None:
    line = "[dnn_group algo-3 trainer] INFO hetero_metric step_time_ms=12.5"
    assert found_in([before + line, before + "[1,0]<stderr>:" + line, f"{line} more"]) == {}


def test_definitions_are_within_the_limits_of_the_service() -> None:
    assert len(METRIC_DEFINITIONS) <= 40
    assert len({definition["Name"] for definition in METRIC_DEFINITIONS}) == len(METRIC_DEFINITIONS)
    for definition in METRIC_DEFINITIONS:
        assert definition.keys() == {"Name", "Regex"}
        assert len(definition["Name"]) <= 255
        assert len(definition["Regex"]) <= 500

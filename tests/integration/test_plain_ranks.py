"""Ranks without torch, in a whole job."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.integration.harness import CHAIN, StartJob, data

SCRIPT = CHAIN.with_name("plain_ranks.py")
NUM_SAMPLES = 40


def test_ranks_without_torch_share_the_data_and_start_over_on_other_ports(start_job: StartJob, tmp_path: Path) -> None:
    output = tmp_path / "results"
    output.mkdir()
    job = start_job(
        [data(1), "dnn_group=ml.p3.2xlarge:2"],
        *("--framework", "tensorflow", "--nproc-per-node", "2", "--endpoints-per-host", "1", "--job-restarts", "1"),
        script=SCRIPT,
        args=[str(output), str(NUM_SAMPLES)],
    )
    assert job.wait() == 0, job.output
    cause = "HET-30 algo-3: rank 3: the training script raised RuntimeError: training fails on purpose"
    assert f"restart 1 of at most 1 of the trainer group, because of {cause}" in job.output
    assert job.report()["run"]["events"]["job restarts"] == 1
    workers = []
    for restarts in range(2):
        results = [json.loads((output / f"rank-{rank}-{restarts}.json").read_text()) for rank in range(4)]
        assert sorted(index for result in results for index in result["indices"]) == list(range(NUM_SAMPLES))
        assert [result["heavy"] for result in results] == [[]] * 4
        configs = [result["config"] for result in results]
        assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(4)]
        assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
        workers.append(configs[0]["cluster"]["worker"])
        parts = [worker.rpartition(":") for worker in workers[-1]]
        addresses, ports = [part[0] for part in parts], [int(part[2]) for part in parts]
        assert addresses[0] == addresses[1] != addresses[2] == addresses[3]
        assert (ports[1], ports[3]) == (ports[0] + 1, ports[2] + 1)
    assert workers[0] != workers[1]

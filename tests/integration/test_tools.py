"""Jobs whose script hands the loader to a tool."""

from __future__ import annotations

from pathlib import Path

from harness import CHAIN, StartJob

TOOLS = CHAIN.with_name("tools.py")


def test_batches_through_tools_in_a_heterogeneous_job_are_the_same(start_job: StartJob, tmp_path: Path) -> None:
    digests = {}
    for tool in ("none", "accelerate", "lightning"):
        job = start_job(
            ["data_group=ml.c5.9xlarge:1", "dnn_group=ml.p3.2xlarge:1"],
            "--endpoints-per-host",
            "1",
            "--nproc-per-node",
            "2",
            script=TOOLS,
            args=["--output", str(tmp_path), "--tool", tool],
            environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},  # torch's own, which it keeps
        )
        assert job.wait() == 0, job.output
        digests[tool] = [(tmp_path / f"{tool}-{rank}").read_text() for rank in range(2)]
    assert digests["none"][0] != digests["none"][1]
    assert digests["accelerate"] == digests["lightning"] == digests["none"]

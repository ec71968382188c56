"""Jobs whose script hands the loader to a tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import CHAIN, DNN, StartJob, data

TOOLS = CHAIN.with_name("tools.py")
NUM_SAMPLES = 53
STEPS, SKIPPED = 7, 3


def run_tools(start_job: StartJob, folder: Path, tools: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Run tools in a job of two data hosts and two ranks; return what they wrote, per tool and rank."""
    job = start_job(
        [data(2), DNN],
        "--endpoints-per-host",
        "1",
        "--nproc-per-node",
        "2",
        script=TOOLS,
        args=["--output", str(folder), "--tools", *tools],
        environment={"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},  # torch's own, which it keeps
    )
    assert job.wait() == 0, job.output
    return {tool: [json.loads((folder / f"{tool}-{rank}.json").read_text()) for rank in range(2)] for tool in tools}


def assert_resumed(ranks: list[dict[str, Any]]) -> None:
    """Expect the batches of the whole run from the middle of its second epoch on."""
    for found in ranks:
        assert len(found["whole"]) == 2 * STEPS
        assert found["resumed"] == found["whole"][STEPS + SKIPPED :]


def of_both_ranks(ranks: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the draws of each step's samples; the last step of an epoch is padded."""
    steps = [{**first, **second} for first, second in zip(ranks[0]["whole"], ranks[1]["whole"], strict=True)]
    return [step for number, step in enumerate(steps) if number % STEPS != STEPS - 1]


def test_accelerate_and_lightning_in_a_heterogeneous_job_feed_and_resume_as_the_loader_itself(
    start_job: StartJob, tmp_path: Path
) -> None:
    found = run_tools(start_job, tmp_path, ["none", "accelerate", "lightning"])
    for ranks in found.values():
        assert_resumed(ranks)
    assert [rank["whole"] for rank in found["lightning"]] == [rank["whole"] for rank in found["none"]]
    assert of_both_ranks(found["accelerate"]) == of_both_ranks(found["none"])
    assert [rank["gathered"] for rank in found["accelerate"]] == [list(range(NUM_SAMPLES))] * 2


def test_hugging_face_trainer_in_a_heterogeneous_job_resumes_and_counts_exactly(
    start_job: StartJob, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    found = run_tools(start_job, tmp_path, ["trainer", "prepared-trainer"])
    for ranks in found.values():
        assert_resumed(ranks)
        for rank in ranks:
            whole, resumed = rank["losses"]
            assert resumed == whole  # those of the first part are in the checkpoint
            assert len(whole) == 2 * STEPS
            assert rank["predicted"] == list(range(NUM_SAMPLES))
    assert of_both_ranks(found["prepared-trainer"]) == of_both_ranks(found["trainer"])

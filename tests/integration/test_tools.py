"""Jobs whose script hands the loader to a tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.integration.harness import CHAIN, DNN, StartJob, data

TOOLS = CHAIN.with_name("tools.py")
NUM_SAMPLES = 53
STEPS, SKIPPED = 7, 3


TOOL_NAMES = ("none", "accelerate", "lightning", "trainer", "prepared-trainer")
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(start_shared_job: StartJob, shared_folder: Path) -> Found:
    """Run all tools, one after the other, in a job of a data host and two ranks. Return what each rank wrote."""
    pytest.importorskip("transformers")
    job = start_shared_job(
        [data(1), DNN],
        *("--endpoints-per-host", "1", "--nproc-per-node", "2"),
        script=TOOLS,
        args=["--output", str(shared_folder), "--tools", *TOOL_NAMES],
        environment={"TORCHINDUCTOR_CACHE_DIR": str(shared_folder / "inductor")},  # torch's own, which it keeps
    )
    assert job.wait() == 0, job.output
    return {
        tool: [json.loads((shared_folder / f"{tool}-{rank}.json").read_text()) for rank in range(2)]
        for tool in TOOL_NAMES
    }


def assert_resumed(ranks: list[dict[str, Any]]) -> None:
    """Expect the batches of the whole run from the middle of its second epoch on."""
    for found in ranks:
        assert len(found["whole"]) == 2 * STEPS
        assert found["resumed"] == found["whole"][STEPS + SKIPPED :]


def of_both_ranks(ranks: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the draws of each step's samples. The last step of an epoch is padded."""
    steps = [{**first, **second} for first, second in zip(ranks[0]["whole"], ranks[1]["whole"], strict=True)]
    return [step for number, step in enumerate(steps) if number % STEPS != STEPS - 1]


@pytest.mark.parametrize("tool", TOOL_NAMES)
def test_tool_in_a_heterogeneous_job_resumes_exactly(found: Found, tool: str) -> None:
    assert_resumed(found[tool])


def test_accelerate_and_lightning_in_a_heterogeneous_job_feed_as_the_loader_itself(found: Found) -> None:
    assert [rank["whole"] for rank in found["lightning"]] == [rank["whole"] for rank in found["none"]]
    assert of_both_ranks(found["accelerate"]) == of_both_ranks(found["none"])
    assert [rank["gathered"] for rank in found["accelerate"]] == [list(range(NUM_SAMPLES))] * 2


@pytest.mark.parametrize("tool", ["trainer", "prepared-trainer"])
def test_hugging_face_trainer_in_a_heterogeneous_job_counts_exactly(found: Found, tool: str) -> None:
    for rank in found[tool]:
        whole, resumed = rank["losses"]
        assert resumed == whole  # those of the first part are in the checkpoint
        assert len(whole) == 2 * STEPS
        assert rank["predicted"] == list(range(NUM_SAMPLES))


def test_prepared_trainer_is_fed_what_the_trainer_is(found: Found) -> None:
    assert of_both_ranks(found["prepared-trainer"]) == of_both_ranks(found["trainer"])

"""Several ranks of a process group: the global batches, the end and the states are those of one rank."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.lanes.ranks import Case, Passed, global_batches, run_pass, run_ranks
from tests.support.streams import StatefulNumbers, Undivided

NUM_SAMPLES = 403
NUM_STEPS_BEFORE = 20
CASES: dict[str, Case] = {
    "stop": {"source": StatefulNumbers(NUM_SAMPLES), "options": {"lanes": 8, "chunk_samples": 2}},
    "rest": {"source": StatefulNumbers(NUM_SAMPLES), "options": {"lanes": 8, "chunk_samples": 2, "end": "rest"}},
    # Four ranks share the chunks.
    "shared chunks": {"source": StatefulNumbers(NUM_SAMPLES), "options": {"lanes": 8, "chunk_samples": 4}},
}
STATES: dict[str, Case] = {
    end: {
        "source": StatefulNumbers(NUM_SAMPLES),
        "options": {"lanes": 8, "chunk_samples": 2, "end": end},
        "max_steps": NUM_STEPS_BEFORE,
    }
    for end in ("stop", "rest", "wrap")
}
UNDIVIDED: Case = {
    "source": Undivided(100),
    "options": {"lanes": 8, "chunk_samples": 2, "end": "rest", "guarantee": "replay"},
}
RESUMED = [(end, rank) for end in ("stop", "rest") for rank in (0, 3)]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[Any]]]:
    """Global batches of one rank."""
    return {name: global_batches([run_pass(case, 1)]) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def two_ranks(four_ranks: dict[str, list[Passed]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Passed]]:
    cases = {**CASES, "undivided": UNDIVIDED}
    for end, rank in RESUMED:
        cases[f"resumed {end} {rank}"] = {**CASES[end], "state": four_ranks[f"state {end}"][rank]["state"]}
    return dict(zip(cases, run_ranks(2, list(cases.values()), tmp_path_factory.mktemp("two") / "x"), strict=True))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Passed]]:
    cases = {**CASES, **{f"state {end}": case for end, case in STATES.items()}}
    return dict(zip(cases, run_ranks(4, list(cases.values()), tmp_path_factory.mktemp("four") / "x"), strict=True))


@pytest.fixture(params=["two_ranks", "four_ranks"])
def passes(request: pytest.FixtureRequest) -> dict[str, list[Passed]]:
    found: dict[str, list[Passed]] = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_has_the_same_global_batches(
    name: str, passes: dict[str, list[Passed]], alone: dict[str, list[list[Any]]]
) -> None:
    assert [rank["error"] for rank in passes[name]] == [""] * len(passes[name])
    assert global_batches(passes[name]) == alone[name]


@pytest.mark.parametrize("name", ["stop", "shared chunks"])
def test_all_ranks_end_at_the_same_step(name: str, passes: dict[str, list[Passed]]) -> None:
    assert len({len(rank["batches"]) for rank in passes[name]}) == 1
    assert {len(batch) for rank in passes[name] for batch in rank["batches"]} == {8 // len(passes[name])}


def test_rest_delivers_each_sample_once_over_all_ranks(passes: dict[str, list[Passed]]) -> None:
    found = [sample[0] for batch in global_batches(passes["rest"]) for sample in batch]
    assert sorted(found) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(("end", "rank"), RESUMED)
def test_two_ranks_resume_from_the_state_of_one_of_four(
    end: str, rank: int, two_ranks: dict[str, list[Passed]], alone: dict[str, list[list[Any]]]
) -> None:
    assert global_batches(two_ranks[f"resumed {end} {rank}"]) == alone[end][NUM_STEPS_BEFORE:]


@pytest.mark.parametrize("end", STATES)
def test_state_of_each_rank_has_snapshots_of_all_lanes(end: str, four_ranks: dict[str, list[Passed]]) -> None:
    """Without one, another number of ranks would read the lane from its beginning."""
    for rank in four_ranks[f"state {end}"]:
        assert sorted(rank["snapshots"], key=int) == [str(lane) for lane in range(8)]
        # A lane has 2 samples in every second step. The last step may not be shared yet.
        assert min(rank["snapshots"].values()) >= NUM_STEPS_BEFORE - 4, rank["snapshots"]
        assert max(rank["snapshots"].values()) <= NUM_STEPS_BEFORE
        json.dumps(rank["state"])


def test_ranks_that_read_the_same_samples_are_named(two_ranks: dict[str, list[Passed]]) -> None:
    for rank in two_ranks["undivided"]:
        if rank["error"]:
            assert "give the same samples, because the source does not divide itself" in rank["error"]
        assert len(rank["batches"]) <= 2
    assert any(rank["error"] for rank in two_ranks["undivided"])

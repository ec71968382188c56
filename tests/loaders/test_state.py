"""Which epoch comes next, and checkpoints of the place in it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hetero.errors import ConfigError
from hetero.loaders.state import LoaderState, Progress, Start

STATE = LoaderState(epoch=3, batches=5, order="shuffled", seed=1, num_samples=100, global_batch=8)


def test_progress_without_set_epoch_counts_passes() -> None:
    progress = Progress()
    assert [progress.begin()[1].epoch for _ in range(3)] == [0, 1, 2]


def test_progress_set_epoch_chooses_an_epoch_and_each_pass_of_it_has_its_own_number() -> None:
    progress = Progress()
    numbers = []
    for epoch in range(3):
        progress.set_epoch(epoch)
        assert progress.position() == Start(epoch, earlier_passes=0)
        starts = [progress.begin()[1] for _ in range(3)]
        assert [start.epoch for start in starts] == [epoch] * 3
        numbers += [start.number for start in starts]
    assert len(set(numbers)) == 9
    assert numbers[::3] == [0, 1, 2]  # the first pass of an epoch is what it is without the others


def test_progress_of_keras_counts_on_from_the_epoch_that_was_chosen() -> None:
    progress = Progress(advances_chosen_epoch=True)
    progress.set_epoch(7)
    assert [progress.begin()[1].number for _ in range(2)] == [7, 8]


@pytest.mark.parametrize("is_chosen", [False, True])
def test_progress_resumes_a_further_pass_of_an_epoch(is_chosen: bool) -> None:
    progress = Progress()
    progress.resume(dataclasses.replace(STATE, again=2, completed=False))
    if is_chosen:
        progress.set_epoch(3)
    assert progress.begin()[1] == Start(3, 5, num_samples=100, earlier_passes=2)
    assert progress.begin()[1] == Start(3, earlier_passes=3)


def test_progress_position_is_that_of_the_latest_pass() -> None:
    progress = Progress()
    first, _ = progress.begin()
    progress.advance(first, batches=2)
    second, _ = progress.begin()
    progress.advance(first, batches=3)
    assert progress.position() == Start(1, 0)
    progress.advance(second, batches=1)
    assert progress.position() == Start(1, 1)


def test_progress_resume_continues_and_then_goes_on() -> None:
    progress = Progress()
    progress.resume(STATE)
    assert progress.position().batches == 5
    assert progress.begin()[1] == Start(3, 5, may_become_next_epoch=True, completed=True, num_samples=100)
    assert progress.begin()[1] == Start(4)


def test_progress_resume_with_set_epoch_of_the_same_epoch_continues_even_if_nothing_is_left() -> None:
    progress = Progress()
    progress.resume(STATE)
    progress.set_epoch(3)
    assert progress.begin()[1] == Start(3, 5, completed=True, num_samples=100, earlier_passes=0)


def test_progress_resume_with_set_epoch_of_another_epoch_starts_it(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress()
    progress.resume(STATE)
    progress.set_epoch(6)
    assert progress.begin()[1] == Start(6, earlier_passes=0)
    assert "discards the loaded state" in caplog.text


def test_progress_tool_that_counts_from_zero_after_resume_means_the_states_epoch() -> None:
    progress = Progress()
    progress.resume(STATE)
    for epoch in range(3):
        progress.set_epoch_by_tool(epoch)
        assert progress.begin()[1].epoch == 3 + epoch


def test_progress_tool_that_restored_its_count_is_taken_at_its_word() -> None:
    progress = Progress()
    progress.resume(STATE)
    progress.set_epoch_by_tool(3)
    assert progress.begin()[1] == Start(3, 5, completed=True, num_samples=100, earlier_passes=0)
    progress.set_epoch_by_tool(4)
    assert progress.begin()[1] == Start(4, earlier_passes=0)


@pytest.mark.parametrize("epoch", [-1, 1.0, True, "1", 2**32])
def test_progress_set_epoch_invalid_raises(epoch: object) -> None:
    with pytest.raises(ConfigError, match="expected an integer"):
        Progress().set_epoch(epoch)  # type: ignore[arg-type]


def test_state_survives_json_and_is_small() -> None:
    text = json.dumps(STATE.to_dict())
    assert len(text) < 1024
    assert LoaderState.from_dict(json.loads(text)) == STATE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epoch": -1}, "epoch: found -1"),
        ({"epoch": 2**32}, "epoch is 4294967296, expected"),
        ({"batches": 1.5}, "batches: found 1.5, expected an integer"),
        ({"order": "random"}, "order: found 'random', expected one of sequential, shuffled"),
        ({"completed": "yes"}, "completed: found 'yes', expected true or false"),
        ({"left": {"epoch": 1}}, "expected an epoch and a sampler's state"),
        ({"version": 9}, "version 9"),
        ({"more": 1}, "more: unknown key"),
    ],
)
def test_state_malformed_raises(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderState.from_dict({**STATE.to_dict(), **changed})


def test_state_of_something_else_raises() -> None:
    with pytest.raises(ConfigError, match="found list"):
        LoaderState.from_dict([])


def test_progress_state_of_the_last_step_resumes_with_what_is_left() -> None:
    progress = Progress()
    number, _ = progress.begin()
    progress.advance(number, batches=5)
    assert not progress.position().completed
    progress.complete(number)
    assert progress.position().completed
    progress.resume(dataclasses.replace(STATE, completed=False))
    assert not progress.next_start().may_become_next_epoch


def test_state_without_the_later_fields_is_read() -> None:
    value = STATE.to_dict()
    del value["left"], value["completed"]
    assert LoaderState.from_dict(value) == STATE

"""Loaders of iterables with local workers: batches, states, ends and errors."""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import hetero
from hetero.batches.lanes.states import encode_state
from hetero.errors import ConfigError, DatasetError, HeteroError

torch = pytest.importorskip("torch")

from hetero.torch import DataLoader  # noqa: E402
from tests.lanes.loaders import BATCH, NUM_LANES, NUM_SAMPLES, loader, numbers, resumed, with_states  # noqa: E402
from tests.support import streams  # noqa: E402
from tests.support.streams import Buffered, Numbers, Positioned, StatefulNumbers, Undivided, Unrepeatable  # noqa: E402

GOOD = [("exactly-once", StatefulNumbers), ("exactly-once", Positioned), ("replay", Numbers)]
LINES = ('guarantee="exactly-once"  needs', 'guarantee="replay"  ', 'guarantee="at-most-once"  ')


@hetero.dataset
def registered_stream(num_samples: int) -> Any:
    return Numbers(num_samples)


@hetero.dataset
def registered_list(num_samples: int) -> Any:
    return list(range(num_samples))


# Batches


@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_batches_take_a_chunk_of_each_lane_in_turn(guarantee: str, kind: Any) -> None:
    batches = list(loader(kind(NUM_SAMPLES), guarantee))
    lanes = [range(lane, NUM_SAMPLES, NUM_LANES) for lane in range(NUM_LANES)]
    for step, batch in enumerate(batches):
        turn, lane = divmod(step, NUM_LANES)
        assert numbers([batch]) == list(lanes[lane][turn * BATCH :][:BATCH])
    assert len(batches) == 48  # each lane has 12 chunks, and then less than one


@pytest.mark.parametrize("end", ["stop", "rest"])
@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_workers_deliver_what_this_process_does(guarantee: str, kind: Any, end: str) -> None:
    here = list(loader(kind(NUM_SAMPLES), guarantee, end=end))
    assert list(loader(kind(NUM_SAMPLES), guarantee, end=end, num_workers=2)) == here


@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_rest_delivers_each_sample_once(guarantee: str, kind: Any) -> None:
    stopped = list(loader(kind(NUM_SAMPLES), guarantee))
    batches = list(loader(kind(NUM_SAMPLES), guarantee, end="rest"))
    assert batches[: len(stopped)] == stopped
    assert sorted(numbers(batches)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_wrapped_lanes_begin_again_with_other_draws(guarantee: str, kind: Any, num_workers: int) -> None:
    num_batches = 6 * NUM_LANES  # of lanes with 10 or 11 samples
    made = loader(kind(42), guarantee, end="wrap", num_workers=num_workers)
    batches = list(itertools.islice(made, num_batches))
    for lane in range(NUM_LANES):
        found = numbers(batches[lane::NUM_LANES])
        assert found == list(itertools.islice(itertools.cycle(range(lane, 42, NUM_LANES)), len(found)))
    draws = [draw for batch in batches for _, draw in batch]
    assert len(set(draws)) == len(draws)


def test_epochs_draw_other_numbers_and_a_chosen_epoch_comes_back() -> None:
    made = loader(Numbers(NUM_SAMPLES), "replay")
    first, second = list(made), list(made)
    assert numbers(first) == numbers(second)
    assert not {draw for batch in first for _, draw in batch} & {draw for batch in second for _, draw in batch}
    made.set_epoch(1)
    again = loader(Numbers(NUM_SAMPLES), "replay", num_workers=2)
    again.set_epoch(1)
    assert list(again) == list(made) != first


def test_seed_decides_the_draws() -> None:
    first = list(loader(Numbers(NUM_SAMPLES), "replay", seed=1))
    assert list(loader(Numbers(NUM_SAMPLES), "replay", seed=1)) == first != list(loader(Numbers(NUM_SAMPLES), "replay"))


class Epochs(Numbers):
    """Yields its epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((number, self.epoch) for number, _ in super().__iter__())


def test_epoch_is_set_on_the_part_of_each_lane() -> None:
    source = Epochs(NUM_SAMPLES)
    made = loader(source, "replay")
    for epoch in range(2):
        assert {found for batch in made for _, found in batch} == {epoch}
    assert source.epoch == -1


def test_iterable_without_an_end_is_delivered() -> None:
    class Endless(Numbers):
        def __iter__(self) -> Iterator[Any]:
            own, count = streams.worker()
            return ((number, 0.0) for number in itertools.count(own, count))

    batches = list(itertools.islice(loader(Endless(0), "replay"), 100))
    assert sorted(numbers(batches)) == list(range(400))


def test_at_most_once_delivers_what_cannot_be_repeated() -> None:
    batches = list(loader(Unrepeatable(NUM_SAMPLES), "at-most-once", end="rest"))
    assert sorted(numbers(batches)) == list(range(NUM_SAMPLES))


def test_this_process_draws_the_same_numbers_afterwards() -> None:
    random.seed(3)
    list(loader(Numbers(NUM_SAMPLES), "replay"))
    found = random.random()
    random.seed(3)
    assert found == random.random()


# States


@pytest.mark.parametrize("end", ["stop", "rest"])
@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_loader_resumes_at_each_step(guarantee: str, kind: Any, end: str) -> None:
    batches, states = with_states(kind(51), guarantee, end=end)
    for step, state in enumerate(states[:-1]):
        assert list(resumed(kind(51), guarantee, state, end=end)) == batches[step:], step


@pytest.mark.parametrize("numbers_of_workers", [(0, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_loader_resumes_twice_in_an_epoch_with_other_workers(
    guarantee: str, kind: Any, numbers_of_workers: tuple[int, ...]
) -> None:
    first, second, third = numbers_of_workers
    expected = list(loader(kind(NUM_SAMPLES), guarantee, end="rest"))
    begun, states = with_states(kind(NUM_SAMPLES), guarantee, 17, end="rest", num_workers=first)
    made = resumed(kind(NUM_SAMPLES), guarantee, states[-1], end="rest", num_workers=second)
    begun += itertools.islice(made, 20)
    state = json.dumps(made.state_dict())
    begun += resumed(kind(NUM_SAMPLES), guarantee, state, end="rest", num_workers=third)
    assert begun == expected


def test_state_keeps_lanes_and_chunks_if_the_script_passes_none() -> None:
    options = {"lanes": None, "batch_size": 4, "chunk_samples": 2}
    begun, states = with_states(StatefulNumbers(NUM_SAMPLES), "exactly-once", 5, num_workers=2, **options)
    expected = list(loader(StatefulNumbers(NUM_SAMPLES), lanes=2, batch_size=4, chunk_samples=2))
    options["chunk_samples"] = None
    assert begun + list(resumed(StatefulNumbers(NUM_SAMPLES), "exactly-once", states[-1], **options)) == expected


@pytest.mark.parametrize("every", [1, 3])
def test_resumed_loader_begins_at_a_snapshot(every: int, caplog: pytest.LogCaptureFixture) -> None:
    batches, states = with_states(Positioned(NUM_SAMPLES), "exactly-once", 5 * NUM_LANES, snapshot_every_n_steps=every)
    made = resumed(Positioned(NUM_SAMPLES), "exactly-once", states[-1], snapshot_every_n_steps=every)
    with caplog.at_level(logging.INFO):
        batches.append(next(iter(made)))
    assert batches == list(loader(Positioned(NUM_SAMPLES)))[: len(batches)]
    # If the last snapshot is at the place, the one before it is used, to compare the samples in between.
    passed_over = 5 * BATCH % (every * BATCH) or every * BATCH
    assert f"begun anew at sample {5 * BATCH - passed_over}, and {passed_over} samples were passed over" in caplog.text


def test_state_at_the_end_of_an_epoch_begins_the_next_one_also_with_other_lanes() -> None:
    made = loader(StatefulNumbers(NUM_SAMPLES))
    list(made)
    state = json.dumps(made.state_dict())
    second = list(made)
    assert list(resumed(StatefulNumbers(NUM_SAMPLES), "exactly-once", state)) == second
    other = resumed(StatefulNumbers(NUM_SAMPLES), "exactly-once", state, lanes=6, chunk_samples=2, end="rest")
    assert sorted(numbers(other)) == list(range(NUM_SAMPLES))


def test_state_of_the_last_step_leaves_nothing_of_its_epoch() -> None:
    made = loader(StatefulNumbers(51))
    for _ in made:
        state = json.dumps(made.state_dict())
    again = resumed(StatefulNumbers(51), "exactly-once", state)
    assert list(again) == []
    assert list(again) == list(made)


def test_state_counts_the_batches_that_were_trained_on() -> None:
    made = loader(StatefulNumbers(NUM_SAMPLES), num_workers=2)
    batches = list(itertools.islice(made, 10))
    state = json.dumps(made.state_dict(num_batches_trained=9))
    assert next(iter(resumed(StatefulNumbers(NUM_SAMPLES), "exactly-once", state))) == batches[9]


class Uneven(Positioned):
    """Lanes of 7, 23, 4 and 41 samples."""

    def hetero_split(self, lane: int, num_lanes: int) -> Uneven:
        return Uneven((7, 23, 4, 41)[lane])


def test_what_the_default_end_leaves_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    made = loader(Uneven(0))
    assert sum(map(len, made)) == 4 * 4
    assert "At least 11 samples of this rank's lanes are left out" in caplog.text  # 3 + 4 + 0 + 4
    caplog.clear()
    assert sum(map(len, made)) == 4 * 4
    assert caplog.text == ""
    assert sum(map(len, loader(StatefulNumbers(64)))) == 64
    assert caplog.text == ""


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_state_counts_the_batches_of_lanes_that_are_over(num_ahead: int) -> None:
    whole = list(loader(Uneven(0), end="rest"))
    for num_trained in range(1, len(whole) - num_ahead):
        made = loader(Uneven(0), end="rest")
        list(itertools.islice(made, num_trained + num_ahead))
        state = json.dumps(made.state_dict(num_batches_trained=num_trained))
        assert list(resumed(Uneven(0), "exactly-once", state, end="rest")) == whole[num_trained:]


@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_wrapped_lanes_resume_in_a_later_round(guarantee: str, kind: Any) -> None:
    batches, states = with_states(kind(42), guarantee, 40, end="wrap")
    for step in (9, 12, 25):
        made = resumed(kind(42), guarantee, states[step], end="wrap")
        assert list(itertools.islice(made, 40 - step)) == batches[step:]


# Errors


class Chosen(StatefulNumbers):
    """Raises at a number, or adds to each number what the class says."""

    added = 0
    raises_at = -1

    def __iter__(self) -> Iterator[Any]:
        for number, draw in super().__iter__():
            if number == self.raises_at:
                raise OSError("the disk is gone")
            yield number + self.added, draw


class NotStateful(Chosen):
    state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        self.num_read = 0
        return super().__iter__()


@pytest.mark.parametrize(
    ("source", "guarantee", "message"),
    [
        (Numbers(100), "exactly-once", 'guarantee="exactly-once" needs a state, and the iterator of Numbers has no'),
        (Buffered(100), "exactly-once", "lane 0 gives other samples after its state at sample 4 is loaded"),
        (Unrepeatable(100), "replay", "lane 0 gave other samples before sample 8 .* cannot be replayed"),
        (Undivided(100), "replay", "lanes 0 and 1 of loader Undivided give the same samples"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_source_that_does_not_keep_the_guarantee_is_refused_in_the_first_round(
    source: Any, guarantee: str, message: str, num_workers: int
) -> None:
    delivered: list[Any] = []
    with pytest.raises(HeteroError, match=message):
        delivered.extend(loader(source, guarantee, num_workers=num_workers))
    assert len(delivered) < NUM_LANES


@pytest.mark.parametrize("end", ["stop", "wrap", "rest"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_more_lanes_than_samples_are_named(end: str, batch_size: int) -> None:
    with pytest.raises(ConfigError, match="(lane [34] of 5 yields nothing|a lane of 5 has not even 2)") as raised:
        list(itertools.islice(loader(Numbers(3), "replay", lanes=5, batch_size=batch_size, end=end), 20))
    assert "Pass the loader a smaller lanes=" in str(raised.value)


@pytest.mark.parametrize("made", [lambda: Numbers(9), lambda: Positioned(9), lambda: registered_stream(num_samples=9)])
@pytest.mark.parametrize("use", [lambda made: next(iter(made)), len], ids=["next", "len"])
def test_iterable_without_a_guarantee_is_refused_with_the_choices(
    made: Callable[[], Any], use: Callable[[Any], object]
) -> None:
    with pytest.raises(ConfigError, match="is iterable, and has no index") as raised:
        use(DataLoader(made(), batch_size=BATCH))
    assert all(line in str(raised.value) for line in LINES)


@pytest.mark.parametrize("source", [list(range(9)), registered_list(num_samples=9)], ids=["object", "registered"])
def test_guarantee_for_a_data_set_with_an_index_is_refused(source: Any) -> None:
    with pytest.raises(HeteroError, match="has an index, so it needs no"):
        next(iter(DataLoader(source, batch_size=2, guarantee="replay")))


def test_guarantee_for_an_iterator_is_refused() -> None:
    with pytest.raises(ConfigError, match="can be read only once"):
        DataLoader(iter(range(9)), batch_size=2, guarantee="replay")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "shuffle= needs an index"),
        ({"shuffle": "window"}, "shuffle= needs an index"),
        ({"sampler": [1, 2]}, "sampler= and batch_sampler= need an index"),
        ({"batch_sampler": [[1]], "batch_size": 1}, "sampler= and batch_sampler= need an index"),
        ({"batch_size": None}, "an iterable needs a batch_size"),
        ({"on_sample_error": "skip"}, 'on_sample_error="skip" needs an index'),
        ({"lanes": 0}, "lanes is 0, expected"),
        ({"lanes": True}, "lanes is True, expected"),
        ({"lanes": 2**20}, "lanes is 1048576, expected"),
        ({"lanes": 4.0}, "lanes is 4.0, expected"),
        ({"end": "later"}, "end is 'later', expected 'stop', 'wrap' or 'rest'"),
        ({"chunk_samples": 0}, "chunk_samples is 0, expected"),
        ({"chunk_samples": "4"}, "chunk_samples is '4', expected"),
        ({"snapshot_every_n_steps": 0}, "snapshot_every_n_steps is 0, expected"),
        ({"snapshot_every_n_steps": 2**20}, r"at least 1 and below 2\*\*20"),
        ({"guarantee": "always"}, "guarantee is 'always', expected one of these:\n.*exactly-once"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_when_the_loader_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(**{"source": Numbers(100), "guarantee": "replay", **options})


@pytest.mark.parametrize("options", [{"lanes": 4}, {"end": "rest"}])
def test_lanes_of_a_data_set_with_an_index_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="lanes= and end= are for iterables"):
        DataLoader(list(range(9)), batch_size=2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 8, "chunk_samples": 2, "lanes": 6},
            "6 lanes cannot be divided over a step.* 4 lanes\n  Pass lanes=4 ",
        ),
        ({"batch_size": 8, "chunk_samples": 3}, "chunk_samples is 3, and batch_size is 8"),
        ({"shard": (0, 2), "lanes": 7, "end": "rest"}, "7 lanes cannot be divided"),
        ({"shard": (0, 2)}, 'end="stop" needs a process group'),
    ],
)
def test_lanes_that_do_not_fit_the_batches_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(iter(loader(Numbers(100), "replay", **options)))


@pytest.mark.parametrize("options", [{"lanes": 3}, {"batch_size": 8, "chunk_samples": 2}])
def test_lanes_that_move_between_workers_are_named(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    next(iter(loader(StatefulNumbers(100), num_workers=2, **options)))
    assert "which is no multiple of num_workers=2, so lanes move between workers" in caplog.text
    with pytest.raises(ConfigError, match="each move loses samples"):
        next(iter(loader(Numbers(100), "at-most-once", num_workers=2, **options)))


def test_workers_that_do_not_fit_the_lanes_of_a_state_are_refused() -> None:
    _, states = with_states(Numbers(100), "at-most-once", 3, lanes=3)
    with pytest.raises(ConfigError, match="each lane is read every 3 steps, which is no multiple of num_workers=2"):
        next(iter(resumed(Numbers(100), "at-most-once", states[-1], num_workers=2, lanes=None)))


def test_length_is_not_known() -> None:
    with pytest.raises(TypeError, match="of an iterable has no len"):
        len(loader(Numbers(100), "replay"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_source_that_raises_names_lane_and_place(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chosen, "raises_at", 81)  # sample 20 of lane 1
    made = loader(Chosen(NUM_SAMPLES), num_workers=num_workers, end="rest")
    batches = iter(made)
    delivered = [next(batches) for _ in range(21)]
    state = json.dumps(made.state_dict())
    with pytest.raises(OSError, match="the disk is gone") as raised:
        next(batches)
    assert isinstance(raised.value, DatasetError)
    assert "(1, 20)" in str(raised.value)
    # A loader that is made when the disk is back goes on.
    monkeypatch.setattr(Chosen, "raises_at", -1)
    rest = list(resumed(Chosen(NUM_SAMPLES), "exactly-once", state, end="rest"))
    assert sorted(numbers(delivered + rest)) == list(range(NUM_SAMPLES))


def test_packer_that_raises_in_a_lane_without_a_shard_names_the_lane() -> None:
    class Packer:
        def hetero_split(self, lane: int, num_lanes: int) -> list[int]:
            shards = [[1, 2], [3, 4]][lane::num_lanes]
            return [number for shard in shards for number in shard] + [shards[0][0]]

    batches = loader(Packer(), "replay", lanes=3, end="rest")
    with pytest.raises(IndexError, match=r"lane 2 of 3 begins here, and may have no shard"):
        list(batches)


def test_source_that_changed_is_found_when_it_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, states = with_states(NotStateful(NUM_SAMPLES), "replay", 9)
    monkeypatch.setattr(Chosen, "added", 1)
    with pytest.raises(ConfigError, match="lane 1 gave other samples before sample 8 .* cannot be replayed"):
        next(iter(resumed(NotStateful(NUM_SAMPLES), "replay", states[-1])))


def test_source_that_changed_is_found_between_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    _, states = with_states(Chosen(NUM_SAMPLES), "exactly-once", 5 * NUM_LANES, snapshot_every_n_steps=3)
    monkeypatch.setattr(Chosen, "added", 1)
    with pytest.raises(ConfigError, match="lane 0 gave other samples before sample 20"):
        next(iter(resumed(Chosen(NUM_SAMPLES), "exactly-once", states[-1], snapshot_every_n_steps=3)))


@pytest.mark.parametrize(
    ("guarantee", "kind", "every"),
    [("exactly-once", Chosen, 1), ("exactly-once", Chosen, 99), ("replay", NotStateful, 1)],
)
def test_state_of_another_version_is_refused_unless_it_is_allowed(
    guarantee: str, kind: Any, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("fake_library")
    library.__version__ = "1.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_library", library)
    monkeypatch.setattr(kind, "__module__", "fake_library.streams")
    batches, states = with_states(kind(NUM_SAMPLES), guarantee, snapshot_every_n_steps=every)
    library.__version__ = "1.1"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="lane 1 is of fake_library 1.0, this host has fake_library 1.1"):
        next(iter(resumed(kind(NUM_SAMPLES), guarantee, states[9])))
    made = resumed(kind(NUM_SAMPLES), guarantee, states[9], allow_version_change=True)
    assert list(made) == batches[9:]


@pytest.mark.parametrize("options", [{"lanes": 8}, {"chunk_samples": 2}])
def test_state_of_other_lanes_within_an_epoch_is_refused(options: dict[str, Any]) -> None:
    _, states = with_states(StatefulNumbers(NUM_SAMPLES), "exactly-once", 3)
    with pytest.raises(ConfigError, match="within an epoch of 4 lanes and 4 samples of a lane in a row, this loader"):
        next(iter(resumed(StatefulNumbers(NUM_SAMPLES), "exactly-once", states[-1], **options)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 0}, "lanes is .*expected their number and snapshots"),
        ({"chunk_samples": True}, "lanes is .*expected"),
        ({"snapshots": 5}, "lanes is .*expected"),
        ({"more": 1}, "lanes is .*expected"),
        ({"snapshots": ""}, "damaged"),
        ({"snapshots": "!"}, "damaged"),
        *(
            ({"snapshots": b64encode(encode_state(rows)).decode()}, "the lanes of a loader's state are damaged")
            for rows in (5, [1], [(0, (), None)], [(0, {}, None)], [(0, None, (1, b"", b""))], [("a", None, None)])
        ),
    ],
)
def test_damaged_lanes_of_a_state_are_refused(changes: dict[str, Any], message: str) -> None:
    _, states = with_states(StatefulNumbers(NUM_SAMPLES), "exactly-once", 3)
    state = json.loads(states[-1])
    state["lanes"].update(changes)
    with pytest.raises(ConfigError, match=message):
        next(iter(resumed(StatefulNumbers(NUM_SAMPLES), "exactly-once", json.dumps(state))))


def test_state_of_a_loader_without_lanes_is_refused() -> None:
    state = DataLoader(list(range(9)), batch_size=4).state_dict()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="order"):
        loader(Numbers(100), "replay").load_state_dict(state)

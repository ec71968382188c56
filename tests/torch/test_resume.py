"""Resuming, as users of other loaders report that it goes wrong there. Every case also with real endpoints."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.control.rank import session as control
from hetero.errors import ConfigError
from hetero.loaders import remote
from hetero.torch import DataLoader
from tests.support.torch.endpoints import ServedJob
from tests.support.torch.loaders import be_rank
from tests.support.torch.samplers import Endless
from tests.support.waiting import wait_for
from tests.torch import drawing_script
from tests.torch.drawing_script import drawing

State = dict[str, object]


class Placement:
    """Where the loaders of a test fetch. ``restart`` is a new process, with other endpoints, as after a failure.

    Args:
        name: ``here``, ``workers`` or ``endpoints``.
        jobs: Those whose endpoints take turns. Empty if fetching is local.
        monkeypatch: Of the test.
    """

    def __init__(self, name: str, jobs: list[ServedJob], monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.job: ServedJob | None = None
        self._jobs = itertools.cycle(jobs)
        self._patch = monkeypatch
        self.restart()

    def restart(self) -> None:
        ServedJob.disconnect()
        self.job = next(self._jobs, None)
        self._patch.setattr(control, "_session", self.job)

    def be(self, rank: int, world_size: int) -> None:
        """Be another rank from now on."""
        if self.job is not None:
            self.job.rank, self.job.world_size = rank, world_size
        be_rank(self._patch, rank, world_size)

    def make(self, state: State | None = None, **options: Any) -> DataLoader[Any]:
        workers = {"num_workers": 2, "prefetch_factor": 4} if self.name == "workers" else {}
        given: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5, **workers, **options}
        loader: DataLoader[Any] = DataLoader(drawing(), **given)
        if state is not None:
            # Through JSON: a checkpoint holds plain values.
            loader.load_state_dict(json.loads(json.dumps(state)))
        return loader


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedJob]]:
    """Two jobs, with one endpoint and with two."""
    jobs = [ServedJob(tmp_path_factory.mktemp("served"), Path(drawing_script.__file__)) for _ in range(2)]
    try:
        for number, job in enumerate(jobs):
            job.start(number + 1)
        yield jobs
    finally:
        for job in jobs:
            job.stop()


@pytest.fixture(scope="module", params=["here", "workers", pytest.param("endpoints", marks=pytest.mark.integration)])
def where(request: pytest.FixtureRequest) -> str:
    """Name a placement. It is of the module, because workers must not be forked beside the connections of endpoints."""
    name: str = request.param
    return name


@pytest.fixture
def placement(where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Placement]:
    jobs = request.getfixturevalue("served") if where == "endpoints" else []
    for job in jobs:
        job.rank, job.world_size = 0, 1
    threads = threading.active_count()
    yield Placement(where, jobs, monkeypatch)
    gc.collect()  # torch ends persistent workers in their loader's finalizer, in whichever thread that runs: here
    ServedJob.disconnect()
    hetero.spec.set_describer(None)
    if jobs:
        wait_for(lambda: threading.active_count() <= threads)


def plain(batch: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(batch["index"].tolist()), tuple(map(tuple, batch["noise"].tolist())), tuple(batch["name"])


def contents(batches: Any) -> list[tuple[Any, ...]]:
    return [plain(batch) for batch in batches]


def take(count: int, batches: Any) -> list[tuple[Any, ...]]:
    """Return the contents of so many batches, and leave the rest in flight."""
    iterator = iter(batches)
    return [plain(next(iterator)) for _ in range(count)]


NUM_BATCHES = 10  # 37 samples, 4 each


def test_resume_of_a_peer_is_not_one_batch_behind(placement: Placement) -> None:
    """torchft 309: a recovered rank is one batch behind its peer, and stalls it with a batch too many at the end."""
    options = {"batch_size": 3}  # 7 global batches of 6 samples
    whole = []
    for rank in range(2):
        placement.be(rank, 2)
        whole.append(contents(placement.make(**options)))
    assert [len(batches) for batches in whole] == [7, 7]
    placement.be(0, 2)
    peer = placement.make(**options)
    for step, batch in enumerate(peer):
        assert plain(batch) == whole[0][step]
        if step not in (0, 3, 6):
            continue
        state = peer.state_dict()  # with batches in flight, between the peer's optimizer step and its next batch
        placement.be(1, 2)
        recovered = placement.make(state, **options)
        recovered.set_epoch(0)
        assert contents(recovered) == whole[1][step + 1 :]
        placement.be(0, 2)


def test_resume_after_whole_epochs_drops_no_epoch(placement: Placement) -> None:
    """pytorch/data 1437: of two epochs, a checkpoint and two more epochs, three ran. The loaded state had changed."""
    whole = placement.make()
    epochs = [contents(whole) for _ in range(4)]
    assert len({epoch[0] for epoch in epochs}) == 4
    first = placement.make()
    assert [contents(first), contents(first)] == epochs[:2]
    state = first.state_dict()
    placement.restart()
    second = placement.make(state)
    assert second.state_dict() == state
    assert [contents(second), contents(second)] == epochs[2:]


def test_resume_in_the_middle_shortens_no_later_epoch(placement: Placement) -> None:
    """huggingface/datasets 7447: after a resume every epoch had only the batches that were left of the first."""
    options = {"persistent_workers": True} if placement.name == "workers" else {}  # only with them, there
    whole = placement.make(**options)
    epochs = [contents(whole) for _ in range(3)]
    first = placement.make(**options)
    contents(first)
    assert take(7, first) == epochs[1][:7]
    placement.restart()
    resumed = placement.make(first.state_dict(), **options)
    assert [contents(resumed), contents(resumed)] == [epochs[1][7:], epochs[2]]


def test_resume_of_a_resumed_run_counts_from_the_epochs_start(placement: Placement) -> None:
    """huggingface/datasets 8308: the second resume began with the first batch, the first one's state stood still."""
    expected = contents(placement.make())
    found, state = [], None
    while len(found) < NUM_BATCHES:
        loader = placement.make(state)
        loader.set_epoch(0)
        found += take(min(3, NUM_BATCHES - len(found)), loader)
        state = loader.state_dict()
        assert state["batches"] == len(found)
    assert found == expected


def test_restart_does_not_silently_begin_again(placement: Placement, caplog: pytest.LogCaptureFixture) -> None:
    """prime-rl 3332: the iterator was there before the state was loaded: the data began again, the state froze."""
    whole = placement.make()
    epochs = [contents(whole) for _ in range(2)]
    first = placement.make()
    contents(first)
    take(4, first)
    state = first.state_dict()
    placement.restart()
    restarted = placement.make()
    iterator = iter(restarted)
    restarted.load_state_dict(state)
    assert plain(next(iterator)) == epochs[1][4]
    assert restarted.state_dict()["batches"] == 5
    assert contents(iterator) == epochs[1][5:]
    assert caplog.text == ""
    begun = placement.make()
    iterator = iter(begun)
    next(iterator)
    begun.load_state_dict(state)
    for _ in range(2):
        next(iterator)
    assert caplog.text.count("began before load_state_dict") == 1
    assert contents(begun) == epochs[1][4:]
    placement.make(state).set_epoch(0)
    assert "set_epoch(0) discards the loaded state, which is at epoch 1" in caplog.text


def test_resume_with_the_next_epoch_named_says_what_it_leaves_out(
    placement: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    first = placement.make()
    take(4, first)
    middle = first.state_dict()
    for state, words in (
        (middle, "skips the rest of epoch 0, because the loaded state is after 4 batches"),
        ({**middle, "batches": NUM_BATCHES}, ""),
    ):
        caplog.clear()
        resumed = placement.make(state)
        resumed.set_epoch(1)  # for epoch in range(checkpoint["epoch"] + 1, ...)
        assert words in caplog.text
        assert bool(words) == bool(caplog.text)


@pytest.mark.parametrize("change", [{"num_samples": 36}, {"num_samples": 38}])
def test_resume_with_another_data_set_is_refused(change: dict[str, int]) -> None:
    """NeMo RL 2519: the state of another data set skipped the first samples of the new one without a word."""
    state = DataLoader(drawing(), batch_size=4).state_dict()
    with pytest.raises(ConfigError, match="num_samples 37, this loader has"):
        DataLoader(drawing(**change), batch_size=4).load_state_dict(state)


def test_prefetching_does_not_run_ahead_of_the_checkpoint(placement: Placement) -> None:
    """tensorflow 63079: the data service's journal was 4,500 steps ahead of the model. Those steps were skipped."""
    expected = contents(placement.make())
    first = placement.make()
    iterator = iter(first)
    found = [plain(next(iterator)) for _ in range(2)]
    checkpoint = first.state_dict()
    found_later = [plain(next(iterator)) for _ in range(3)]  # trained, not saved: the model goes back
    if placement.job is not None:
        stats = remote.fleet_for(placement.job).stats  # type: ignore[arg-type]
        wait_for(lambda: stats.batches >= 7)  # computed and not delivered
    placement.restart()
    resumed = placement.make(checkpoint)
    assert found + contents(resumed) == expected
    assert found_later == expected[2:5]


def test_resume_with_another_world_size_and_other_endpoints_goes_on(placement: Placement) -> None:
    placement.be(0, 1)
    whole = placement.make(padding=False)
    epochs = [[set(batch[0]) for batch in contents(whole)] for _ in range(2)]
    first = placement.make(padding=False)
    take(6, first)
    state = first.state_dict()
    placement.restart()
    for world_size in (2, 4):
        ranks = []
        for rank in range(world_size):
            placement.be(rank, world_size)
            resumed = placement.make(state, batch_size=4 // world_size, padding=False)
            assert resumed.state_dict() == state
            ranks.append([contents(resumed), contents(resumed)])
        for number, expected in enumerate((epochs[0][6:], epochs[1])):
            for place, samples in enumerate(expected):
                parts = [set(epochs_of[number][place][0]) for epochs_of in ranks if place < len(epochs_of[number])]
                assert set().union(*parts) == samples
                assert sum(map(len, parts)) == len(samples)


@pytest.mark.parametrize("shuffle", [False, True])
def test_restore_at_step_a_million_costs_what_it_costs_at_step_ten(shuffle: bool) -> None:
    data = range(2_000_000)

    def restore(step: int) -> tuple[int, int]:
        """Return the first sample of the next batch, and the function calls that it took to get there."""
        loader: DataLoader[Any] = DataLoader(data, batch_size=1, shuffle=shuffle)  # type: ignore[arg-type]
        state = {**loader.state_dict(), "batches": step}
        assert len(json.dumps(state)) < 1024
        num_calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        gc.disable()
        sys.setprofile(count)
        try:
            loader.load_state_dict(state)
            first = next(iter(loader))
        finally:
            sys.setprofile(None)
            gc.enable()
        assert loader.state_dict()["batches"] == step + 1
        return int(first), num_calls

    for _ in range(2):
        restore(10)  # imports, and what is found out once
    (early, calls_early), (late, calls_late) = restore(10), restore(1_000_000)
    assert calls_late == calls_early
    assert (early, late) == (10, 1_000_000) if not shuffle else early != late


def test_state_at_any_place_is_under_a_kibibyte_and_the_same_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for rank in range(3):
        be_rank(monkeypatch, rank, 3)
        loader: DataLoader[Any] = DataLoader(drawing(), batch_size=2, shuffle=True, seed=-(2**63))
        state = {**loader.state_dict(), "epoch": 2**31, "batches": 5}
        loader.load_state_dict(state)
        loader.set_epoch(2**31)
        take(1, loader)
        states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    assert states[0]["batches"] == 6
    assert len(json.dumps(states[0])) < 1024


class Counting(Endless):
    """Ends, and has other samples after that."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 24:
            self.place += 1
            yield (self.passes * 24 + self.place - 1) % 37
        self.place, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.passes = state["place"], state["passes"]


class Restarting(Endless):
    """As torchdata's: begins at the beginning, unless a state was loaded just before."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.place, self.loaded = self.loaded or 0, None
        while self.place < 37:
            self.place += 1
            yield self.place - 1

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = self.place = state["place"]


# The sampler, batches taken of the first pass (None: all), and the epoch that is named after it. With a part
# taken and no epoch named the state is that of a pass in progress, which others test.
BETWEEN_PASSES = [
    *((kind, taken, 5) for kind in (Endless, Counting, Restarting) for taken in (0, 1, 3)),
    *((kind, 0, None) for kind in (Endless, Counting, Restarting)),
    *((kind, None, named) for kind in (Counting, Restarting) for named in (5, None)),
]


# Workers take the most time, and a sampler is the same with and without them: one case of each.
BETWEEN_PASSES_ANYWHERE = [
    *(pytest.param("here", *case, marks=[pytest.mark.long] * (case[1] == 1)) for case in BETWEEN_PASSES),
    *(pytest.param("workers", *case, marks=[pytest.mark.long] * (case[1] != 3)) for case in BETWEEN_PASSES),
    *(pytest.param("endpoints", *case, marks=pytest.mark.integration) for case in BETWEEN_PASSES),
]


@pytest.mark.parametrize(
    ("where", "kind", "num_taken", "named"), BETWEEN_PASSES_ANYWHERE, indirect=["where"], scope="module"
)
def test_resume_between_passes_of_a_stateful_sampler_goes_on_as_without(
    placement: Placement, kind: type[Endless], num_taken: int | None, named: int | None
) -> None:
    def first_pass() -> DataLoader[Any]:
        loader = placement.make(shuffle=None, sampler=kind())
        if num_taken is None:
            contents(loader)
        elif num_taken:
            take(num_taken, loader)
        if named is not None:
            loader.set_epoch(named)
        return loader

    uninterrupted = first_pass()
    state = first_pass().state_dict()
    resumed = placement.make(state, shuffle=None, sampler=kind())
    assert resumed.state_dict() == state
    for batches in (3, 2):
        assert take(batches, resumed) == take(batches, uninterrupted)


def test_state_without_the_newest_key_can_still_be_loaded() -> None:
    loader: DataLoader[Any] = DataLoader(drawing(), batch_size=4)
    take(3, loader)
    state = loader.state_dict()
    del state["left"]
    resumed: DataLoader[Any] = DataLoader(drawing(), batch_size=4)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["batches"] == 3


@pytest.mark.parametrize("left", [1, {}, {"epoch": -1, "sampler": {}}, {"epoch": 1}, {"epoch": "1", "sampler": {}}])
def test_state_with_a_malformed_left_is_refused(left: object) -> None:
    loader: DataLoader[Any] = DataLoader(drawing(), batch_size=4, sampler=Endless())
    with pytest.raises(ConfigError, match="left is"):
        loader.load_state_dict({**loader.state_dict(), "left": left})

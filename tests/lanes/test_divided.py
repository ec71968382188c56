"""How the source of a loader of lanes divides itself into parts, one for each lane."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from hetero.errors import ConfigError

torch = pytest.importorskip("torch")

from tests.lanes.loaders import BATCH, NUM_LANES, NUM_SAMPLES, loader, numbers, resumed, with_states  # noqa: E402
from tests.support import streams  # noqa: E402
from tests.support.streams import Numbers, Positioned, StatefulNumbers  # noqa: E402


class OfRanks(Numbers):
    """Divides itself by rank and worker, as WebDataset does."""

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = 0, 1
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        elif torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own, count = streams.worker()
        yield from ((number, 0.0) for number in range(rank * count + own, self.num_samples, count * world_size))


@pytest.mark.parametrize("variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "1"}, {"WORLD_SIZE": "2"}, {}])
def test_rank_in_the_environment_does_not_divide_a_lane_again(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert sorted(numbers(loader(OfRanks(100), "replay", end="rest"))) == list(range(100))
    assert dict(os.environ) == before


def test_environment_is_not_written_if_it_has_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    written: list[bytes] = []
    monkeypatch.setattr(os, "putenv", lambda name, _: written.append(name))
    assert sorted(numbers(loader(OfRanks(100), "replay", end="rest"))) == list(range(100))
    assert not {b"RANK", b"WORLD_SIZE"} & set(written)


def test_rank_of_the_process_group_does_not_divide_a_lane_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    made = loader(OfRanks(100), "replay", end="rest", shard=(0, 1))
    assert sorted(numbers(made)) == list(range(100))


class Recorded(Positioned):
    """Records how it is divided, and where it begins."""

    calls: list[Any] = []  # noqa: RUF012

    def hetero_split(self, lane: int, num_lanes: int) -> Recorded:
        assert torch.utils.data.get_worker_info() is None
        self.calls.append((lane, num_lanes))
        return Recorded(self.num_samples, lane, num_lanes)

    def hetero_iterate(self, position: int) -> Iterator[Any]:
        self.calls.append(position)
        return super().hetero_iterate(position)

    def __deepcopy__(self, _: object) -> Recorded:
        raise AssertionError("it divides itself")


def test_source_with_methods_of_its_own_is_divided_and_begun_by_them() -> None:
    batches, states = with_states(Recorded(NUM_SAMPLES), "exactly-once", 9)
    Recorded.calls.clear()
    assert next(iter(resumed(Recorded(NUM_SAMPLES), "exactly-once", states[8]))) == batches[8]
    assert Recorded.calls == [(0, NUM_LANES), BATCH]


def test_source_whose_parts_are_iterated_needs_no_iter() -> None:
    class Divided:
        def hetero_split(self, lane: int, num_lanes: int) -> Positioned:
            return Positioned(NUM_SAMPLES, lane, num_lanes)

    assert sorted(numbers(loader(Divided(), end="rest"))) == list(range(NUM_SAMPLES))


def test_source_that_cannot_be_copied_is_refused() -> None:
    class Locked(Numbers):
        def __deepcopy__(self, _: object) -> Locked:
            raise TypeError("cannot pickle a lock")

    with pytest.raises(ConfigError, match="a Locked cannot be copied for each lane: cannot pickle a lock"):
        next(iter(loader(Locked(100), "replay")))


def test_object_that_the_script_has_is_not_changed() -> None:
    source = StatefulNumbers(NUM_SAMPLES)
    list(itertools.islice(loader(source), 9))
    assert source.state_dict() == {"num_read": 0}

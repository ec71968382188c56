"""Real endpoints: the same batches of lanes as without them, also if endpoints are killed, leave or join."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.control.rank import session as control
from hetero.errors import HeteroError

pytest.importorskip("torch")

from hetero.loaders import crosscheck
from hetero.torch import DataLoader
from tests.support.streams import Numbers
from tests.support.torch.endpoints import ServedJob, imported_script

SCRIPT = """
    import hetero
    from tests.support import streams

    @hetero.dataset(collate_fn=list)
    def served_lanes(num_samples, kind):
        return getattr(streams, kind)(num_samples)

    @hetero.dataset
    def served_index(num_samples):
        return list(range(num_samples))
"""
GOOD = [("exactly-once", "StatefulNumbers"), ("exactly-once", "Positioned"), ("replay", "Numbers")]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with imported_script(tmp_path_factory.mktemp("script"), "served_lanes_script", SCRIPT) as module:
        yield module


@pytest.fixture(scope="module")
def job(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedJob]:
    job = ServedJob(tmp_path_factory.mktemp("job"), Path(script.__file__))
    job.start(3)
    yield job
    job.stop()
    hetero.spec.set_describer(None)


@pytest.fixture
def join(job: ServedJob, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ServedJob]:
    """Return a function. After its call, batches come from endpoints."""

    def call() -> ServedJob:
        monkeypatch.setattr(control, "_session", job)
        return job

    return call


def loader(spec: Any, guarantee: str, **options: Any) -> Any:
    return DataLoader(spec, guarantee=guarantee, **{"batch_size": 8, "lanes": 8, **options})


@pytest.mark.parametrize("end", ["stop", "rest"])
@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_endpoints_deliver_what_this_process_does(
    guarantee: str, kind: str, end: str, script: Any, join: Callable[[], ServedJob]
) -> None:
    spec = script.served_lanes(num_samples=1003, kind=kind)
    expected = list(loader(spec, guarantee, end=end))
    join()
    assert list(loader(spec, guarantee, end=end)) == expected


@pytest.mark.parametrize("num_lanes", [1, 8])
@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_lane_is_read_once_if_no_endpoint_is_lost(
    guarantee: str,
    kind: str,
    num_lanes: int,
    script: Any,
    join: Callable[[], ServedJob],
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = script.served_lanes(num_samples=5003, kind=kind)
    join()
    with caplog.at_level(logging.INFO):
        list(loader(spec, guarantee, lanes=num_lanes))
    assert "was begun anew" not in caplog.text


@pytest.mark.parametrize("lanes", [None, 3])
def test_endpoints_without_a_lane_are_named(
    lanes: int | None, script: Any, join: Callable[[], ServedJob], caplog: pytest.LogCaptureFixture
) -> None:
    join()
    made = loader(script.served_lanes(num_samples=99, kind="Numbers"), "replay", lanes=lanes)
    list(made), list(made)
    assert caplog.text.count("has 1 lane for 3 endpoints, so 2 stay idle. Pass lanes=3") == (lanes is None)


def test_endpoints_resume_from_a_state_of_this_process(script: Any, join: Callable[[], ServedJob]) -> None:
    spec = script.served_lanes(num_samples=1003, kind="StatefulNumbers")
    here = loader(spec, "exactly-once")
    batches, states = [], []
    for batch in here:
        batches.append(batch)
        states.append(here.state_dict())
    join()
    there = loader(spec, "exactly-once")
    there.load_state_dict(states[50])
    assert list(there) == batches[51:]


def disturbed(made: Any, steps: dict[int, Callable[[], None]]) -> list[Any]:
    """Return the batches of a pass. Call the functions after their steps."""
    batches = []
    for step, batch in enumerate(made):
        batches.append(batch)
        time.sleep(0.002)  # endpoints come back while the pass goes on
        steps.get(step, lambda: None)()
    return batches


@pytest.mark.parametrize(("guarantee", "kind"), GOOD)
def test_killed_endpoints_change_no_batch(
    guarantee: str, kind: str, script: Any, join: Callable[[], ServedJob], caplog: pytest.LogCaptureFixture
) -> None:
    spec = script.served_lanes(num_samples=5003, kind=kind)
    expected = list(loader(spec, guarantee))
    job, chance = join(), random.Random(3)

    def kill() -> None:
        assert job.pool is not None
        os.kill(chance.choice(job.pool.pids), signal.SIGKILL)

    with caplog.at_level(logging.INFO):
        found = disturbed(loader(spec, guarantee), dict.fromkeys((20, 200, 400), kill))
    assert found == expected
    assert "was begun anew" in caplog.text


def test_endpoints_that_leave_and_join_change_no_batch(
    script: Any, join: Callable[[], ServedJob], caplog: pytest.LogCaptureFixture
) -> None:
    spec = script.served_lanes(num_samples=8003, kind="StatefulNumbers")
    expected = list(loader(spec, "exactly-once"))
    pool = join().pool
    assert pool is not None
    with caplog.at_level(logging.INFO):
        steps = {20: lambda: pool.resize(1), 400: lambda: pool.resize(3)}
        assert disturbed(loader(spec, "exactly-once"), steps) == expected
    assert "was begun anew" in caplog.text
    assert pool.wait_ready(300.0)


def test_source_that_cannot_be_replayed_is_found_when_a_lane_moves(script: Any, join: Callable[[], ServedJob]) -> None:
    spec = script.served_lanes(num_samples=8003, kind="Drifting")
    pool = join().pool
    assert pool is not None
    with pytest.raises(HeteroError, match="lane [0-7] gave other samples before sample .* cannot be replayed"):
        disturbed(loader(spec, "replay"), {100: lambda: pool.resize(1)})
    pool.resize(3)
    assert pool.wait_ready(300.0)


@pytest.mark.parametrize("num_lanes", [1, 8])
@pytest.mark.parametrize(("guarantee", "kind"), [*GOOD, ("at-most-once", "Numbers")])
def test_batches_that_are_checked_are_the_same(
    guarantee: str,
    kind: str,
    num_lanes: int,
    script: Any,
    join: Callable[[], ServedJob],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The purity check computes a batch twice, and this process computes some batches too."""
    spec = script.served_lanes(num_samples=403, kind=kind)
    options = {"lanes": num_lanes, "name": f"checked {guarantee} {kind} {num_lanes}"}
    expected = list(loader(spec, guarantee, **options))
    job = join()
    monkeypatch.setattr(job.options, "purity_checks", 4)
    monkeypatch.setattr(crosscheck, "LATER_SHARE", 1e9)  # later batches too, at once
    found = list(loader(spec, guarantee, **options))
    if guarantee == "at-most-once":
        # A request may overtake the first one of a lane. Then their samples change places.
        found, expected = (sorted(sample[0] for batch in batches for sample in batch) for batches in (found, expected))
    assert found == expected


def test_registered_iterable_without_a_guarantee_is_refused_with_the_choices(
    script: Any, join: Callable[[], ServedJob]
) -> None:
    join()
    with pytest.raises(HeteroError, match="is iterable, and has no index") as raised:
        next(iter(DataLoader(script.served_lanes(num_samples=99, kind="Numbers"), batch_size=8)))
    for guarantee in ("exactly-once", "replay", "at-most-once"):
        assert f'guarantee="{guarantee}"  ' in str(raised.value)


def test_guarantee_for_a_registered_data_set_with_an_index_is_refused(
    script: Any, join: Callable[[], ServedJob]
) -> None:
    join()
    with pytest.raises(HeteroError, match="has an index, so it needs no"):
        next(iter(loader(script.served_index(num_samples=99), "replay")))


def test_object_that_is_not_registered_is_refused(join: Callable[[], ServedJob]) -> None:
    join()
    with pytest.raises(HeteroError, match="cannot be served by other hosts"):
        loader(Numbers(99), "replay")


@pytest.mark.parametrize("kind", ["Buffered", "Numbers"])
def test_source_that_does_not_keep_the_guarantee_is_refused(
    kind: str, script: Any, join: Callable[[], ServedJob]
) -> None:
    join()
    with pytest.raises(HeteroError, match="other samples after its state|needs a state"):
        next(iter(loader(script.served_lanes(num_samples=99, kind=kind), "exactly-once")))

"""Samples that raise, or end their process, on real endpoints."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from hetero.batches.skips import Skips
from hetero.errors import DatasetError
from hetero.reader.reader import Reader

POISON = 17
"""Of 48 indices in 12 batches of 4, each once."""


def skipping(tools: Any, **arguments: Any) -> list[Any]:
    wanted = tools.requests(tools.spec(**arguments))
    assert sum(POISON in request.work.indices for request in wanted) == 1
    return [replace(request, on_sample_error="skip") for request in wanted]


def summary(told: list[Skips]) -> list[tuple[int, int, str, str]]:
    return [(skips.num_skipped, skips.epoch, skips.listed[0].index, skips.listed[0].exception) for skips in told]


SKIPPED = [(1, 1, "17", "ValueError: sample 17 is broken")]


@pytest.mark.fault("F2")
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("num_endpoints", [1, 3])
def test_skip_gives_local_bytes_for_any_number_of_endpoints(
    job: Any, tools: Any, num_endpoints: int, verify: bool
) -> None:
    job.pool(num_endpoints=num_endpoints)
    wanted = [replace(request, verify=verify) for request in skipping(tools, raise_at=POISON)]
    told: list[Skips] = []
    found = list(Reader(job.fleet(), iter(wanted), on_skips=told.append))
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert summary(told) == SKIPPED
    assert told[0].host in {f"algo-1/{number}" for number in range(num_endpoints)}
    clean = tools.local(job.script, tools.requests(tools.spec()))
    (turn,) = [number for number, request in enumerate(wanted) if POISON in request.work.indices]
    others = [number for number in range(12) if number != turn]
    assert tools.digest([found[n] for n in others]) == tools.digest([clean[n] for n in others])
    indices = found[turn]["index"].tolist()
    at = wanted[turn].work.indices.tolist().index(POISON)
    assert indices[at] == indices[(at + 1) % 4]
    assert sorted({*indices}) == sorted({*wanted[turn].work.indices.tolist()} - {POISON})


def test_skip_is_told_in_its_turn_and_not_before(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    wanted = skipping(tools, raise_at=POISON)
    turn = next(number for number, request in enumerate(wanted) if POISON in request.work.indices)
    told: list[Skips] = []
    fleet = job.fleet()
    fleet.describe(wanted[0].spec)  # or the window would be that of no endpoints, until the first batch is taken
    with Reader(fleet, iter(wanted), on_skips=told.append, prefetch_factor=12) as reader:
        window = reader._window
        tools.wait_for(lambda: len(window.outcomes) == 12)
        for number in range(12):
            next(reader)
            assert len(told) == (number >= turn)


def test_skip_of_a_batch_that_was_asked_for_again_is_told_once(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = skipping(tools, raise_at=POISON, sample_s=0.02)
    told: list[Skips] = []
    fleet = job.fleet()
    found = []
    with Reader(fleet, iter(wanted), on_skips=told.append) as reader:
        for batch in reader:
            found.append(batch)
            if len(found) % 4 == 1:
                os.kill(pool.pids[0], signal.SIGKILL)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.retries > 0
    assert summary(told) == SKIPPED


def test_what_is_raised_when_told_is_raised_instead_and_closes_the_reader(job: Any, tools: Any) -> None:
    job.pool()

    def too_many(skips: Skips) -> None:
        raise DatasetError(f"{skips.num_skipped} too many")

    reader = Reader(job.fleet(), iter(skipping(tools, raise_at=POISON)), on_skips=too_many)
    with pytest.raises(DatasetError, match="1 too many"):
        list(reader)
    assert next(reader, None) is None


@pytest.mark.fault("F2")
def test_sample_that_ends_its_process_fails_by_name_under_either_policy(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2)
    fleet = job.fleet()
    wanted = skipping(tools, kill_at=POISON)
    turn = next(number for number, request in enumerate(wanted) if POISON in request.work.indices)
    reader = Reader(fleet, iter(wanted))
    assert len(list(itertools.islice(reader, turn))) == turn
    text = r"died 3 times .*\b17\b.*on_sample_error='skip' handles exceptions only"
    with pytest.raises(DatasetError, match=text) as caught:
        next(reader)
    indices = ", ".join(str(index) for index in wanted[turn].work.indices)
    assert f"the batch with the indices {indices}. " in str(caught.value)
    tools.wait_for(lambda: len(pool.records) == 2)
    assert pool.num_restarts == 3
    with Reader(fleet, iter(tools.requests(tools.spec()))) as healthy:  # the fleet lives on
        assert len(list(healthy)) == 12

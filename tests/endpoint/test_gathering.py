"""How an endpoint gathers the samples that other hosts keep, and its links. The others answer as the test wants."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import Cancelled, dataset_error
from hetero.batches.fetch import fetch
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest, Helper
from hetero.endpoint.gathering import Gathering
from hetero.endpoint.parts import Links
from hetero.errors import DatasetError
from hetero.spec import DatasetSpec
from hetero.system.waits import MAX_BACKOFF_S
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import MAX_HELPERS, Limits
from tests.support.batch_path.parts_links import HELPERS, Link, Slow

HOMES = np.array([0, 1, 2, 1, 0, 2, 1, 1], np.uint8)


class Gathered:
    """A batch of eight samples with two other owners."""

    def __init__(self, answer: Callable[[Link, list[int]], Any] | None = None, *, owners: Any = HOMES) -> None:
        self.data = Slow(0.0)
        self.built = BuiltDataset.from_object(self.data, collate_fn=list)
        self.answer = answer or (lambda link, indices: [self.data.sample(index) for index in indices])
        self.opened: list[Link] = []
        self.now_s = 0.0
        self.num_refused = 0
        self.is_cancelled = False
        self.links = Links(self.connect, clock=lambda: self.now_s)
        work = IndexedWork(np.arange(len(owners)))
        self.request = BatchRequest(
            spec=DatasetSpec("slow"), work=work, seed=1, epoch=0, position=0, helpers=HELPERS, owners=owners
        )

    def connect(self, helper: Helper) -> Any:
        link = Link(lambda indices: self.answer(link, indices))
        self.opened.append(link)
        return link

    def refuse(self) -> None:
        self.num_refused += 1

    def gathering(self) -> Gathering:
        return Gathering(
            self.request, limits=Limits(), links=self.links, on_refused=self.refuse, clock=lambda: self.now_s
        )

    def compute(self, gathering: Gathering) -> Any:
        def is_cancelled() -> bool:
            return self.is_cancelled

        return fetch(self.built, self.request, cancelled=is_cancelled, positions=gathering.positions)

    def run(self, tools: Any) -> Any:
        with self.gathering() as gathering:
            tools.wait_for(lambda: gathering.wait(is_busy=True))
            return self.compute(gathering)

    def check(self, batch: Any) -> None:
        assert [sample["text"] for sample in batch] == [str(index) for index in range(len(self.request.work.labels))]


def test_each_home_is_asked_for_its_samples(tools: Any) -> None:
    gathered = Gathered()
    gathered.check(gathered.run(tools))
    assert gathered.data.computed == [0, 4]
    asked = sorted(list(request.work.labels) for link in gathered.opened for request in link.requests)
    assert asked == [[1, 3, 6, 7], [2, 5]]


def test_links_stay_open_for_the_next_batch(tools: Any) -> None:
    gathered = Gathered()
    for _ in range(3):
        gathered.run(tools)
    assert len(gathered.opened) == 2
    assert not any(link.is_closed for link in gathered.opened)


def test_large_part_is_asked_for_in_pieces(tools: Any) -> None:
    gathered = Gathered(owners=np.ones(300, np.uint8))
    gathered.check(gathered.run(tools))
    assert sorted(request.work.num_samples for link in gathered.opened for request in link.requests) == [44, 128, 128]
    assert gathered.data.computed == []


@pytest.mark.parametrize(
    "error", [CallFailedError(Fault.UNREACHABLE, "gone"), CallFailedError(Fault.BUSY, "later"), ValueError("odd")]
)
def test_samples_that_a_home_does_not_give_are_computed_here(error: Exception, tools: Any) -> None:
    def answer(_link: Link, indices: list[int]) -> Any:
        raise error

    gathered = Gathered(answer)
    gathered.check(gathered.run(tools))
    assert sorted(gathered.data.computed) == list(range(8))


def test_only_a_lost_endpoint_gets_a_new_link(tools: Any) -> None:
    faults = [Fault.BUSY, Fault.UNREACHABLE]

    def answer(link: Link, indices: list[int]) -> Any:
        raise CallFailedError(faults[0], "no")

    gathered = Gathered(answer, owners=np.array([0, 1], np.uint8))
    gathered.run(tools)
    gathered.run(tools)
    assert len(gathered.opened) == 1
    faults.pop(0)
    gathered.run(tools)
    assert gathered.opened[0].is_closed
    gathered.run(tools)
    assert len(gathered.opened) == 2


class Silent:
    """An answer that does not come before the test allows it."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.data = Slow(0.0)

    def __call__(self, link: Link, indices: list[int]) -> Any:
        while not self.may_answer.wait(0.01):
            if link.cancelled.is_set():
                raise CallFailedError(Fault.CANCELLED, "")
        return [self.data.sample(index) for index in indices]


def test_endpoint_with_nothing_else_to_do_waits_for_five_seconds() -> None:
    gathered = Gathered(Silent())
    with gathered.gathering() as gathering:
        gathered.now_s = 1.0
        assert not gathering.wait(is_busy=True)
        gathered.now_s = 5.99
        assert not gathering.wait(is_busy=False)
        assert not any(map(gathered.links.is_avoided, HELPERS))
        gathered.now_s = 6.01
        assert gathering.wait(is_busy=False)
        gathered.check(gathered.compute(gathering))
    assert all(map(gathered.links.is_avoided, HELPERS))
    with gathered.gathering() as gathering:
        assert gathering.wait(is_busy=False)  # no helper was asked
        gathered.check(gathered.compute(gathering))
    gathered.now_s += MAX_BACKOFF_S
    assert not any(map(gathered.links.is_avoided, HELPERS))


def test_host_that_one_batch_has_waited_for_delays_no_other(caplog: pytest.LogCaptureFixture) -> None:
    gathered = Gathered(Silent())
    with gathered.gathering() as first, gathered.gathering() as second:
        gathered.now_s = 31.0
        assert first.wait(is_busy=True)
        gathered.check(gathered.compute(first))
        gathered.now_s = 31.1
        assert second.wait(is_busy=True)
        gathered.check(gathered.compute(second))
    assert [record.levelname for record in caplog.records if "did not come in time" in record.message] == [
        "WARNING",
        "WARNING",
    ]  # one for each of the two hosts
    gathered.now_s += MAX_BACKOFF_S
    with gathered.gathering() as third:
        gathered.now_s += 31.0
        assert third.wait(is_busy=True)
    assert len([record for record in caplog.records if "did not come in time" in record.message]) == 2


def test_helper_gets_at_most_eight_requests_for_one_batch(tools: Any) -> None:
    gathered = Gathered(owners=np.ones(3_000, np.uint8))
    gathered.check(gathered.run(tools))
    assert sorted(request.work.num_samples for link in gathered.opened for request in link.requests) == [375] * 8


def test_busy_endpoint_does_not_wait_for_ever() -> None:
    gathered = Gathered(Silent())
    with gathered.gathering() as gathering:
        gathered.now_s = 29.0
        assert not gathering.wait(is_busy=True)
        gathered.now_s = 31.0
        assert gathering.wait(is_busy=True)


def test_batch_that_is_cancelled_while_samples_are_missing_is_not_collated() -> None:
    gathered = Gathered(Silent())
    with gathered.gathering() as gathering:
        gathered.now_s = 100.0
        assert gathering.wait(is_busy=False)
    # The reader has left, so the parts are given up while the compute thread begins.
    gathered.is_cancelled = True
    gathered.built.collate_fn = lambda samples: pytest.fail("it collates")
    with pytest.raises(Cancelled):
        gathered.compute(gathering)


def test_second_computation_takes_nothing_of_the_first(tools: Any) -> None:
    gathered = Gathered()
    with gathered.gathering() as gathering:
        tools.wait_for(lambda: gathering.wait(is_busy=True))
        gathered.compute(gathering)
        assert gathering.num_parts == 3
        gathered.data.computed.clear()
        gathered.check(gathered.compute(gathering))
        assert gathering.num_parts == 1
    assert gathered.data.computed == list(range(8))


def test_sample_that_raises_at_home_is_named_here(tools: Any) -> None:
    def answer(_link: Link, indices: list[int]) -> Any:
        raise CallFailedError(Fault.BROKEN, "whatever")

    gathered = Gathered(answer)
    gathered.data.fails_at = 6
    with pytest.raises(DatasetError, match="at sample 6:"):
        gathered.run(tools)


def helpers(count: int) -> list[Helper]:
    return [
        Helper(endpoint_id=f"algo-{number}/0", host="algo-1", address="127.0.0.1:9", incarnation="a")
        for number in range(count)
    ]


def ask(links: Links, helper: Helper) -> None:
    message = Link.message([1])
    links.fetch(helper, message, BatchDecoder(Limits(), request=message), on_call=lambda call: None)


def test_links_that_were_used_longest_ago_are_closed_but_none_in_use() -> None:
    gathered = Gathered(lambda link, indices: [0] * len(indices))
    asked = helpers(MAX_HELPERS + 2)
    with gathered.links._attended(asked[0]) as used:
        for helper in asked[1:]:
            ask(gathered.links, helper)
        assert not used.is_closed  # type: ignore[attr-defined]
        assert [link.is_closed for link in gathered.opened].index(True) == 1
    assert sum(link.is_closed for link in gathered.opened) == 2


def test_link_that_ended_while_it_was_idle_is_opened_anew_for_the_next_part() -> None:
    gathered = Gathered(lambda link, indices: [0] * len(indices))
    (helper,) = helpers(1)
    ask(gathered.links, helper)
    gathered.opened[0].has_ended = True
    with pytest.raises(CallFailedError):
        ask(gathered.links, helper)
    ask(gathered.links, helper)
    assert [link.is_closed for link in gathered.opened] == [True, False]


@pytest.mark.parametrize("found", [[0], "text"], ids=["too few", "no list"])
def test_answer_that_is_no_part_is_computed_here(found: Any, tools: Any) -> None:
    gathered = Gathered(lambda link, indices: found)
    gathered.check(gathered.run(tools))
    assert sorted(gathered.data.computed) == list(range(8))
    assert gathered.num_refused == 0


def test_home_whose_samples_cannot_be_sent_is_reported(tools: Any) -> None:
    error = dataset_error("no", dataset="slow", host="algo-2/0", stage="encode")

    def answer(_link: Link, indices: list[int]) -> Any:
        raise error

    gathered = Gathered(answer)
    gathered.check(gathered.run(tools))
    assert gathered.num_refused == 2


def test_thread_that_does_not_start_costs_only_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gathered = Gathered()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with gathered.gathering() as gathering:
        assert gathering.wait(is_busy=True)
        gathered.check(gathered.compute(gathering))
        assert gathering.num_parts == 1


def test_part_that_comes_late_saves_what_is_missing(tools: Any) -> None:
    """The part of the second home comes when some of its samples are computed here."""
    arrives = Silent()
    gathered = Gathered(arrives, owners=np.array([0, *[1] * 20], np.uint8))
    taken = threading.Event()

    def load(index: int) -> Any:
        sample = Slow.__getitem__(gathered.data, index)
        if len(gathered.data.computed) == 5:
            arrives.may_answer.set()
            tools.wait_for(lambda: all(part.has_ended for part in gathering._parts.asked))
            taken.set()
        return sample

    gathered.data.__class__ = type("Loaded", (Slow,), {"__getitem__": lambda self, index: load(index)})
    with gathered.gathering() as gathering:
        gathered.now_s = 100.0
        assert gathering.wait(is_busy=False)
        gathered.check(gathered.compute(gathering))
    assert taken.is_set()
    assert gathered.data.computed == [0, 20, 19, 18, 17]


def test_failed_part_keeps_no_sample_in_memory(tools: Any) -> None:
    made: list[weakref.ref[Any]] = []

    def answer(_link: Link, indices: list[int]) -> Any:
        raise OSError("gone")

    def sample(index: int) -> Any:
        value = np.full(3, index)
        made.append(weakref.ref(value))
        return {"value": value, "text": str(index)}

    gathered = Gathered(answer)
    gathered.data.sample = sample  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        gathered.check(gathered.run(tools))
        tools.wait_for(lambda: not any(thread.name.startswith("part-") for thread in threading.enumerate()))
        assert made
        assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()

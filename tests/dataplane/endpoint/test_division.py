"""How an endpoint shares a batch with helpers. The helpers are in this process, and answer as the test wants."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from parts_links import HELPERS, Link, Slow

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import fetch
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest, Cancelled, Helper
from hetero.batches.split import SplitDataset
from hetero.dataplane.endpoint.division import Division
from hetero.dataplane.endpoint.parts import Links
from hetero.errors import DatasetError
from hetero.spec import DatasetSpec
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.limits import Limits

NUM_SAMPLES = 24


class Divided:
    """A batch of a data set with two helpers."""

    def __init__(self, data: Slow, answer: Callable[[Link, list[int]], Any] | None = None, **options: Any) -> None:
        self.data = data
        self.built = BuiltDataset.from_object(data, collate_fn=list)
        self.answer = answer or (lambda link, indices: [data.sample(index) for index in indices])
        self.links: dict[str, Link] = {}
        self.num_refused = 0
        self.is_cancelled = False
        work = IndexedWork(np.arange(NUM_SAMPLES))
        self.request = BatchRequest(
            spec=DatasetSpec("slow"), work=work, seed=1, epoch=0, position=0, helpers=HELPERS, **options
        )

    def connect(self, helper: Helper) -> Any:
        link = self.links[helper.endpoint_id] = Link(lambda indices: self.answer(link, indices))
        return link

    def refuse(self) -> None:
        self.num_refused += 1

    def compute(self) -> Any:
        with Division(
            self.request,
            self.built,
            limits=Limits(),
            links=Links(self.connect),
            on_refused=self.refuse,
        ) as division:
            cancelled = lambda: self.is_cancelled  # noqa: E731
            positions = functools.partial(division.positions, is_cancelled=cancelled)
            batch = fetch(self.built, self.request, cancelled=cancelled, positions=positions)
            self.num_parts = division.num_parts
            return batch

    def check(self, batch: Any) -> None:
        assert [sample["text"] for sample in batch] == [str(index) for index in range(NUM_SAMPLES)]
        assert all((sample["value"] == index).all() for index, sample in enumerate(batch))


def wait_for_ends(divided: Divided, wait_for: Callable[..., None]) -> None:
    wait_for(lambda: not any(thread.name.startswith("part-") for thread in threading.enumerate()))


def test_batch_that_takes_long_is_computed_in_parts(tools: Any) -> None:
    divided = Divided(data := Slow())
    divided.check(divided.compute())
    assert sorted(divided.links) == ["algo-2/0", "algo-3/0"]
    assert divided.num_parts == 3
    asked = [index for name in sorted(divided.links) for index in divided.links[name].requests[0].work.labels]
    assert data.computed + asked == list(range(NUM_SAMPLES))
    for link in divided.links.values():
        (request,) = link.requests
        assert (request.is_part, request.is_anew, request.verify, request.helpers) == (True, False, False, ())
    wait_for_ends(divided, tools.wait_for)


def test_short_batch_is_not_divided() -> None:
    divided = Divided(Slow(0.001))
    divided.check(divided.compute())
    assert (divided.links, divided.num_parts) == ({}, 1)


def test_samples_that_may_change_on_their_way_are_computed_here() -> None:
    divided = Divided(Slow())
    divided.data.sample = lambda index: {index}  # type: ignore[method-assign]
    assert divided.compute() == [{index} for index in range(NUM_SAMPLES)]
    assert (divided.links, divided.num_refused) == ({}, 1)


def failing(error: Exception) -> Callable[[Link, list[int]], Any]:
    def answer(_link: Link, _indices: list[int]) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        failing(CallFailedError(Fault.UNREACHABLE, "gone")),
        failing(OSError("no descriptors")),
        lambda link, indices: [0] * (len(indices) - 1),
        lambda link, indices: "text",
    ],
    ids=["lost", "no descriptors", "too few", "no list"],
)
def test_part_that_a_helper_does_not_give_is_computed_here(answer: Any, tools: Any) -> None:
    divided = Divided(data := Slow(), answer)
    divided.check(divided.compute())
    assert sorted(data.computed) == list(range(NUM_SAMPLES))
    assert (divided.num_refused, divided.num_parts) == (0, 1)
    wait_for_ends(divided, tools.wait_for)


def test_helper_whose_samples_cannot_be_sent_is_the_last_one_asked(tools: Any) -> None:
    from hetero.batches.failures import dataset_error

    error = dataset_error("no", dataset="slow", host="algo-2/0", stage="encode")
    divided = Divided(Slow(), failing(error))
    divided.check(divided.compute())
    assert divided.num_refused == 2
    wait_for_ends(divided, tools.wait_for)


def silent(link: Link, _indices: list[int]) -> Any:
    link.cancelled.wait(30.0)
    raise CallFailedError(Fault.CANCELLED, "")


def test_part_that_does_not_come_is_computed_here_and_given_up(tools: Any) -> None:
    divided = Divided(data := Slow(), silent)
    divided.check(divided.compute())
    assert sorted(data.computed) == list(range(NUM_SAMPLES))
    assert all(link.cancelled.is_set() for link in divided.links.values())
    wait_for_ends(divided, tools.wait_for)


def test_batch_that_raises_gives_up_its_parts(tools: Any) -> None:
    divided = Divided(Slow(0.03, fails_at=5), silent)
    with pytest.raises(DatasetError, match="sample 5"):
        divided.compute()
    assert all(link.cancelled.is_set() for link in divided.links.values())
    wait_for_ends(divided, tools.wait_for)


def test_thread_that_does_not_start_costs_only_its_part(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    divided = Divided(Slow())
    monkeypatch.setattr(threading.Thread, "start", fail)
    divided.check(divided.compute())
    assert divided.num_parts == 1


def test_failed_part_keeps_no_sample_in_memory(tools: Any) -> None:
    divided = Divided(Slow(), failing(OSError("gone")))
    divided.check(divided.compute())
    wait_for_ends(divided, tools.wait_for)
    made: list[weakref.ref[Any]] = []

    def sample(index: int) -> Any:
        value = np.full(3, index)
        made.append(weakref.ref(value))
        return {"value": value, "text": str(index)}

    divided.data.sample = sample  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        divided.check(divided.compute())
        wait_for_ends(divided, tools.wait_for)
        assert made
        assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()


def test_part_that_comes_late_is_used_for_what_is_missing(tools: Any) -> None:
    """The last part comes when half of it is computed here."""

    def answer(link: Link, indices: list[int]) -> Any:
        if link is divided.links["algo-3/0"]:
            tools.wait_for(lambda: indices[-2] in divided.data.computed)
        return [divided.data.sample(index) for index in indices]

    divided = Divided(Slow(0.05), answer)
    divided.check(divided.compute())
    computed = divided.data.computed
    assert NUM_SAMPLES - 1 in computed
    assert len(computed) == len({*computed}) < NUM_SAMPLES
    wait_for_ends(divided, tools.wait_for)


def test_cancelled_batch_gives_up_its_parts(tools: Any) -> None:
    def wait(link: Link, indices: list[int]) -> Any:
        divided.is_cancelled = True
        return silent(link, indices)

    divided = Divided(Slow(), wait)
    with pytest.raises(Cancelled):
        divided.compute()
    assert all(link.cancelled.is_set() for link in divided.links.values())
    wait_for_ends(divided, tools.wait_for)


def test_purity_check_asks_twice_and_finds_a_helper_that_differs(tools: Any) -> None:
    num_asked = 0

    def answer(_link: Link, indices: list[int]) -> Any:
        nonlocal num_asked
        num_asked += 1
        samples = [divided.data.sample(index) for index in indices]
        if num_asked == 4:
            samples[0]["text"] = "other"
        return samples

    divided = Divided(Slow(), answer, verify=True)
    with pytest.raises(DatasetError, match=r"computed twice, batch\[\d+\]\['text'\]"):
        divided.compute()
    assert num_asked == 4
    wait_for_ends(divided, tools.wait_for)


def test_sample_that_raises_in_a_part_raises_here(tools: Any) -> None:
    divided = Divided(Slow(fails_at=20))
    with pytest.raises(DatasetError, match="sample 20: ValueError: a broken sample"):
        divided.compute()
    wait_for_ends(divided, tools.wait_for)


class SlowSplit(Slow):
    """Samples in two parts, as a cache needs them."""

    def load(self, index: int) -> Any:
        return self[index]

    def augment(self, sample: Any) -> Any:
        return sample


def test_purity_check_asks_helpers_for_samples_that_are_loaded_anew(tools: Any) -> None:
    divided = Divided(data := SlowSplit(), verify=True)
    divided.built.split = divided.built.dataset = SplitDataset(data)
    asked: list[bool] = []
    answer = divided.answer

    def noting(link: Link, indices: list[int]) -> Any:
        asked.append(link.requests[-1].is_anew)
        return answer(link, indices)

    divided.answer = noting
    divided.check(divided.compute())
    assert asked == [False, False, True, True]
    wait_for_ends(divided, tools.wait_for)

"""Samples that raise under ``on_sample_error="skip"``: which samples replace them, and what is reported."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.build import BuiltDataset
from hetero.batches.failures import Cancelled, exception_line, index_text
from hetero.batches.fetch import fetch
from hetero.batches.skips import MAX_LISTED, Skip, Skips
from hetero.errors import ConfigError, DatasetError
from tests.support.batches.subjects import Augmented, failure, request, same, torch

SIZE = 20
INDICES = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=12)
POISON = st.sets(st.integers(0, SIZE - 1), max_size=SIZE)


class Poisoned(Augmented):
    """Some samples draw, and raise then."""

    def __init__(self, poison: Any, size: int = SIZE) -> None:
        super().__init__(size)
        self.poison = frozenset(poison)

    def __getitem__(self, index: int) -> Any:
        if index in self.poison:
            raise ValueError(f"sample {index} is broken, says {random.random():.0f}")
        return super().__getitem__(index)


class Together(Poisoned):
    """Lacks a ``__getitem__`` that works. A batch raises as a whole."""

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> Any:
        broken = [index for index in indices if index in self.poison]
        if broken:
            raise ValueError(f"samples {broken} are broken")
        return [(index, float(np.random.rand())) for index in indices]


class Table(Together):
    """Returns a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return np.array(super().__getitems__(indices))


def same_list(samples: Any) -> Any:
    return samples


def built(dataset: Any, seeding: Any = "sample", collate_fn: Any = same_list) -> BuiltDataset:
    return BuiltDataset.from_object(dataset, collate_fn=collate_fn, seeding=seeding)


def skipping(indices: Any = (3, 1, 4), **options: Any) -> Any:
    return request(indices, on_sample_error="skip", **options)


def substitutes(indices: list[int], poison: Any) -> list[int]:
    """Return the position of each sample's substitute in the batch, found by walking."""
    found = []
    for position in range(len(indices)):
        at = position
        while indices[at] in poison:
            at = (at + 1) % len(indices)
        found.append(at)
    return found


def occurrences(indices: list[int]) -> Any:
    seen: Counter[int] = Counter()
    counts = []
    for index in indices:
        counts.append(seen[index])
        seen[index] += 1
    return np.array(counts, dtype=np.uint32)


@pytest.mark.fault("F2")
@given(indices=INDICES, poison=POISON)
def test_skip_any_poison_gives_the_models_batch(indices: list[int], poison: set[int]) -> None:
    wanted = skipping(indices, occurrences=occurrences(indices))
    told: list[Skips] = []
    broken = [index for index in indices if index in poison]
    if len(broken) == len(indices):
        with pytest.raises(DatasetError, match="there is no substitute") as caught:
            fetch(built(Poisoned(poison)), wanted, on_skips=told.append)
        assert failure(caught).sample_index == str(indices[0])
        assert told == []
        return
    clean = fetch(built(Augmented()), request(indices, occurrences=occurrences(indices)))
    found = fetch(built(Poisoned(poison)), wanted, host="algo-1/0", on_skips=told.append)
    assert same(found, [clean[at] for at in substitutes(indices, poison)])
    assert len({id(sample) for sample in found}) == len(indices)  # collation may write to them
    if not broken:
        assert told == []
        return
    (skips,) = told
    assert (skips.num_skipped, skips.epoch, skips.host) == (len(broken), 2, "algo-1/0")
    assert [skip.index for skip in skips.listed] == list(map(str, broken))
    assert skips.listed[0].exception.startswith(f"ValueError: sample {broken[0]} is broken")


@given(indices=INDICES, poison=POISON, kind=st.sampled_from((Poisoned, Together, Table)))
def test_skip_with_one_seed_is_pure_and_takes_the_models_samples(
    indices: list[int], poison: set[int], kind: type[Poisoned]
) -> None:
    def compute() -> Any:
        return fetch(built(kind(poison), "batch"), skipping(indices))

    if set(indices) <= poison:
        with pytest.raises(DatasetError, match="there is no substitute"):
            compute()
        return
    found = compute()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert same(found, compute())
    taken = [sample["index"] if kind is Poisoned else int(sample[0]) for sample in found]
    assert taken == [indices[at] for at in substitutes(indices, poison)]
    assert isinstance(found, np.ndarray if kind is Table else list)
    if not set(indices) & poison:
        assert same(found, fetch(built(kind(poison), "batch"), request(indices)))


@pytest.mark.parametrize(("kind", "seeding"), [(Poisoned, "sample"), (Poisoned, "batch"), (Together, "batch")])
def test_raise_is_the_default_for_any_seeding(kind: Any, seeding: Any) -> None:
    with pytest.raises(DatasetError, match="broken") as caught:
        fetch(built(kind({1}), seeding), request())
    assert failure(caught).sample_index == ("" if kind is Together else "1")
    assert isinstance(caught.value.__cause__, ValueError)


def test_skip_through_a_subset_names_the_samplers_index() -> None:
    told: list[Skips] = []
    for dataset in (Poisoned({14}), Together({14})):
        subset = torch.utils.data.Subset(dataset, [10, 11, 12, 13, 14])
        fetch(built(subset, "batch"), skipping((3, 4, 1)), on_skips=told.append)
    assert [skips.listed[0].index for skips in told] == ["4", "4"]


def test_skip_sample_that_works_once_only_stands_in_for_nobody() -> None:
    class Moody(Augmented):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[int] = Counter()

        def __getitem__(self, index: int) -> Any:
            self.seen[index] += 1
            if index == 0 or (index == 1 and self.seen[1] > 1):
                raise OSError("the network was down")
            return index

    assert fetch(built(Moody()), skipping((0, 1, 2))) == [2, 1, 2]
    with pytest.raises(DatasetError, match="network was down.*no substitute"):
        fetch(built(Moody()), skipping((0, 1)))


def test_skip_names_nobody_where_each_sample_alone_works() -> None:
    class Crowded(Augmented):
        def __getitems__(self, indices: list[int]) -> list[int]:
            if len(indices) > 2:
                raise MemoryError("too many at once")
            return indices

    with pytest.raises(DatasetError, match="too many at once.*each sample alone works"):
        fetch(built(Crowded(), "batch"), skipping())


def test_skip_does_not_cover_collation_nor_an_index_outside_of_the_data_set() -> None:
    def broken(samples: list[Any]) -> Any:
        raise ValueError("sizes differ")

    told: list[Skips] = []
    with pytest.raises(DatasetError, match="while samples were collated: ValueError: sizes differ"):
        fetch(built(Poisoned({1}), collate_fn=broken), skipping(), on_skips=told.append)
    with pytest.raises(DatasetError, match="IndexError: .* \\(index 20 is out of range: the data set has 20 samples"):
        fetch(built(list(range(20))), skipping((3, 20)), on_skips=told.append)
    assert told == []


def test_skip_of_keys_works_like_that_of_integers() -> None:
    class Keyed:
        def __getitem__(self, key: str) -> str:
            return {"a": "first", "b": "second"}[key]

    told: list[Skips] = []
    assert fetch(built(Keyed()), skipping(("c\n", "a", "b")), on_skips=told.append) == ["first", "first", "second"]
    assert told[0].listed == (Skip(index="'c\\n'", exception="KeyError: 'c\\n'"),)


def test_skip_lists_some_and_counts_all() -> None:
    told: list[Skips] = []
    fetch(built(Poisoned(range(299), size=300)), skipping(range(300)), on_skips=told.append)
    assert (told[0].num_skipped, len(told[0].listed)) == (299, MAX_LISTED)


def test_skip_keeps_no_sample_alive() -> None:
    class Sample:
        pass

    class Objects(Poisoned):
        def __getitem__(self, index: int) -> Any:
            sample = Sample()
            living.append(weakref.ref(sample))
            super().__getitem__(index)
            return sample

    living: list[Any] = []
    gc.disable()  # no cycle may hold a batch until the collector runs
    try:
        fetch(built(Objects({1})), skipping(), on_skips=lambda skips: None)
        assert len(living) == 4
        assert [reference for reference in living if reference() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize(("kind", "seeding"), [(Poisoned, "sample"), (Poisoned, "batch"), (Together, "batch")])
def test_skip_may_be_cancelled_while_substitutes_are_computed(kind: Any, seeding: Any) -> None:
    def polls(limit: int) -> Any:
        left = iter(range(limit))
        return lambda: next(left, None) is None

    enough = next(number for number in range(1, 50) if not _is_cancelled(kind, seeding, polls(number)))
    assert enough >= 3  # more often than a batch without substitutes asks
    assert all(_is_cancelled(kind, seeding, polls(number)) for number in range(enough))


def _is_cancelled(kind: Any, seeding: Any, cancelled: Any) -> bool:
    try:
        fetch(built(kind({1, 3}), seeding), skipping((1, 3, 4)), cancelled=cancelled)
    except Cancelled:
        return True
    return False


def test_purity_check_passes_pure_poison_and_tells_it_once() -> None:
    told: list[Skips] = []
    fetch(built(Poisoned({1})), skipping(verify=True), on_skips=told.append)
    assert [skips.num_skipped for skips in told] == [1]


def test_purity_check_finds_a_sample_that_raises_only_once() -> None:
    class Moody(Augmented):
        raised = False

        def __getitem__(self, index: int) -> Any:
            if index == 4 and not self.raised:
                self.raised = True
                raise OSError("the network was down")
            return 0  # the batch does not show it

    with pytest.raises(DatasetError, match="sample 4 raised only once") as caught:
        fetch(built(Moody()), skipping(verify=True))
    assert (failure(caught).stage, failure(caught).sample_index) == ("purity", "4")


@pytest.mark.parametrize("options", [{"on_sample_error": "ignore"}, {"on_sample_error": "skip", "collate": False}])
def test_request_with_a_policy_that_cannot_be_is_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"'ignore', expected 'raise' or 'skip'|without collation"):
        request((1,), **options)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def noted() -> Exception:
    error = ValueError("bad")
    error.__notes__ = ["a note"]  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad\nsecond line"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (ValueError("\n"), "ValueError:"),
        (KeyError("a"), "KeyError: 'a'"),
        (SyntaxError("invalid syntax", ("x.py", 1, 1, "a b", 1, 2)), "SyntaxError: invalid syntax"),
        (noted(), "ValueError: bad"),
        (ValueError("\x1b[31m\u202e"), "ValueError: \\x1b[31m\\u202e"),
        (ValueError("x" * 500), "ValueError: " + "x" * 145 + "..."),
        (ValueError("\x1b" * 500), "ValueError: " + ("\\x1b" * 40)[:145] + "..."),
    ],
)
def test_exception_line_is_one_short_printable_line(error: Exception, line: str) -> None:
    assert exception_line(error) == line


def test_exception_line_of_an_exception_without_words_says_its_type() -> None:
    assert "Unspeakable" in exception_line(Unspeakable())
    assert index_text("x" * 200) == "'" + "x" * 156 + "..."
